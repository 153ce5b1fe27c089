"""A LoRA of a base on the base's distilled model: is it weaker there, by how much, at which strength is it equal?

LoRAs are trained on Z-Image, FLUX.2 klein base, FLUX.1-dev and served on Z-Image-Turbo, klein, schnell: few steps, no
guidance. The weights differ on purpose, so what is compared are not the two models' outputs but what the LoRA does to
each: its *effect*, the velocity with it less the velocity without, at the same noisy images, captions and noise levels,
which are those of the distilled schedule. A step of a distilled model stands for many small ones, so the base takes
``STEP_PARTS`` of these for each, and its effect is the mean over them. The effect at the noise level where the step
begins is another: of that the distilled model of the built-in pair shows 0.77, of the mean 0.89, in pictures 0.90.

    size       rms of the effect on the distilled model over that on the base
    direction  cosine of the two: 1 is the same change; at 0 no strength makes the one of the other

The same two figures of the finished pictures (latents, from the same noise) say what people see. The strength at which
the effect is as large as on the base is searched for among strengths that are run, between two that lie below and
above, by the pictures or, where none are sampled, by the velocities. A LoRA far above 1 turns into something else
before it is large enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from library.console import Console
from library.errors import UserError, counted
from library.fidelity.intervals import images_to_tell, ratio_interval, side
from library.fidelity.runs import EvalSet, Outcome, run_variant
from library.fidelity.serving import Models, Variant
from library.training.flow import STEP_PARTS
from networks.files.weights import AddedWeights
from networks.network import attach_lora

EQUAL = 0.02  # of the size: nobody sees less
MOST = 4.0  # strength that a LoRA is tried at
_RUNS, _LEAST_STEP = 8, 1.04
_FURTHER = 1.25  # times the error at strength 1: beyond, it is no remedy; the full size costs 1.16 on the built-in pair
ANOTHER = 0.5  # cosine below which even the best strength leaves 87 % of the effect wrong


@dataclass(frozen=True)
class StrengthRow:
    """What the LoRA does at a strength on the distilled model, beside what it does at 1 on the base.

    ``size`` and ``direction`` are of velocities, ``picture`` and ``picture_direction`` of finished latents; NaN where
    none were sampled. ``low`` and ``high`` are the 95 % interval over images of the size that decides.
    """

    strength: float
    size: float
    direction: float
    picture: float = math.nan
    picture_direction: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def error(self) -> float:
        """What is missing or wrong of the effect on the velocity, rms over the base's."""
        return math.sqrt(max(0.0, self.size**2 - 2 * self.size * self.direction + 1))

    @property
    def shown(self) -> float:
        """The size that decides: in pictures, or of velocities where there are none."""
        return self.size if math.isnan(self.picture) else self.picture

    @property
    def judgement(self) -> str:
        """Weaker, stronger, as strong, or that so few images cannot tell."""
        if side(self.low, self.high, 1 - EQUAL) == "below":
            return "weaker"
        if side(self.low, self.high, 1 + EQUAL) == "above":
            return "stronger"
        return "as strong" if self.low >= 1 - EQUAL and self.high <= 1 + EQUAL else ""


@dataclass(frozen=True)
class Distilled:
    """The comparison.

    Attributes:
        name: of the distilled model, for people. sigmas: noise levels of its steps.
        share: rms of the effect on the base over the velocity's.
        rows: by strength, those that were run.
        equal: the strength of equal size; None where there is none up to ``MOST``.
        images: title -> finished pictures [3, H, W], for the page; empty where none were sampled.
        images_run: how many both models ran on.
    """

    name: str
    sigmas: Sequence[float]
    share: float
    rows: tuple[StrengthRow, ...]
    equal: float | None
    images: Mapping[str, Sequence[Tensor]]
    images_run: int = 0

    def at(self, strength: float) -> StrengthRow:
        """Return the row of a strength that was run."""
        return next(row for row in self.rows if row.strength == strength)

    @property
    def alarm(self) -> bool:
        """Whether the LoRA is shown to do something else, or not as much."""
        one = self.at(1.0)
        return not self.share or one.direction < ANOTHER or one.judgement in ("weaker", "stronger")

    def sentence(self) -> str:
        """Return the verdict."""
        one = self.at(1.0)
        where = f"on {self.name} ({counted(len(self.sigmas), 'step')})"
        if not self.share:
            return (
                f"The LoRA changes nothing on the base, so there is nothing to compare {where}; is it another model's?"
            )
        if one.direction < ANOTHER:
            return (
                f"The LoRA does something else {where} than on the base (cosine {one.direction:.2f}, size "
                f"{one.size:.2f}): no strength mends that; train it on, with the base as the teacher of its effect "
                "(distill_from, distill_effect)."
            )
        sizes = f"{one.size:.2f} of its effect on the base in velocities (cosine {one.direction:.2f})"
        if not math.isnan(one.picture):
            sizes = f"{one.picture:.2f} of its effect on the base in finished pictures, {one.size:.2f} in velocities "
            sizes += f"(cosine {one.direction:.2f})"
        if one.judgement == "as strong" or not one.judgement:
            limit = min((1 - EQUAL, 1 + EQUAL), key=lambda each: abs(each - one.shown))
            wanted = images_to_tell(self.images_run, one.shown, one.low, one.high, limit)
            few = (
                f"{counted(self.images_run, 'image')} cannot tell whether the LoRA is as strong {where} as on the base"
            )
            as_strong = f"The LoRA is as strong {where} as on the base: {sizes}."
            return as_strong if one.judgement else f"{few}: {sizes}; {wanted} would tell (--images)."
        text = f"The LoRA is {one.judgement} {where}: {sizes}"
        if self.equal is None:
            last = max(self.rows, key=lambda row: abs(row.strength - 1))
            times = last.error / one.error if one.error else math.inf
            return (
                f"{text}; at {last.strength:.2f} it has {last.shown:.2f} and is {times:.2f} times as far from what it "
                "does on the base as at 1. No single strength mends that."
            )
        return f"{text}; at strength {self.equal:.2f} it is as strong (cosine {self.at(self.equal).direction:.2f})."

    def as_json(self) -> dict[str, Any]:
        """Return what ``report.json`` holds."""
        fields = {key: getattr(self, key) for key in ("name", "sigmas", "share", "equal")}
        rows = [asdict(row) | {"error": row.error} for row in self.rows]
        return fields | {"verdict": self.sentence(), "strengths": rows}


def compare_distilled(
    models: Models,
    eval_set: EvalSet,
    steps: int | None,
    console: Console,
    served: Mapping[str, Mapping[str, AddedWeights]] | None = None,
) -> Distilled:
    """Return what the LoRAs of ``models`` do on its deployed model, the distilled one, beside what they do on its base.

    Args:
        models: the base, the LoRAs, and the distilled model as what is deployed.
        eval_set: images, captions, noise; without sampling steps there are no pictures.
        steps: of the distilled schedule; None for the family's own number.
        console: for progress.
        served: the LoRAs that are used on the distilled model, component -> layer -> weights; None: the same.

    Raises:
        UserError: there is no LoRA.
    """
    name = models.deployed.name
    if not models.transformer_lora:
        raise UserError("--distilled: compares the LoRA's effect on the transformer; give --lora with layers of it")
    eval_set = at_distilled_levels(models, eval_set, steps)
    sigmas = eval_set.sigmas
    variant = Variant(weights=True, shift="deployed")
    without, wanted = run_on_base(models, eval_set, console)
    turbo = models.deployed.load(models.deployed_family, models.dtype, models.device).module
    others = models if served is None else replace(models, loras=served)
    run = runs_at_strengths(others, turbo, variant, eval_set, console, name)
    plain = run(0.0)
    effect = velocity_effect(wanted, without)
    outcomes: dict[float, Outcome] = {}
    rows: dict[float, StrengthRow] = {}

    def size(strength: float) -> float:
        outcomes[strength] = found = run(strength)
        velocities = beside(velocity_effect(found, plain), effect)
        pictures, changes = (math.nan, math.nan), (velocity_effect(found, plain), effect)
        if found.path:
            changes = _differences(found.latents, plain.latents), _differences(wanted.latents, without.latents)
            pictures = beside(*changes)
        rows[strength] = StrengthRow(
            strength, *velocities, *pictures, *_interval_of_size(*changes, len(eval_set.batches))
        )
        row, least = rows[strength], _FURTHER * rows[1.0].error + EQUAL
        return row.shown if row.direction >= ANOTHER and row.error <= least else math.nan

    first = size(1.0)
    equal = equal_strength(size, first)
    shown = {"base": without, "base + LoRA": wanted, "distilled": plain, "distilled + LoRA": outcomes[1.0]}
    if equal is not None and equal != 1.0:
        shown[f"the LoRA at {equal:.2f}"] = outcomes[equal]
    share = _norm(effect) / _norm([each for sigma in sigmas for each in without.velocities[sigma]])
    images = {title: outcome.images for title, outcome in shown.items() if outcome.images}
    ordered = tuple(rows[strength] for strength in sorted(rows))
    return Distilled(name, sigmas, share, ordered, equal, images, len(eval_set.batches))


def run_on_base(models: Models, eval_set: EvalSet, console: Console) -> tuple[Outcome, Outcome]:
    """Return what the base answers without the LoRAs and with them, ``STEP_PARTS`` small steps for each large one."""
    finer = replace(eval_set, parts=STEP_PARTS, steps=STEP_PARTS * eval_set.steps)
    variant = Variant(weights=False, shift="deployed")
    base = runs_at_strengths(models, models.base(deployed=False), variant, finer, console, "base")
    return base(0.0), base(1.0)


def at_distilled_levels(models: Models, eval_set: EvalSet, steps: int | None) -> EvalSet:
    """Return ``eval_set`` at the noise levels of the distilled model's ``steps``; arguments of compare_distilled."""
    latents, steps = eval_set.batches[0].latents, steps or models.family.distilled_steps
    tokens = latents.shape[-2] * latents.shape[-1] // models.family.patch_size**2
    models.deployed_family.distilled = True
    sigmas = models.deployed_family.sampling_sigmas(steps, tokens)[:-1]
    return replace(eval_set, sigmas=sigmas, steps=steps if eval_set.steps else 0)


def equal_strength(size: Callable[[float], float], first: float) -> float | None:
    """Return a strength that was run and at which the effect has size 1, within ``EQUAL``; None up to ``MOST``.

    Args:
        size: runs a strength and returns the size there; NaN where the effect is another, which ends the search.
        first: the size at 1.
    """
    strength, found = 1.0, first
    low: tuple[float, float] = (0.0, 0.0)  # strength and size below 1, and above
    high: tuple[float, float] | None = None
    for _ in range(_RUNS):
        if abs(found - 1) <= EQUAL:
            return strength
        if math.isnan(found) or (found < 1 and strength >= MOST):
            return None
        if found < 1:
            low = (strength, found)
        else:
            high = (strength, found)
        if high is None:  # in proportion, and not timidly: it has to end above
            strength = min(MOST, max(strength / found if found else MOST, _LEAST_STEP * strength))
        else:
            strength = low[0] + (high[0] - low[0]) * (1 - low[1]) / (high[1] - low[1])
        found = size(strength)
    return strength if abs(found - 1) <= EQUAL else None


def runs_at_strengths(
    models: Models, network: Any, variant: Variant, eval_set: EvalSet, console: Console, title: str
) -> Callable[[float], Outcome]:
    """Return what runs ``network`` with the LoRA at a strength; at 0 alone, captions encoded without the LoRA, too."""
    lora = attach_lora(network.eval(), models.transformer_lora, models.targets, "the LoRAs")

    def run(strength: float) -> Outcome:
        lora.set_multiplier(strength)
        shown = f"{title}, LoRA at {strength:.2f}" if strength else f"{title} alone"
        return run_variant(models, replace(variant, strength=strength), eval_set, console, shown, network)

    return run


def _differences(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    return [a.double() - b.double() for a, b in zip(one, other, strict=True)]


def velocity_effect(one: Outcome, other: Outcome) -> list[Tensor]:
    """Return the differences of velocities, [C, h, w] fp64 each: noise level by noise level, of all images."""
    return [each for sigma in one.velocities for each in _differences(one.velocities[sigma], other.velocities[sigma])]


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(each.double().square().sum()) for each in tensors))


def _interval_of_size(found: Sequence[Tensor], wanted: Sequence[Tensor], images: int) -> tuple[float, float]:
    """Return the interval over images of the size of ``found`` beside ``wanted``, lists of all images, in turn."""
    parts, wholes = ([_norm(effect[image::images]) ** 2 for image in range(images)] for effect in (found, wanted))
    low, high = map(math.sqrt, ratio_interval(parts, wholes))
    return low, high


def beside(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> tuple[float, float]:
    """Return size and direction of ``found`` beside ``wanted``; NaN and 0 where there is nothing wanted."""
    sizes = _norm(found), _norm(wanted)
    product = sum(float((a * b).sum()) for a, b in zip(found, wanted, strict=True))
    size = sizes[0] / sizes[1] if sizes[1] else math.nan
    return size, product / (sizes[0] * sizes[1]) if all(sizes) else 0.0
