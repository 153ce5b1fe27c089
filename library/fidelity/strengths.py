"""Strengths by kind of layer with which a LoRA does on a distilled model what it does on its base, without training.

One strength for all layers enlarges what is right of the effect there and what is wrong alike. Here each kind of layer
(``attn.to_q`` of all blocks, ...) has its own. With J_k, what the strength of kind k changes of the distilled model's
velocities, and e, the effect on the base, the strengths s

    minimise  |f + J (s - 1) - e|^2

where f is the effect as it is: a least-squares problem in as many unknowns as there are kinds, damped so that kinds
that do alike share what is missing. As the model is not linear it is solved twice. J is measured by differences, a run
of the distilled model for each kind. To ask for the size of e as well was tried: the direction paid for it (cosine 0.93
to 0.86 on the built-in pair).

Spectral corrections, which need no images, were tried on the built-in pair and made the effect worse: ProLoRA
(arXiv 2506.04244) and CASA (arXiv 2605.01929), both project the LoRA on the two models' singular vectors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from library.console import Console
from library.errors import UserError
from library.fidelity.distilled import at_distilled_levels, beside, run_on_base, velocity_effect
from library.fidelity.runs import EvalSet, Outcome, run_variant
from library.fidelity.serving import Models, Variant
from networks.network import attach_lora

_DAMPING = 0.01  # of the mean square of J's columns
_ROUNDS, _DIFFERENCE = 2, 0.2  # of solving; of a strength, by which J is measured


def kind_of_layer(name: str) -> str:
    """Return a layer's name without numbers: one for all blocks."""
    return re.sub(r"\.\d+(?=\.|$)", "", name)


def fit_strengths(models: Models, eval_set: EvalSet, console: Console) -> dict[str, float]:
    """Return kind of layer -> strength of the LoRA of ``models`` on their deployed model, the distilled one.

    Raises:
        UserError: the LoRA has no layers of the transformer, or changes nothing.
    """
    if not models.transformer_lora:
        raise UserError("--lora: has no layers of the transformer; nothing can be fitted")
    eval_set = at_distilled_levels(models, eval_set, None)
    variant = Variant(weights=True, shift="deployed")
    without, on_base = run_on_base(models, eval_set, console)
    wanted = _flat(velocity_effect(on_base, without))
    turbo = models.deployed.load(models.deployed_family, models.dtype, models.device).module.eval()
    network = attach_lora(turbo, models.transformer_lora, models.targets, "the LoRAs")
    kinds = list(dict.fromkeys(map(kind_of_layer, network.modules)))

    def run(strengths: Mapping[str, float], title: str) -> Outcome:
        for name, layer in network.modules.items():
            layer.multiplier = strengths[kind_of_layer(name)]  # type: ignore[assignment]
        named = replace(variant, strength=1.0 if any(strengths.values()) else 0.0)
        return run_variant(models, named, eval_set, console, title, turbo)

    plain = run(dict.fromkeys(kinds, 0.0), f"{models.deployed.name} alone")
    strengths = dict.fromkeys(kinds, 1.0)
    as_it_is = now = run(strengths, "the LoRA as it is")
    if not (wanted.any() and _flat(velocity_effect(now, plain)).any()):
        raise UserError("--lora: changes nothing on one of the two models; is it another model's?")
    for _ in range(_ROUNDS):
        others = (run(strengths | {kind: strengths[kind] + _DIFFERENCE}, kind) for kind in kinds)
        slopes = torch.stack([_flat(velocity_effect(other, now)) / _DIFFERENCE for other in others], dim=1)
        steps = solve_strengths(slopes, _flat(velocity_effect(now, plain)), wanted)
        strengths = {kind: strengths[kind] + float(step) for kind, step in zip(kinds, steps, strict=True)}
        now = run(strengths, "the LoRA fitted")
    for title, each in (("as it is", as_it_is), ("fitted", now)):
        size, cosine = beside([_flat(velocity_effect(each, plain))], [wanted])
        console.print(f"{title}: {size:.2f} of its effect on the base in velocities, cosine {cosine:.2f}")
    return strengths


def solve_strengths(slopes: Tensor, now: Tensor, wanted: Tensor, damping: float = _DAMPING) -> Tensor:
    """Return what to add to the strengths, [k] fp64, so that the effect is nearest to ``wanted``.

    Args:
        slopes: [n, k] fp64, J. now, wanted: [n] fp64, the effect as it is, and the base's.
        damping: share of the mean of J^T J's diagonal that is added to it.
    """
    moment = slopes.T @ slopes
    moment = moment + damping * moment.diagonal().mean() * torch.eye(len(moment), dtype=moment.dtype)
    return torch.linalg.solve(moment, slopes.T @ (wanted - now))


def _flat(effect: list[Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in effect])
