"""The errors of this package: one tree, a literal code per class.

Every message says what was wrong, what was found and what is needed. A user's mistake is a subclass of
``ReplaySSMError``; the command line prints it without a traceback and exits with 2.
"""

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_SHOULD = re.compile("^(Input should be|(List|String) should have)")  # pydantic's words for a rule


class ReplaySSMError(Exception):
    """Base of all errors that a user can cause or mend.

    Args:
        message: ``<object>: found <what>; needed <rule>. <way out>``.
    """

    code = "E000"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"


class OpArgumentError(ReplaySSMError, ValueError):
    """An argument of an op has a wrong shape, type, device or stride; nothing was written."""

    code = "A001"


class ConfigError(ReplaySSMError, ValueError):
    """A model configuration or an option is unknown, contradictory or out of range."""

    code = "C001"


class CheckpointError(ReplaySSMError, ValueError):
    """A checkpoint folder lacks a tensor, has one too many, or one of the wrong shape."""

    code = "K001"


class UnsupportedError(ReplaySSMError, ValueError):
    """The request is well formed, yet this version has no kernel or model for it."""

    code = "U001"


class BackendError(ReplaySSMError, RuntimeError):
    """TensorRT, CUDA or the plugin library is missing, too old or does not load."""

    code = "T001"


class BuildError(ReplaySSMError, RuntimeError):
    """The engine, a kernel or the plugin library could not be built."""

    code = "B001"


class NumericsError(ReplaySSMError, RuntimeError):
    """A device computes other values than the CPU, beyond what rounding explains."""

    code = "N001"


class ManifestError(ReplaySSMError, ValueError):
    """An engine folder is not complete or was built for something else."""

    code = "M001"


class RequestError(ReplaySSMError, ValueError):
    """A generation request cannot be served as asked."""

    code = "R001"


class CapacityError(ReplaySSMError, ValueError):
    """Slots, cache or device memory do not suffice."""

    code = "R002"


class QueueFullError(ReplaySSMError, RuntimeError):
    """As many requests wait as may; the same request may be taken later."""

    code = "R003"


class ShutdownError(RequestError):
    """The ``LLM`` was closed before the request had ended, or before it came."""

    code = "R004"


class ExecutorError(ReplaySSMError, RuntimeError):
    """A step of the model failed; what it left on the device is unknown, and no further request is taken."""

    code = "R005"


def error_text(error: BaseException) -> str:
    """Return what any error says; not every one can."""
    try:
        return error.message if isinstance(error, ReplaySSMError) else str(error)
    except Exception:  # noqa: BLE001 - whatever its own __str__ raises
        return "it has no text"


def validation_text(error: "ValidationError") -> str:
    """Write every problem that pydantic found as ``name: found x; needed y``, in one line without a final full stop."""
    return "; ".join(map(problem_text, error.errors()))


def problem_text(
    problem: "ErrorDetails", *, shown: Callable[[object], str] = repr, unknown: str = "unknown key"
) -> str:
    """Write one of the problems that pydantic found, without a final full stop.

    Args:
        problem: of ``ValidationError.errors()``.
        shown: writes keys and values that were found.
        unknown: what to say of a key that is none.
    """
    where = ".".join(shown(part).strip("'") for part in problem["loc"]) + ": " if problem["loc"] else ""
    if problem["type"] == "value_error":  # raised by a check of ours, which says what was found
        cause = problem["ctx"]["error"]
        return where + (cause.message if isinstance(cause, ReplaySSMError) else str(cause)).rstrip(".")
    if problem["type"] == "extra_forbidden":
        return where + unknown
    if problem["type"] == "missing":
        return f"{where}found nothing; needed a value"
    return f"{where}found {shown(problem['input'])}; {_SHOULD.sub('needed', problem['msg'])}"


def unknown_key_hint(error: "ValidationError", known: Iterable[str]) -> str:
    """Return sentences that name the keys that were probably meant, and all that there are; nothing without need."""
    unknown = [str(problem["loc"][-1]) for problem in error.errors() if problem["type"] == "extra_forbidden"]
    if not unknown:
        return ""
    keys = list(known)
    near = dict.fromkeys(key for wrong in unknown for key in get_close_matches(wrong, keys, n=1))
    meant = f" Did you mean {', '.join(near)}?" if near else ""
    return f"{meant} Known are {', '.join(keys)}."
