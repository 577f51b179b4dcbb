"""From a user's wish for speculation to a drafter."""

from dataclasses import dataclass
from pathlib import Path

from trtllm_replayssm.config import (
    CudaGraphConfig,
    DecodingConfig,
    DraftTargetDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    ReplayConfig,
)
from trtllm_replayssm.contract import defaults, protocol
from trtllm_replayssm.contract.geometry import EngineLimits
from trtllm_replayssm.contract.memory_plan import Beside
from trtllm_replayssm.errors import ConfigError, ReplaySSMError
from trtllm_replayssm.runtime import settings
from trtllm_replayssm.runtime.executors.base import Executor
from trtllm_replayssm.runtime.opening import open_executor, open_mtp_head, planned_bytes, planned_head_bytes
from trtllm_replayssm.runtime.speculative.adaptive import AdaptiveDrafter
from trtllm_replayssm.runtime.speculative.base import Drafter, HiddenStateDrafter, NoDrafter
from trtllm_replayssm.runtime.speculative.draft_model import DraftModelDrafter
from trtllm_replayssm.runtime.speculative.mtp import MtpDrafter
from trtllm_replayssm.runtime.speculative.ngram import NGramDrafter
from trtllm_replayssm.runtime.tokenizer import Tokenizer

_CONFIGS = (NGramDecodingConfig, DraftTargetDecodingConfig, MTPDecodingConfig)


def max_draft_len(config: object, drafter: object) -> int:
    """Return the most drafts of a step, 0 without speculation, once both wishes are of a known kind.

    Args:
        config: a ``SpeculativeConfig``, or None.
        drafter: a ``Drafter`` of the user's own, or None.

    Raises:
        ConfigError: both are there, or one is something else.
    """
    if config is not None and drafter is not None:
        raise ConfigError("drafter: found together with speculative_config; needed one of the two.")
    if drafter is not None and not isinstance(drafter, Drafter):
        raise ConfigError(
            f"drafter: found {type(drafter).__name__}; needed an object with max_draft_len, begin, observe, propose "
            f"and end."
        )
    if drafter is not None:
        if type(drafter.max_draft_len) is not int or drafter.max_draft_len < 0:
            raise ConfigError(
                f"drafter: found max_draft_len {drafter.max_draft_len!r}; needed a whole number, 0 or more."
            )
        return drafter.max_draft_len
    if config is None:
        return 0
    if isinstance(config, _CONFIGS):
        return config.max_draft_len
    known = ", ".join(known.__name__ for known in _CONFIGS)
    raise ConfigError(f"speculative_config: found {type(config).__name__}; needed {known}.")


def reads_hidden_states(config: object, drafter: object) -> bool:
    """Say whether the drafts to come are made of the model's hidden states."""
    return isinstance(config, MTPDecodingConfig) or isinstance(drafter, HiddenStateDrafter)


@dataclass(frozen=True)
class Target:
    """The model whose tokens are drafted.

    Attributes:
        executor: runs it.
        limits: what its requests are held to.
        options: how it was opened.
        tokenizer: of its folder, or None.
        folder: where it is.
        checkpoint_dir: where its weights are, if not there.
    """

    executor: Executor
    limits: EngineLimits
    options: settings.Options
    tokenizer: Tokenizer | None
    folder: Path
    checkpoint_dir: Path | None


def make_drafter(config: DecodingConfig | None, drafter: Drafter | None, target: Target) -> Drafter:
    """Make the drafter that ``max_draft_len`` has passed.

    Args:
        config: where drafts come from.
        drafter: the user's own, instead.
        target: whose tokens are drafted.

    Raises:
        ReplaySSMError: the draft model cannot be opened or has another vocabulary, or the target has no head.
    """
    if config is None:
        return NoDrafter() if drafter is None else drafter
    made: Drafter
    if isinstance(config, DraftTargetDecodingConfig):
        made = _draft_model(config, target)
    elif isinstance(config, MTPDecodingConfig):
        made = MtpDrafter(open_mtp_head(target.folder, target.checkpoint_dir, target.executor), config.max_draft_len)
    else:
        assert isinstance(config, NGramDecodingConfig), "max_draft_len knows the kinds"
        made = NGramDrafter(config)
    return adapted(made, config)


def adapted(drafter: Drafter, config: DecodingConfig) -> Drafter:
    """Let a drafter of a configuration make as many drafts as that wants; itself where it wants all of them."""
    is_fixed = not config.adaptive and config.max_concurrency is None and config.acceptance_rate_threshold is None
    return drafter if is_fixed else AdaptiveDrafter(drafter, config, is_free=isinstance(config, NGramDecodingConfig))


def device_bytes(drafter: Drafter) -> int:
    """Return what a drafter of ours takes on the device."""
    inner = drafter.drafter if isinstance(drafter, AdaptiveDrafter) else drafter
    return inner.device_bytes if isinstance(inner, DraftModelDrafter | MtpDrafter) else 0


def _draft_model(config: DraftTargetDecodingConfig, target: Target) -> DraftModelDrafter:
    folder = Path(config.speculative_model)
    options = _draft_options(config, target.limits, target.options.cuda_graph_config)
    try:
        executor, limits = open_executor(folder, "auto", options, str(target.executor.device), None)
    except ReplaySSMError as error:
        raise type(error)(f"speculative_model: {error.message}") from error
    try:
        _check_vocabulary(folder, executor, target)
    except ReplaySSMError:
        executor.close()
        raise
    return DraftModelDrafter(executor, limits, config.max_draft_len)


def memory_beside(config: object, folder: Path, options: settings.Options) -> Beside | None:
    """Return what a draft model or a head will take on a GPU beside a target with given limits; None without one.

    Args:
        config: where drafts come from.
        folder: the target's weights.
        options: how it will be opened.
    """
    if not isinstance(config, DraftTargetDecodingConfig | MTPDecodingConfig):
        return None

    def beside(limits: EngineLimits) -> int:
        try:
            if isinstance(config, MTPDecodingConfig):
                return planned_head_bytes(folder, options, limits)
            draft = _draft_options(config, limits, options.cuda_graph_config)
            return planned_bytes(Path(config.speculative_model), draft)
        except ReplaySSMError:
            return 0  # refused where it is opened, by its name

    return beside


def _draft_options(
    config: DraftTargetDecodingConfig, limits: EngineLimits, cuda_graph_config: CudaGraphConfig | None
) -> settings.Options:
    window = protocol.window_length(config.max_draft_len)
    return settings.Options(
        dtype="auto",
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        max_num_tokens=None,
        # An engine keeps the history that it was built with; a model needs more than the default for long windows.
        replay=ReplayConfig(history=window) if window > defaults.HISTORY else ReplayConfig(),
        max_draft_len=config.max_draft_len,
        cuda_graph_config=cuda_graph_config,
    )


def _check_vocabulary(folder: Path, draft: Executor, target: Target) -> None:
    """Refuse a draft model whose token ids mean something else.

    Raises:
        ConfigError: other numbers of tokens, or tokenizers with other tokens.
    """
    found, needed = draft.geometry.vocab_size, target.executor.geometry.vocab_size
    if found != needed:
        raise ConfigError(
            f"speculative_model: {folder}: found a vocabulary of {found} tokens; needed the target's, of {needed}. "
            f"Name a smaller model of the same family."
        )
    theirs, tokenizer = Tokenizer.from_folder(folder), target.tokenizer
    if theirs is None or tokenizer is None:
        return
    found_ids, needed_ids = theirs.token_ids(), tokenizer.token_ids()
    differing = sorted(t for t in found_ids.keys() | needed_ids.keys() if found_ids.get(t) != needed_ids.get(t))
    if differing:
        token = differing[0]
        raise ConfigError(
            f"speculative_model: {folder}: found a tokenizer with other ids for {len(differing)} tokens ({token!r}: "
            f"{found_ids.get(token)}, the target's {needed_ids.get(token)}); needed the target's tokenizer. Name a "
            f"smaller model of the same family."
        )
