"""What an option says of itself on its field, beside its type, its default and its help text.

A schema is made of sections (``library.config.schema``). The type of an option carries markers: :class:`OnlyWith` (what
it needs to have an effect), :class:`MustMatch` (a resumed state must have it too), :class:`OnlyFor` (which trainings
have it), :class:`SameResult` (what is trained does not follow from it). Rules, resuming, overwriting, ``--help`` and
the options pages follow from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from library.config.family_defaults import settle, settled
from library.errors import UserError


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, numbers are finite, values are frozen once validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """Refuse what no path, name or header can hold."""
        if any(isinstance(text, str) and "\0" in text for text in (value if isinstance(value, list) else [value])):
            raise ValueError("it holds a NUL character; remove it")
        return value

    @model_validator(mode="after")
    def _has_defaults(self) -> Section:
        """Give a section that stands alone the defaults of FLUX.1; a whole configuration knows its family."""
        if hasattr(getattr(self, "model", None), "model_type"):
            settle(self)
        self.__dict__.update(settled(self))
        return self


def asks_for_nothing(value: Any, field: FieldInfo) -> bool:
    """Return whether ``value`` leaves an option unset that may be: an empty text, or the zero of what counts."""
    if field.is_required() or field.get_default() is not None:
        return False
    kinds = get_args(field.annotation)
    if value in (None, "") or str(value).lower() == "none":
        return True
    return str not in kinds and bool not in kinds and is_nothing(value)


def is_nothing(value: Any, *also: object) -> bool:
    """Return whether a value asks for nothing: unset, false, zero, empty, or a list of such; text of flags too.

    ``also`` are further values that do, which text may hold several of, with commas between.
    """
    if isinstance(value, list):
        return all(is_nothing(one, *also) for one in value)
    if value in (None, False, 0, "", {}) or _plain(value) in ("false", "none", "0"):
        return True
    words = set(map(_plain, also))
    return _plain(value) in words or (bool(words) and all(_plain(part) in words for part in str(value).split(",")))


def _plain(value: object) -> str:
    return re.sub(r"\.0+$", "", str(value).strip().lower())


class Above:
    """Allowed values of :class:`OnlyWith`: numbers above a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and value > self.limit


class OnlyWith:
    """Marks an option that has no effect unless others are set so; an option with two markers needs both.

    ``OnlyWith(loss_type=("huber", "smooth_l1"))``: unless it is one of these; ``True``: unless it is set at all;
    ``False``: unless it is not. ``any_of``: one of several suffices. ``because`` ends the sentence that refuses it.
    ``overridden``: the others decide what it would; beside them it is left out, with a note, instead of refused.
    """

    def __init__(
        self,
        because: str = "",
        any_of: bool = False,
        overridden: bool = False,
        **needs: tuple[str, ...] | Above | bool,
    ) -> None:
        self.because, self.any_of, self.overridden, self.needs = because, any_of, overridden, needs

    def unmet(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the needed options that ``values`` have not as they must be; what a schema lacks is not needed."""
        known = {key: wanted for key, wanted in self.needs.items() if key in values}
        failed = tuple(key for key, wanted in known.items() if not _is_met(wanted, values[key]))
        return () if self.any_of and len(failed) < len(known) else failed

    def reason(self, values: Mapping[str, Any]) -> str:
        """Return "without x" or 'with y = "z"', as ``values`` have it."""
        failed = self.unmet(values)
        if self.any_of or self.needs[failed[0]] is True or isinstance(self.needs[failed[0]], Above):
            needs = {key: self.needs[key] for key in failed}
            named = [f"{key} = {listed(need)}" if isinstance(need, tuple) else key for key, need in needs.items()]
            return f"without {' or '.join(named)}{self.because}"
        key = failed[0]
        if self.needs[key] is False:
            return f"with {key}{self.because}"
        wanted = listed(self.needs[key])  # type: ignore[arg-type]
        if values[key] is None:
            return f"without {key} = {wanted}{self.because}"
        return f'with {key} = "{values[key]}"{self.because or f" (it goes with {wanted})"}'

    def __str__(self) -> str:
        """Return the needs as the docs print them."""
        return f"{' or ' if self.any_of else ', '}".join(_need(key, wanted) for key, wanted in self.needs.items())


def unmet_of(field: FieldInfo, values: Mapping[str, Any]) -> OnlyWith | None:
    """Return the marker of an option whose needs ``values`` do not meet, so that it has no effect; None: it has."""
    markers = (marker for marker in field.metadata if isinstance(marker, OnlyWith))
    return next((marker for marker in markers if marker.unmet(values)), None)


def _is_met(wanted: tuple[str, ...] | Above | bool, value: Any) -> bool:
    return is_nothing(value) is not wanted if isinstance(wanted, bool) else value in wanted


def _need(key: str, wanted: tuple[str, ...] | Above | bool) -> str:
    if isinstance(wanted, bool):
        return f"`{key}`" if wanted else f"no `{key}`"
    return f"`{key}` above {wanted.limit}" if isinstance(wanted, Above) else f"`{key}` = {listed(wanted)}"


def listed(words: tuple[str, ...]) -> str:
    """Return "a, b or c"."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def words_of(annotation: Any) -> tuple[str, ...]:
    """Return the words that a ``Literal``, possibly within another type, allows, or nothing."""
    inner = get_args(annotation)
    return tuple(word for part in inner for word in ((part,) if isinstance(part, str) else words_of(part)))


@dataclass(frozen=True)
class OnlyFor:
    """Marks an option that not every training with its section has; ``otherwise`` is what to say of it elsewhere."""

    trainings: tuple[Literal["images", "chats"], ...]
    otherwise: str


@dataclass(frozen=True)
class MustMatch:
    """Marks an option that a saved state goes on with whatever the resumed run says, so that it must say the same.

    Attributes:
        canonical: value -> what is compared, where one thing can be written in several ways; as it is if None.
    """

    canonical: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class SameResult:
    """Marks an option that says where things lie or how the work is done: with any value the result is the same."""


@dataclass(frozen=True)
class EffectOnly:
    """Marks an option that may stand where it has no effect, which a run says then.

    Attributes:
        where: options and keys of a dataset, of which one must be set.
        default_of: the key of a dataset that it is where the dataset does not say; "" for any.
    """

    where: tuple[str, ...] = ()
    default_of: str | None = None


def options(config: BaseModel) -> Iterator[tuple[str, Any, FieldInfo]]:
    """Yield every option of a configuration with its value and its field."""
    for name in type(config).model_fields:
        section = getattr(config, name)
        for key, field in type(section).model_fields.items():
            yield key, getattr(section, key), field


def resume_keys(config: BaseModel) -> dict[str, Any]:
    """Return the options that a resumed state must have been trained with: those marked :class:`MustMatch`."""
    return {
        key: marker.canonical(value) if marker.canonical else value
        for key, value, field in options(config)
        for marker in field.metadata
        if isinstance(marker, MustMatch)
    }


_EXAMPLES = {
    "network_args": "rank_dropout=0.1",
    "optimizer_args": "weight_decay=0.01",
    "dataset_args": "resolution=1024",
}


def split_pairs(pairs: Iterable[str], option: str) -> dict[str, str]:
    """Return key -> value of the ``key=value`` pairs of ``option``.

    Raises:
        UserError: one is of another form, or a key is given twice.
    """
    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key.replace("-", "_").isidentifier():  # whose likeness to a known key shows later
            raise UserError(f"{option}: {pair!r} is not of the form key=value; write it like {_EXAMPLES[option]}")
        if key in values:
            raise UserError(f"{option}: {key} is given twice; keep one")
        values[key] = value
    return values


def sorted_pairs(pairs: list[str]) -> list[str]:
    """Return ``key=value`` pairs in an order and spelling that do not depend on who wrote them."""
    return sorted("=".join(part.strip() for part in pair.split("=", 1)) for pair in pairs)


MUST_MATCH = MustMatch()
SAME_RESULT = SameResult()
Pairs = Annotated[list[str], MustMatch(sorted_pairs)]
# Bounds that no training comes near, so that a slip of the finger is told at once instead of filling the memory.
MOST = 10**9  # of what is counted: steps, epochs, tokens
MOST_WORKERS = 256  # processes that read caches
MOST_SEED = 2**63 - 1  # what torch's generators take
MOST_RATE = 1000.0
MOST_STRENGTH = 1000.0  # of a LoRA
MOST_GUIDANCE = 1000.0
MOST_SIDE = 16_384  # pixels of an image's side
MOST_PIXELS = 64 * 2**20  # of an image that is made, or trained on
MOST_STEPS = 1000  # of the solver: the models' schedules have no more
Positive = Annotated[int, Field(gt=0, le=MOST)]
Size = Annotated[int, Field(gt=0, le=1_000_000)]  # of a layer, a window of tokens, a vocabulary
Batch = Annotated[int, Field(gt=0, le=65_536)]  # of images, captions, windows, or batches of a step
Seed = Annotated[int, Field(ge=0, le=MOST_SEED)]
Rate = Annotated[float, Field(ge=0, le=MOST_RATE)]  # of learning
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
StepsOrShare = Annotated[int, Field(ge=0, le=MOST)] | Annotated[float, Field(ge=0, lt=1)]
