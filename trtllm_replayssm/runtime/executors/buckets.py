"""The sizes that steps are captured at. A step runs in the smallest that holds it; the rest is padding."""

from bisect import bisect_left
from collections.abc import Sequence

from trtllm_replayssm.config import CudaGraphConfig
from trtllm_replayssm.errors import ConfigError

_SMALL_BATCHES = (1, 2, 4, 8)
_BATCH_STEP = 8  # below this, matrix products take no less time
_KEY_BLOCK = 512
_SHORTEST_PROMPT = 32  # below it, too


def batch_buckets(max_batch_size: int, config: CudaGraphConfig) -> tuple[int, ...]:
    """Return the batch sizes to capture, ascending.

    By default 1, 2, 4, 8, then multiples of 8, about four to every doubling, up to the largest batch: a padded step
    has at most 7 rows of padding, or a fifth.

    Args:
        max_batch_size: most rows of a step.
        config: ``batch_sizes`` names them instead; ``max_batch_size`` captures none above it.

    Raises:
        ConfigError: a batch size above max_batch_size.
    """
    if config.batch_sizes is not None:
        if (largest := max(config.batch_sizes)) > max_batch_size:
            raise ConfigError(
                f"cuda_graph_config: batch_sizes: found {largest}; needed at most max_batch_size ({max_batch_size})."
            )
        return tuple(sorted(set(config.batch_sizes)))
    largest = max_batch_size if config.max_batch_size is None else min(config.max_batch_size, max_batch_size)
    sizes, size = list(_SMALL_BATCHES), _SMALL_BATCHES[-1]
    while size < largest:
        doubling = 1 << (size.bit_length() - 1)
        size += max(_BATCH_STEP, doubling // 4)
        sizes.append(size)
    return (*(size for size in sizes if size < largest), largest)


def key_length_buckets(capacity: int) -> tuple[int, ...]:
    """Return the key lengths to capture, ascending: 512, doubled up to the caches' capacity.

    So the attention of a step costs what its longest running sequence asks for, and at most twice that.
    """
    lengths, length = [], _KEY_BLOCK
    while length < capacity:
        lengths.append(length)
        length *= 2
    return (*lengths, capacity)


def prompt_buckets(longest: int, window: int) -> tuple[int, ...]:
    """Return the tokens of prompt pieces to capture, ascending: powers of two from 32 up to the longest, and that.

    Args:
        longest: tokens of the longest piece that is captured; 0 for none.
        window: most tokens of a decode or verification window; what is no longer is no prompt's piece.
    """
    lengths, length = [], _SHORTEST_PROMPT
    while length < longest:
        lengths.append(length)
        length *= 2
    return tuple(length for length in (*lengths, longest) if length > window)


def captured_prompt(config: CudaGraphConfig | None) -> int | None:
    """Return the longest prompt piece that a configuration captures; None where it captures nothing at all."""
    return None if config is None else config.max_prompt_tokens


def bucket_of(buckets: Sequence[int], size: int) -> int | None:
    """Return the smallest bucket that holds ``size``; None where none does."""
    index = bisect_left(buckets, size)
    return buckets[index] if index < len(buckets) else None
