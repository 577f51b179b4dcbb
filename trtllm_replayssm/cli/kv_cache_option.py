"""The options of the memory for states, and of what prompts that begin alike share in it."""

from typing import Annotated, Any

import typer

from trtllm_replayssm.config import KvCacheConfig
from trtllm_replayssm.errors import ConfigError

FreeGpuMemoryFraction = Annotated[
    float | None,
    typer.Option(
        "--free_gpu_memory_fraction",
        help="Without --max_batch_size: part of the GPU memory beside weights and steps that slots take. By default "
        f"{KvCacheConfig().free_gpu_memory_fraction}.",
    ),
]
EnableBlockReuse = Annotated[
    bool, typer.Option("--enable_block_reuse", help="Prompts that begin alike share what was computed for them.")
]
TokensPerBlock = Annotated[
    int | None,
    typer.Option(
        "--tokens_per_block",
        help=f"They share multiples of so many tokens. By default {KvCacheConfig().tokens_per_block}.",
    ),
]
TokensPerSnapshot = Annotated[
    int | None,
    typer.Option(
        "--tokens_per_snapshot",
        help="Every so many tokens of a prompt can be continued. By default its first 1, 2, 4, 8 and so on blocks.",
    ),
]
DeviceCacheSize = Annotated[
    int | None, typer.Option("--device_cache_size", help="Bytes on the device for that. By default 1 GiB.")
]
HostCacheSize = Annotated[
    int | None, typer.Option("--host_cache_size", help="Bytes of host memory for that. By default none.")
]


def kv_cache_config(
    *,
    free_gpu_memory_fraction: float | None,
    enable_block_reuse: bool,
    tokens_per_block: int | None,
    tokens_per_snapshot: int | None,
    device_cache_size: int | None,
    host_cache_size: int | None,
) -> KvCacheConfig:
    """Make the config of the options.

    Raises:
        ConfigError: a value out of range, or one that says nothing without ``enable_block_reuse``.
    """
    wishes: dict[str, Any] = {
        "tokens_per_block": tokens_per_block,
        "tokens_per_snapshot": tokens_per_snapshot,
        "device_cache_size": device_cache_size,
        "host_cache_size": host_cache_size,
    }
    given = {name: wish for name, wish in wishes.items() if wish is not None}
    if given and not enable_block_reuse:
        raise ConfigError(f"{', '.join(given)}: found without --enable_block_reuse; needed both or neither.")
    if free_gpu_memory_fraction is not None:
        given["free_gpu_memory_fraction"] = free_gpu_memory_fraction
    return KvCacheConfig(enable_block_reuse=enable_block_reuse, **given)
