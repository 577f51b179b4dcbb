"""The options of the memory for states, and of what prompts that begin alike share in it."""

from typing import Annotated

import typer

from trtllm_replayssm.config import KvCacheConfig

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
