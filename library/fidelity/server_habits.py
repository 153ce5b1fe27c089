"""What servers are known to do otherwise: the common things first, and how a number is found once its kind is known.

A *habit* is what a server does, as values of a :class:`~library.fidelity.serving.Variant`'s fields, or of what only
a sampling run has: ``noise`` (the dtype it is drawn in), ``seed`` and ``steps`` (added to the server's). Kinds are
tried with a few values far apart. The squared distance from a picture is about a parabola in such a value, so that the
number between them follows in a few runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from library.config.model_types import BLANKS
from library.fidelity.runs import EvalSet
from library.fidelity.serving import REFERENCE, Models, Served, Variant

Habit = Mapping[str, Any]

LEVELS: dict[str, float] = {"black": -1.0, "grey": 0.0, "white": 1.0}
_NAMES = {level: name for name, level in LEVELS.items()}
_RUN: dict[str, Any] = {"noise": torch.float32, "seed": 0, "steps": 0}  # what no variant has
_GUIDANCES = (1.0, 3.5, 30.0)
# static shifts: none, ComfyUI's default of ModelSamplingAuraFlow, and its FLUX without ModelSamplingFlux: 1.15 there is
# mu, whose static shift is e^1.15 (comfy/model_sampling.py, flux_time_shift)
_SHIFTS = (1.0, 1.73, round(math.exp(1.15), 2))
_REFINED = {  # habit with a number: its unit in the last place, least, most
    "mask_grow": (1, -64, 64),
    "mask_blur": (0.5, 0.0, 32.0),
    "blank": (0.05, -1.0, 1.0),
    "strength": (0.05, -2.0, 4.0),
    "guidance": (0.5, 0.0, 100.0),
    "shift": (0.05, 0.05, 20.0),
}
IN_BF16: tuple[Habit, ...] = (
    {"timestep": torch.bfloat16},
    {"vae": Served(dtype="bf16")},
    {"latents_dtype": "bf16"},
)
_SETTINGS = {*_REFINED, "mask_snap", "mask_invert", "paste"}
_WORDS = {
    "mask_blur": "mask blurred by {:g} px",
    "strength": "LoRA at {:g} times its strength",
    "guidance": "guidance {:g}",
    "latents_dtype": "given latents in {}",
    "noise": "noise drawn in {}",
    "seed": "seed {:+d}",
    "steps": "{:+d} sampling steps",
    "vae": "VAE {}",
    "text": "text encoders {}",
    "timestep": "timesteps in {}",
    "t5_tokens": "T5 with {} tokens of a caption",
}
_OTHER_WORDS = {
    ("mask_snap", 8): "mask snapped to latent cells",
    ("mask_snap", 16): "mask snapped to tokens",
    ("mask_invert", True): "mask inverted",
    ("paste", "pixels"): "pixels pasted into the finished picture",
    ("paste", "latents"): "known latents pasted at every step",
    ("guidance", "ignored"): "guidance ignored",
    ("strength", 0.0): "no LoRA",
    ("lora_without", ("^text_encoder",)): "LoRA not in the text encoders",
    ("normalised", 0): "given latents not normalised",
    ("normalised", 2): "given latents normalised twice",
}


def habits_of(models: Models, declared: Variant, eval_set: EvalSet) -> list[list[Habit]]:
    """Return what to try, one thing at a time: what is common first, then what is rare, then what changes little.

    ``declared``: the deployment as it was described, the first of them.
    """
    files = files_of(declared)
    common: list[Habit] = [files] if files else []
    common += [{name: LEVELS.get(value, value)} for name, value in declared.changes().items() if name not in files]
    if any(eval_set.drawn(number) is not None for number in range(len(eval_set.batches))):
        common += [{"blank": level} for level in LEVELS.values() if level != trained_level(eval_set)]
        common += [{"mask_grow": pixels} for pixels in (4, 8, 16, -4)]
        common += [{"mask_blur": 4.0}, {"mask_snap": 8}, {"mask_snap": 16}, {"mask_invert": True}]
        common += [{"paste": "pixels"}, {"paste": "latents"}, {"blank": BLANKS[-1]}]
    if models.loras:
        common += [{"strength": strength} for strength in (0.0, 0.5, 2.0)]
    if models.family.guidance_input:
        common += [{"guidance": "ignored"}]
        common += [{"guidance": each} for each in _GUIDANCES if each != eval_set.guidance]
    rare: list[Habit] = [{"shift": shift} for shift in _SHIFTS]
    rare += [{"steps": more} for more in (-1, 1) if eval_set.steps + more > 0]
    rare += [{"seed": 1}, {"noise": torch.bfloat16}]
    if models.family.conditioning != "none":
        rare += [{"normalised": 0}, {"normalised": 2}]
    if len(models.loras) > 1:
        rare += [{"lora_without": ("^text_encoder",)}]
    if len(files) > 1:
        rare += [{name: value} for name, value in files.items() if name not in ("merge", "activations")]
    small: list[Habit] = [{"timestep": torch.bfloat16}, {"text": Served(dtype="fp8")}]
    small += [{"vae": Served(dtype=dtype)} for dtype in ("fp8", "bf16")]
    if models.family.conditioning != "none":
        small += [{"latents_dtype": dtype} for dtype in ("bf16", "fp16", "fp8")]
    return [common, rare, small]


def files_of(declared: Variant) -> dict[str, Any]:
    """Return what ``declared`` changes in files and precision, without its settings."""
    return {name: value for name, value in declared.changes().items() if name not in _SETTINGS}


def trained_level(eval_set: EvalSet) -> float | None:
    """Return what the region is blanked with in training, in [-1, 1]; None where that is no colour."""
    blank = eval_set.pixels[0].blank
    return None if blank is None or float(blank.std()) > 0.1 else round(float(blank.mean()), 2)


def colour(level: float | str) -> str:
    """Return a blank in words."""
    return level if isinstance(level, str) else _NAMES.get(level, f"grey of {round(127.5 * (level + 1))} in 255")


def words_of(habit: Habit) -> str:
    """Return a habit in words."""
    if len(habit) > 1:
        return "files and precision as described"
    ((name, value),) = habit.items()
    if name == "blank":
        return f"region blanked with {colour(value)}"
    if name == "shift":
        return f"static shift {value:g} ({math.log(value):.2f} in ComfyUI's ModelSamplingFlux)"
    if name == "mask_grow":
        return f"mask {'grown' if value > 0 else 'shrunk'} by {abs(value)} px"
    if (name, value) in _OTHER_WORDS:
        return _OTHER_WORDS[name, value]
    if name in _WORDS:
        return _WORDS[name].format(value if isinstance(value, int | float) else str(value).removeprefix("torch."))
    return f"as described: {name} {value}"


def run_of(changes: Habit) -> tuple[Variant, Habit]:
    """Return the variant that ``changes`` make of the reference, and what else they change in the sampling run."""
    variant = {name: value for name, value in changes.items() if name not in _RUN}
    return Variant(**(vars(REFERENCE) | variant)), _RUN | {n: v for n, v in changes.items() if n in _RUN}


def next_value(name: str, tried: Mapping[float, float]) -> float | None:
    """Return which number to try next of a habit; None where the nearest is known.

    ``tried``: number -> squared distance. Outside of them it steps on; between, the vertex of the parabola through the
    nearest and its neighbours, then half-way to them, then the nearest's neighbours in the last place.
    """
    unit, least, most = _REFINED[name]
    best, vertex, _ = _parabola(tried)
    others = sorted((each for each in tried if each != best), key=lambda each: abs(each - best))
    if vertex is not None:
        proposals = [vertex]
    else:
        proposals = [2 * best - others[0]] if others and best in (min(tried), max(tried)) else []
    proposals += [(best + each) / 2 for each in sorted(others[:2], key=lambda each: tried[each])]
    for proposal in (*proposals, best - unit, best + unit):
        rounded = min(most, max(least, round(proposal / unit) * unit))
        rounded = rounded if isinstance(unit, int) else round(rounded, 2)
        if rounded not in tried:
            return rounded
    return None


def promise(tried: Mapping[float, float]) -> float:
    """Return the squared distance that a number between those of ``tried`` may leave."""
    return max(0.0, _parabola(tried)[2])


def _parabola(tried: Mapping[float, float]) -> tuple[float, float | None, float]:
    """Return the nearest number, the vertex of the parabola through it and its neighbours, and the distance there.

    Without a neighbour on each side there is no vertex, and the distance is the nearest's.
    """
    values = sorted(tried)
    place = min(range(len(values)), key=lambda each: tried[values[each]])
    if 0 < place < len(values) - 1:
        around = values[place - 1 : place + 2]
        curve, slope, least = np.polyfit(around, [tried[each] for each in around], 2)
        if curve > 0:
            return values[place], float(-slope / (2 * curve)), float(least - slope**2 / (4 * curve))
    return values[place], None, tried[values[place]]


def can_be_refined(habit: Habit) -> bool:
    """Return whether ``habit`` has a number that can be found."""
    return len(habit) == 1 and all(name in _REFINED and isinstance(value, int | float) for name, value in habit.items())
