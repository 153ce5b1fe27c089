"""LoRAs merged into quantised models: update retention, then rounding as asked for, then the file.

``networks.merging.quantized`` says what is done to the weights. Here the deployed model runs on the calibration where
rounding looks at activations: at most half the size of bf16, with the LoRAs beside it. A bf16 base of FLUX's size is
24 GB, so it is never loaded whole; its weights are read from the file one layer at a time. The activations are those
that the rounded layers will meet; they differ from the bf16 model's by the very error that is to be removed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.table import Table

from library.console import Console, plain_table
from library.errors import UserError, counted, names_in_short
from library.fidelity.calibration import CalibrationPlan
from library.models.layer_names import LoraTargets
from library.precision.files.fp8 import Fp8Scheme
from library.precision.names import QUANTIZED_PRECISIONS, LayoutKind
from library.precision.parity.layer_errors import FLAGGED, UpdateRetention
from library.precision.recipe import Recipe, WeightLoader, scheme_named
from library.precision.writing import write_quantized
from library.safetensors_io import find_index
from networks.files.adapters import AdapterFile
from networks.files.base import Base, check_target, folder_copy, open_base
from networks.files.weights import AdapterWeights, FullWeights
from networks.merging.low_rank import combine_loras
from networks.merging.merge import LoraSource, base_notes, plan_updates, read_sources
from networks.merging.quantized import QuantizedMerge, rounding_retention
from networks.network import attach_lora

Rounding = Literal["nearest", "stochastic", "compensated"]


@dataclass(frozen=True)
class RoundingOptions:
    """How merged weights are rounded.

    Attributes:
        precision: one of ``QUANTIZED_PRECISIONS``, for a bf16 model.
        rounding: see ``networks.merging.quantized``.
        seed: of stochastic rounding.
        plan: of compensated rounding: the deployed model and what it runs on.
        accept_loss: write although rounding loses updates.
        shown: layers in the table of what rounding left; None for all.
    """

    precision: str | None = None
    rounding: Rounding = "nearest"
    seed: int = 0
    plan: CalibrationPlan | None = None
    accept_loss: bool = False
    shown: int | None = 10


def merge_quantized(
    model: Path,
    sources: Sequence[LoraSource],
    save_to: Path,
    targets: LoraTargets,
    console: Console,
    how: RoundingOptions,
    transformer_only: bool = False,
) -> dict[str, UpdateRetention]:
    """Merge into a quantised model; return what is left of each tensor's update in what was written.

    Args:
        model: in bf16, or quantised, which it stays.
        sources: the LoRAs.
        save_to: a new folder, or a .safetensors file where ``model`` is one.
        targets: the family's row.
        console: for tables and notes.
        how: weights are rounded.
        transformer_only: leave out the LoRAs' layers of text encoders.

    Raises:
        UserError: files that do not fit, or updates that rounding would lose.
    """
    base = open_base(model, quantized=True)
    check_target(base, save_to, torch.float8_e4m3fn)
    kind, recipe = _what_is_written(base, how)
    files = read_sources(sources, targets)
    for note in base_notes(base.weights_path, files):
        console.print(f"note: {note}")
    loras = _of_transformer(files, targets, transformer_only)
    updates = plan_updates(base.weights, loras, targets.keys, targets.family)
    save_to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=save_to.parent, prefix=f".{save_to.name}.") as spool:
        merge = QuantizedMerge(base, updates, kind, recipe, targets, Path(spool))
        found = dict(rounding_retention(merge))
        if found:
            title = f"left by rounding {how.rounding.replace('compensated', 'to nearest')}"
            console.print(retention_table(title, found, how.shown))
        flagged = [name.removesuffix(".weight") for name, one in found.items() if one.flagged]
        if flagged and how.rounding == "nearest" and not how.accept_loss:
            _refuse_loss(model, merge, flagged, console)
        if how.plan is not None:
            found |= compensate(merge, how.plan, console, loras)
            if found:
                console.print(retention_table("left by compensated rounding", found, how.shown))
        _write(merge, save_to, sources, console)
    return found


def retention_table(title: str, found: Mapping[str, UpdateRetention], shown: int | None) -> Table:
    """Return layers by rising update retention; the worst ``shown`` of them, None for all."""
    table = plain_table("layer", "retained", "cosine", "in outputs", "", left=[""], title=title)
    order = sorted(found, key=lambda name: found[name].gain)
    for name in order[:shown]:
        one = found[name]
        outputs = "" if one.output_gain is None else f"{one.output_gain:.3f}"
        mark = f"< {FLAGGED:g}" if one.flagged else ""
        table.add_row(name, f"{one.gain:.3f}", f"{one.cosine:.3f}", outputs, mark)
    if shown is not None and len(order) > shown:
        table.add_row(f"and {len(order) - shown} more", *[""] * 4)
    flagged = sum(one.flagged for one in found.values())
    table.add_section()
    mean = sum(one.gain for one in found.values()) / len(found)
    table.add_row("mean of all layers", f"{mean:.3f}", "", "", f"{flagged} of {len(found)}" if flagged else "none")
    return table


def _what_is_written(base: Base, how: RoundingOptions) -> tuple[LayoutKind, Recipe]:
    stochastic, precision, seed = how.rounding == "stochastic", how.precision, how.seed
    if base.weights.quantized is None:
        assert precision is not None
        layout, scheme = QUANTIZED_PRECISIONS[precision]
        return layout, Recipe(scheme_named(scheme), stochastic=stochastic, seed=seed)
    schemes = {stored.scheme for stored in base.weights.quantized.weights.values()}
    if precision is not None and not (precision == "fp8" and all(isinstance(each, Fp8Scheme) for each in schemes)):
        raise UserError(
            f"--save_precision {precision}: {base.path} is quantised and stays as it is; remove it, or "
            "merge into the bf16 model"
        )
    return base.weights.quantized.layout, Recipe(exclude=(), stochastic=stochastic, seed=seed)


def _of_transformer(
    files: Sequence[tuple[LoraSource, AdapterFile]], targets: LoraTargets, transformer_only: bool
) -> list[tuple[LoraSource, dict[str, AdapterWeights]]]:
    """Return the transformer's part of each LoRA; parts of text encoders are left out only if that is wanted."""
    read = [(source, targets.by_component(file.weights)) for source, file in files]
    if any(set(parts) - {targets.file_prefix} for _, parts in read) and not transformer_only:
        raise UserError("--lora: text encoders are not written quantised; give --transformer_only to leave them out")
    return [(source, parts.get(targets.file_prefix, {})) for source, parts in read]


def _refuse_loss(model: Path, merge: QuantizedMerge, flagged: Sequence[str], console: Console) -> None:
    """Refuse to round updates away; beside bf16 weights, where what is missing is the noise of rounding, say so."""
    if merge.layout is None:
        console.print(f"note: under 0.95 by the noise of rounding: {names_in_short(flagged)}; compensated has less")
        return
    raise UserError(
        f"{model}: rounding would lose more than 5 % of the update of {names_in_short(flagged)}; give "
        "--dataset_config for compensated rounding, merge into the bf16 model, or --accept_loss"
    )


def compensate(
    merge: QuantizedMerge,
    plan: CalibrationPlan,
    console: Console,
    loras: Sequence[tuple[LoraSource, Mapping[str, AdapterWeights]]] = (),
) -> dict[str, UpdateRetention]:
    """Run the model with ``loras`` on the calibration and round group by group; return what is left of each update."""
    calibration = plan.prepare(console, textures=True)
    fp8 = WeightLoader(None if merge.layout is not None else merge.recipe, compute="dequant")
    transformer = calibration.family.load_transformer(plan.dtype, plan.device, fp8=fp8)
    whole = [any(isinstance(one, FullWeights) for one in weights.values()) for _, weights in loras]
    if any(whole):
        console.print("note: files that change biases or whole weights are not in the model that is calibrated on")
    if beside := [(each, source.ratio) for (source, each), full in zip(loras, whole, strict=True) if not full]:
        attach_lora(transformer, combine_loras(beside), merge.targets, "--lora")
    changed = merge.updates if merge.layout is not None else merge.quantized()
    first = {names[0]: tensor for tensor, names in merge.modules().items() if tensor in changed}
    left: dict[str, UpdateRetention] = {}
    for group in calibration.layer_inputs(transformer, list(first)):
        for name, inputs in group.items():
            tensor = first[name]
            if (one := merge.compensate(tensor, inputs)) is not None:
                left[tensor] = one
    return left


def _write(merge: QuantizedMerge, save_to: Path, sources: Sequence[LoraSource], console: Console) -> None:
    base = merge.base
    merged = ", ".join(f"{source.path.name}:{source.ratio:g}" for source in sources)
    place: AbstractContextManager[Path] = nullcontext(save_to.parent)
    if base.folder is not None:
        place = folder_copy(base, save_to, None)
    with place as folder:
        if base.folder is not None and (index := find_index(folder)):
            index.unlink()  # the shards become one file
        target = save_to if base.folder is None else folder / "diffusion_pytorch_model.safetensors"
        merge.metadata["tandem.merged_loras"] = merged
        written = write_quantized(base.weights, target, merge.kind, merge.recipe, merge=merge)
    console.print(f"{save_to}: {counted(len(merge.updates), 'tensor')} changed; {written.quantized} quantised")
