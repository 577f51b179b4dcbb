"""Reading a model's config key by key, and noting every problem on the way."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import ValidationError

from trtllm_replayssm.contract.geometry import ActivationDtype, ModelGeometry, MtpGeometry
from trtllm_replayssm.errors import ConfigError, UnsupportedError, validation_text

DTYPES: tuple[str, ...] = get_args(ActivationDtype)


@dataclass(frozen=True)
class HfConfig:
    """What a config.json says.

    Attributes:
        geometry: the model's shape; ``tie_word_embeddings`` as the file has it.
        use_conv_bias: whether the checkpoint stores a bias of the convolution.
        mtp: the multi-token prediction head that it may store, or in words why that cannot be run.
    """

    geometry: ModelGeometry
    use_conv_bias: bool
    mtp: MtpGeometry | str


@dataclass(frozen=True)
class KeyTable:
    """Every key of a family's config: read, held to one value, or ignored for a reason.

    A key in none of the three is an error: a setting that nobody reads could change the model silently.

    Attributes:
        spellings: values that are read -> their keys. Several spellings of one value must agree.
        fixed: settings that this version has one form of -> (values that mean that form, what it is).
        ignored: key -> why it is not read.
    """

    spellings: Mapping[str, tuple[str, ...]]
    fixed: Mapping[str, tuple[tuple[Any, ...], str]]
    ignored: Mapping[str, str]

    @property
    def known(self) -> frozenset[str]:
        """All keys."""
        read = {spelling for spellings in self.spellings.values() for spelling in spellings}
        return frozenset(read | self.fixed.keys() | self.ignored.keys())


@dataclass
class Reader:
    """A config, and the problems found in it so far.

    Attributes:
        config: the parsed file.
        keys: what may be in it.
        problems: what contradicts itself, is missing or is unknown.
        unsupported: what is well formed and not in this version.
    """

    config: Mapping[str, Any]
    keys: KeyTable
    problems: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)

    def value(self, name: str) -> Any:
        """Return a value under any of its spellings; None when absent. Differing spellings are a problem."""
        found = {key: self.config[key] for key in self.keys.spellings[name] if self.config.get(key) is not None}
        values = list(found.values())
        if any(value != values[0] for value in values[1:]):
            both = ", ".join(f"{key}={value!r}" for key, value in found.items())
            self.problems.append(f"found {both}; needed one value, these are spellings of the same setting")
        return values[0] if values else None

    def positive(self, name: str, stand_in: int = 1) -> int:
        """Return a whole number >= 1; a stand-in that causes no further complaint for a bad one, which is noted."""
        value = self.value(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        self.problems.append(f"{self.label(name)}: found {shown(value)}; needed a whole number of 1 or more")
        return stand_in

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean, or the architecture's default when the key is absent."""
        value = self.value(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.problems.append(f"{self.label(name)}: found {value!r}; needed true or false")
        return default

    def label(self, name: str) -> str:
        """Return the spelling that the file uses, or the usual one."""
        spellings = self.keys.spellings[name]
        return next((key for key in spellings if key in self.config), spellings[0])

    def check_multiple(self, name: str, found: int, of: str, divisor: int) -> None:
        """Note a number that is no multiple of another."""
        if found % divisor:
            self.problems.append(
                f"{self.label(name)}: found {found} with {self.label(of)}={divisor}; needed a multiple of it"
            )

    def check_keys(self) -> None:
        """Note unknown keys, and settings in a form that this version does not have."""
        unknown = sorted(self.config.keys() - self.keys.known)
        if unknown:
            self.problems.append(f"found unknown keys {', '.join(unknown)}; a setting that is not read may matter")
        for key, (allowed, meaning) in self.keys.fixed.items():
            value = self.config.get(key, allowed[0])
            value = list(value) if isinstance(value, tuple) else value
            if not any(type(value) is type(a) and value == a for a in allowed):
                self.unsupported.append(f"{key}: found {value!r}; this version has {meaning} only ({allowed[0]!r})")

    def dtype(self, asked: str | None) -> str:
        """Return the activation type that was asked for, or else the file's."""
        if asked not in (None, "auto"):
            return checked_dtype(str(asked))
        stored = str(self.value("dtype") or "nothing").removeprefix("torch.")
        if stored in DTYPES:
            return stored
        self.problems.append(
            f"{self.label('dtype')}: found {stored}; needed one of {', '.join(DTYPES)}. Name one with --dtype"
        )
        return DTYPES[0]

    def norm_eps(self) -> float:
        """Return what norms add to the mean square."""
        value = self.value("norm_eps")
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1:
            return float(value)
        self.problems.append(f"{self.label('norm_eps')}: found {shown(value)}; needed a number between 0 and 1")
        return 1e-5

    def end_tokens(self, generation: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
        """Return the tokens that end a text: generation_config.json's where it names any, as transformers does."""
        value = generation.get("eos_token_id")
        key = "eos_token_id" if value is None else "generation_config.json eos_token_id"
        value = self.value("eos_token_id") if value is None else value
        ids = [] if value is None else value if isinstance(value, list) else [value]
        bad = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size]
        if bad:
            self.problems.append(f"{key}: found {bad}; needed token ids below vocab_size ({vocab_size})")
        return tuple(dict.fromkeys(i for i in ids if i not in bad))

    def raise_if_any(self) -> None:
        """Raise one error with every problem."""
        lines = self.problems + self.unsupported
        if not lines:
            return
        text = lines[0] if len(lines) == 1 else f"found {len(lines)} problems:\n  - " + "\n  - ".join(lines)
        raise (ConfigError if self.problems else UnsupportedError)(f"config.json: {text}.")


def shown(value: Any) -> str:
    """Write a value for a message."""
    return "nothing" if value is None else repr(value)


def checked_dtype(dtype: str) -> str:
    """Return the name of an activation type.

    Raises:
        ConfigError: no such type.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: found {dtype!r}; needed auto, {', '.join(DTYPES)}.")
    return dtype


def make_geometry(reader: Reader, values: dict[str, Any]) -> ModelGeometry:
    """Make the geometry of what was read, unless there were problems.

    Raises:
        ConfigError: unknown, missing or contradictory keys; every problem is listed.
        UnsupportedError: a well-formed model that this version does not run.
    """
    reader.raise_if_any()
    try:
        return ModelGeometry(**values)
    except ValidationError as error:
        raise ConfigError(f"config.json: {validation_text(error)}.") from error
