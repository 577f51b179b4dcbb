"""ReplaySSM for TensorRT users: checkpoint-and-ring decode of hybrid models, with lossless rollback of draft tokens.

The public names. All but the base of the errors are imported when touched, so that ``import trtllm_replayssm`` stays
light.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from trtllm_replayssm.errors import ReplaySSMError

if TYPE_CHECKING:
    from trtllm_replayssm.config import (
        CudaGraphConfig,
        DraftTargetDecodingConfig,
        GuidedDecodingParams,
        KvCacheConfig,
        MTPDecodingConfig,
        NGramDecodingConfig,
        ReplayConfig,
        SamplingParams,
        SchedulerConfig,
    )
    from trtllm_replayssm.runtime.handle import RequestHandle
    from trtllm_replayssm.runtime.llm import LLM
    from trtllm_replayssm.runtime.outputs import CompletionOutput, Logprob, RequestOutput

if "torch" not in sys.modules:
    # torch's CPU threads spin while they wait for work. A step of a small model has hundreds of short waits, and on a
    # machine with other work each spins away the time slice of the thread that it waits for: generation was measured
    # 40 to 70 times slower. The OpenMP library reads this once, when torch loads it; a user's own value stays.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "CudaGraphConfig",
    "DraftTargetDecodingConfig",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "Logprob",
    "MTPDecodingConfig",
    "NGramDecodingConfig",
    "ReplayConfig",
    "ReplaySSMError",
    "RequestHandle",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "__version__",
]

_LAZY = {
    "CudaGraphConfig": "trtllm_replayssm.config",
    "DraftTargetDecodingConfig": "trtllm_replayssm.config",
    "GuidedDecodingParams": "trtllm_replayssm.config",
    "KvCacheConfig": "trtllm_replayssm.config",
    "MTPDecodingConfig": "trtllm_replayssm.config",
    "NGramDecodingConfig": "trtllm_replayssm.config",
    "ReplayConfig": "trtllm_replayssm.config",
    "SamplingParams": "trtllm_replayssm.config",
    "SchedulerConfig": "trtllm_replayssm.config",
    "RequestHandle": "trtllm_replayssm.runtime.handle",
    "LLM": "trtllm_replayssm.runtime.llm",
    "CompletionOutput": "trtllm_replayssm.runtime.outputs",
    "Logprob": "trtllm_replayssm.runtime.outputs",
    "RequestOutput": "trtllm_replayssm.runtime.outputs",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
