"""What to do, in the order of what it takes off the error: settings of the server, files in another way, fitted LoRAs.

Nothing is advised that takes off next to nothing, and no new file where the weights' rounding is a small part: what
makes the rest has to be mended first, and the report on that says what is left.

A remedy that makes a file carries the command, ready to run but for the name of the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from library.config.model_types import MODEL_FILE_KEYS
from library.errors import counted
from library.fidelity.calibration import CalibrationOptions
from library.fidelity.comparison import Comparison
from library.fidelity.differences import Differences, taken_off
from library.fidelity.findings import REMEDIES, WORTH_MENDING, as_sentence
from library.fidelity.intervals import Share
from library.fidelity.servers import dropped_by_bypass
from library.fidelity.serving import Models, Variant
from library.fidelity.verdict import Verdict
from networks.files.weights import LoraWeights

_WORTH_IT = 0.8  # times the base's error, below which another format is worth a line
_NEW_FILE = 0.25  # of the squared error, below which no new file is advised, and no LoRA fitted to the old one
_BYPASS = ("--server", "comfyui-bypass")
SAVE_TO = "{save_to}"  # in a command: the file that it is to write


@dataclass(frozen=True)
class Remedy:
    """Something to do.

    Attributes:
        text: what, why and how much it helps, in words.
        name: of the file that is made, behind the original's; empty where none is.
        makes: the kind of that file; fixes: a folder of a report with its ``fixes/``.
        command: words after the interpreter that make it; None where it is a setting.
        cost: in words; empty for nothing.
        again: flags of a report on the result, besides the file: how it is meant to be served.
        takes_off: share of the squared error that it takes off, at most. cause: that it mends, where it is one's.
    """

    text: str
    name: str = ""
    makes: Literal["", "lora", "model", "fixes"] = ""
    command: tuple[str, ...] | None = None
    cost: str = ""
    again: tuple[str, ...] = ()
    takes_off: Share = field(default_factory=lambda: Share(math.nan))
    cause: str = ""

    @property
    def words(self) -> str:
        """What to do, and what share of the error that takes off."""
        if math.isnan(self.takes_off.value):
            return self.text
        share, side = f"{self.takes_off.value:.0%} of the error", self.takes_off.side(WORTH_MENDING)
        most = "at most " if self.makes and self.cost else ""
        effect = (
            f"It takes off {most}{share}" if side == "above" else f"It may take off {share}: too few images to tell"
        )
        return f"{self.text} {effect}."


def in_order(remedies: Sequence[Remedy], first: str) -> list[Remedy]:
    """Return what is worth doing, by the share that it takes off; what mends the cause ``first`` before all."""

    def may_help(share: Share) -> bool:
        return share.side(WORTH_MENDING) != "below" and not share.value <= 0

    kept = [each for each in remedies if each.cause or may_help(each.takes_off)]
    return sorted(kept, key=lambda each: (each.cause != first, -_known(each.takes_off.value)))


def _known(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def of_findings(verdict: Verdict) -> list[Remedy]:
    """Return what mends each defect."""
    named = {each.cause: each for each in (*verdict.certain, *verdict.uncertain)}
    shares = {cause: Share(each.share, each.low, each.high) for cause, each in named.items()}
    if verdict.alarm and verdict.main.cause not in (*named, *verdict.normal):  # at the border alone
        shares[verdict.main.cause] = Share(math.nan)
    return [Remedy(as_sentence(REMEDIES[cause]), takes_off=share, cause=cause) for cause, share in shares.items()]


def costly_remedies(
    models: Models,
    variant: Variant,
    rounding: Share,
    options: CalibrationOptions,
    loras: Sequence[Path],
    command_words: Sequence[str],
) -> list[Remedy]:
    """Return what fits the LoRA to the deployment, the cheapest first; nothing if it cannot, or is no help.

    ``rounding``: of the weights, its share. ``command_words``: of the report's own command; a fix is that once more.
    """
    served = str(models.deployed.path or models.deployed.name).removesuffix("+all")
    if len(loras) != 1 or models.deployed.merged or not models.layers or rounding.value < _NEW_FILE:
        return []
    if not _is_lora(models):
        made = ("tools/resize_lora.py", "--lora", str(loras[0]), "--network_type", "lora", "--new_rank", "64")
        text = "Make a LoRA of it (tools/resize_lora.py --network_type lora), which can be refitted to this file."
        return [Remedy(text, "as-lora", "lora", (*made, "--save_to", SAVE_TO), "a LoRA keeps less of it")]
    words = [*_model(models), "--deploy", served, "--lora", str(loras[0]), *_calibration(options), "--save_to", SAVE_TO]
    in_comfyui = variant.merge is not None and models.server.is_comfyui
    again, beside = (_BYPASS, "; load it with the bypass") if in_comfyui else ((), "")
    refit = ("tools/refit_lora.py", *words, *(("--save_format", "comfy") if in_comfyui else ()))
    fix = ("tools/precision_report.py", *command_words, "--save_to", SAVE_TO, "--fix")
    same = f"Refit the LoRA to this file (tools/refit_lora.py): the same rank, fitted on your images{beside}."
    more = f"Refit it with 32 ranks more in every quantised layer, which undo a part of the rounding{beside}."
    every = "Try every fix on your images and name the cheapest that does."
    larger = (*refit, "--correction_rank", "32")
    return [
        Remedy(same, "refitted", "lora", refit, "one pass over the images", again, rounding),
        Remedy(more, "corrected", "lora", larger, "a larger LoRA", again, rounding),
        Remedy(every, "fixes", "fixes", fix, "half an hour and more", takes_off=rounding),
    ]


def of_distilled(equal: float | None, lora: Path) -> list[Remedy]:
    """Return what makes up for an effect that a distilled model has lost of the base's, the cheapest first.

    Args:
        equal: the strength at which it is as large; None: there is none.
        lora: at strength 1.
    """
    training = "Train it there on the base's effect (distill_from, distill_effect; docs/distilled.md)."
    if equal is None:
        return [Remedy(training, cost="a short training")]
    text = f"Use it at strength {equal:.2f} there, or write that into a file (tools/merge_lora.py)."
    command = ("tools/merge_lora.py", "--lora", str(lora), "--ratios", f"{equal:.2f}", "--save_to", SAVE_TO)
    return [Remedy(text, "for-distilled", "lora", command), Remedy(training, cost="a short training")]


def _is_lora(models: Models) -> bool:
    return all(isinstance(each, LoraWeights) for each in models.transformer_lora.values())


def _model(models: Models) -> list[str]:
    """Return the flags of the reference."""
    config = models.config
    parts = {key: getattr(config, key) for key in MODEL_FILE_KEYS if key in config.model_fields_set}
    found = ["--model", str(config.pretrained_model_name_or_path), "--model_type", models.family.name]
    found += ["--mixed_precision", "bf16" if models.dtype == torch.bfloat16 else "no"]
    return found + [word for key, value in parts.items() if value for word in (f"--{key}", str(value))]


def _calibration(options: CalibrationOptions) -> list[str]:
    """Return the flags of the images that the report was measured on."""
    found = ["--dataset_config", options.dataset_config, "--calibration_images", str(options.images)]
    found += ["--seed", str(options.seed), "--guidance_scale", f"{options.guidance_scale:g}"]
    found += ["--calibration_sigmas", *(f"{sigma:g}" for sigma in options.sigmas)]
    found += ["--masked_loss"] if options.masked_loss else []
    return found + (["--cache_directory", options.cache_directory] if options.cache_directory else [])


def free_remedies(
    models: Models,
    variant: Variant,
    full: Differences,
    without: Mapping[str, Differences],
    comparison: Comparison,
    loras: Sequence[Path],
    verdict: Verdict,
) -> list[Remedy]:
    """Return what a user may do before fitting or training anything, a sentence or two each.

    Args:
        models, variant, full: the deployment, and how far it is from the reference.
        without: cause -> the same without it.
        comparison: of all tensors.
        loras: files, whose names decide what ComfyUI's bypass takes.
        verdict: how the error splits.
    """
    layout = models.deployed.layout(models.deployed_family)
    in_comfyui = models.server.is_comfyui and not models.deployed.merged
    found = []
    if in_comfyui and variant.merge is not None:
        found.append(_bypass(models, full, without.get("merge"), loras))
        gguf = "Serve a GGUF of the model (Q8_0, Q6_K): its loader does not round the LoRA and multiplies in bf16"
        parts = sum(verdict.shares[part].value for part in ("merge", "activations") if part in verdict.shares)
        found.append(Remedy(f"{gguf}; steps are slower.", takes_off=Share(parts)))
    better = verdict.rounding.times(1 - (comparison.int8 or 1.0) ** 2)
    if comparison.int8 is not None and comparison.int8 < _WORTH_IT and better.value >= _NEW_FILE:
        text = (
            "Serve int8_convrot instead (tools/quantize_model.py --scheme int8_convrot): it leaves "
            f"{comparison.int8:.0%} of today's rounding error in the weights of the base. ComfyUI rounds the LoRA "
            "into it, too, unless the LoRA is loaded with \u201cLoad LoRA (Bypass)\u201d."
        )
        words = ("tools/quantize_model.py", "--model", str(models.config.pretrained_model_name_or_path))
        int8 = (*words, "--scheme", "int8_convrot", "--save_to", SAVE_TO)
        found.append(Remedy(text, "int8_convrot", "model", int8, takes_off=better))
    rounded = {each.how for each in models.roundings(variant).values()}
    if layout in ("comfy_scaled", "comfy_quant") and rounded - {"int8"} and (alone := without.get("activations")):
        text = "Have the file ask for products in high precision (tools/quantize_model.py --products high): "
        file = models.deployed.path
        high = ("tools/quantize_model.py", "--model", str(file), "--products", "high", "--save_to", SAVE_TO)
        text, command = f"{text}{_change(full, alone)}.", high if file else None
        found.append(Remedy(text, "high_products", "model", command, takes_off=taken_off(full, alone)))
    return found


def _bypass(models: Models, full: Differences, without: Differences | None, loras: Sequence[Path]) -> Remedy:
    """Say what ComfyUI's bypass does, and what it needs."""
    text = (
        "Load the LoRA with \u201cLoad LoRA (Bypass)\u201d: it stays beside the weights, and nothing of it is rounded"
    )
    text += f"; {_change(full, without)}." if without else "."
    words = None
    if dropped := dropped_by_bypass(loras, models.targets):
        as_lora = ("tools/resize_lora.py", "--network_type", "lora", "--new_rank", "64")
        tool = ("tools/convert_lora.py",) if _is_lora(models) else as_lora
        text += (
            f" Convert it first ({' '.join(tool)} --save_format comfy): {counted(len(dropped), 'layer')} of it "
            f"({dropped[0]}, ...) are parts of one layer in ComfyUI, and the bypass leaves such parts out."
        )
        if len(loras) == 1:
            model = ("--model_type", models.config.model_type)  # a LoRA of another program may not say
            lora = ("--lora", str(loras[0]), *model)
            words = (*tool, *lora, "--save_format", "comfy", "--save_to", SAVE_TO)
    if models.family.int8_passes_bypass and any(each.how == "int8" for each in models.served_inputs.values()):
        text += " On int8 files of this model newer versions multiply some layers past it: compare one picture."
    share = taken_off(full, without) if without else Share(math.nan)
    return Remedy(text, "comfy", "lora", words, again=_BYPASS, takes_off=share)


def _change(full: Differences, other: Differences) -> str:
    return f"the error is {other.error:.2%} instead of {full.error:.2%}"
