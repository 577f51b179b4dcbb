"""From options that a command or a Triton model's parameters may leave out to what takes them."""

from typing import Any

from trtllm_replayssm.config import KvCacheConfig
from trtllm_replayssm.errors import ConfigError


def given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None, so that the others have the defaults of whatever takes them."""
    return {name: option for name, option in options.items() if option is not None}


def kv_cache_config(
    *,
    free_gpu_memory_fraction: float | None,
    enable_block_reuse: bool,
    tokens_per_block: int | None,
    tokens_per_snapshot: int | None,
    device_cache_size: int | None,
    host_cache_size: int | None,
    switch: str = "--enable_block_reuse",
) -> KvCacheConfig:
    """Make the config of the options; ``switch`` is how whoever gives them spells ``enable_block_reuse``.

    Raises:
        ConfigError: a value out of range, or one that says nothing without ``enable_block_reuse``.
    """
    of_reuse = given(
        tokens_per_block=tokens_per_block,
        tokens_per_snapshot=tokens_per_snapshot,
        device_cache_size=device_cache_size,
        host_cache_size=host_cache_size,
    )
    if of_reuse and not enable_block_reuse:
        raise ConfigError(f"{', '.join(of_reuse)}: found without {switch}; needed both or neither.")
    memory = given(free_gpu_memory_fraction=free_gpu_memory_fraction)
    return KvCacheConfig(enable_block_reuse=enable_block_reuse, **of_reuse, **memory)
