"""``merge_lora.py`` into fp8: survival first, then rounding as asked for, then the file and its correction.

See ``networks.merging.merge_fp8`` for what is done to the weights; here are the flags, the calibration and the report.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console

import tools.calibration_flags as flags
from library.errors import UserError
from library.files import weights_fingerprint
from library.models.family import model_family
from library.models.layer_names import LoraTargets
from library.precision.checkpoint_layouts import LayoutKind
from library.precision.checkpoint_writing import write_fp8_checkpoint
from library.precision.parity.activations import collect_inputs
from library.precision.parity.layer_errors import UpdateRetention
from library.precision.quantize import Granularity
from library.precision.recipe import Fp8Loader, Fp8Recipe
from library.training.calibration import prepare_calibration
from networks.files.adapters import load_adapter, save_adapter
from networks.files.base import Base, folder_copy, open_base
from networks.files.metadata import base_mismatch
from networks.files.weights import LoraWeights, names_in_short
from networks.injection import attach_lora
from networks.merging.low_rank import combine_loras
from networks.merging.merge import Fits, LoraSource, partial_notes, plan_updates, unknown_keys
from networks.merging.merge_fp8 import Fp8Merge, recipe_of_base, rounding_retention
from tools.parity_tables import survival_table

FP8_PRECISIONS: dict[str, tuple[LayoutKind, Granularity]] = {
    "fp8": ("plain", "cast"),
    "fp8_scaled": ("comfy_scaled", "tensor"),
    "fp8_comfy_quant": ("comfy_quant", "tensor"),
    "fp8_row": ("musubi", "row"),
    "fp8_block64": ("musubi", "block64"),
    "fp8_block128": ("musubi", "block128"),
}
_FP8_ONLY = ("rounding", "correction_rank", "survival", "accept_loss", "dataset_config")


def add_fp8_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of merges into fp8."""
    group = parser.add_argument_group("into fp8", "a model that is in fp8 is merged into fp8 of its own kind")
    group.add_argument(
        "--rounding",
        choices=["nearest", "stochastic", "compensated"],
        help="default: compensated with --dataset_config",
    )
    group.add_argument("--correction_rank", type=int, metavar="R", help="also write a LoRA of what rounding lost")
    group.add_argument(
        "--survival", action="store_true", help="show what is left of every layer's update, not the worst"
    )
    group.add_argument("--accept_loss", action="store_true", help="write although layers keep less than 0.95 of theirs")
    flags.add_calibration_arguments(parser, required=False, model_type=False)


def goes_into_fp8(options: argparse.Namespace) -> bool:
    """Return whether the result is in fp8.

    Raises:
        UserError: flags for fp8 and a result that is not.
    """
    base = None if options.model is None else open_base(options.model, fp8=True)
    if options.save_precision in FP8_PRECISIONS or (base is not None and recipe_of_base(base) is not None):
        if base is None:
            precision = options.save_precision
            raise UserError(
                f"--save_precision {precision}: a LoRA in fp8 is mostly zeros and is never written; use bf16"
            )
        return True
    if unused := next((name for name in _FP8_ONLY if getattr(options, name)), None):
        raise UserError(f"--{unused}: has no effect here; give a --save_precision of fp8, or remove it")
    return False


def merge_to_fp8(
    options: argparse.Namespace, sources: Sequence[LoraSource], targets: LoraTargets, console: Console
) -> dict[str, UpdateRetention]:
    """Merge into fp8; return what is left of each tensor's update in what was written.

    Raises:
        UserError: flags or files that do not fit, or updates that rounding would lose.
    """
    rounding = options.rounding or ("compensated" if options.dataset_config else "nearest")
    if (rounding == "compensated" or options.correction_rank) and not options.dataset_config:
        raise UserError("--rounding compensated and --correction_rank look at activations; give --dataset_config")
    if options.correction_rank is not None and options.correction_rank < 1:
        raise UserError(f"--correction_rank {options.correction_rank}: must be at least 1")
    base = open_base(options.model, fp8=True)
    kind, recipe = _what_is_written(options, base, rounding)
    _check_target(base, options.save_to)
    fits: Fits | None = {} if options.allow_partial else None
    files = [(source, load_adapter(source.path, targets, unknown_keys(fits, source))) for source in sources]
    read = [(source, targets.by_component(file.weights)) for source, file in files]
    here = weights_fingerprint(base.weights_path)
    for source, file in files:
        if remark := base_mismatch(file.metadata, here):
            console.print(f"note: {source.path}: {remark}")
    if any(set(parts) - {targets.file_prefix} for _, parts in read) and not options.transformer_only:
        raise UserError("--lora: text encoders are not written in fp8; give --transformer_only to leave them out")
    own = [(source, parts.get(targets.file_prefix, {})) for source, parts in read]
    updates = plan_updates(base.weights, own, targets.keys, targets.family, fits)
    for note in partial_notes(fits):
        console.print(f"note: {note}")
    options.save_to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.save_to.parent, prefix=f".{options.save_to.name}.") as spool:
        merge = Fp8Merge(base, updates, kind, recipe, targets, Path(spool))
        found = dict(rounding_retention(merge))
        shown = len(found) if options.survival else 10
        if found:
            console.print(
                survival_table(f"left by rounding {rounding.replace('compensated', 'to nearest')}", found, shown)
            )
        flagged = [name.removesuffix(".weight") for name, one in found.items() if one.flagged]
        if flagged and rounding == "nearest" and not options.accept_loss:
            _lost(options, merge, flagged, console)
        correction: dict[str, LoraWeights] = {}
        if options.dataset_config:
            found |= _calibrated(options, merge, own, rounding == "compensated", correction, console)
            if rounding == "compensated" and found:
                console.print(survival_table("left by compensated rounding", found, shown))
        _write(options, merge, sources, console)
    if correction:
        _write_correction(options, correction, targets, console)
    return found


def _what_is_written(options: argparse.Namespace, base: Base, rounding: str) -> tuple[LayoutKind, Fp8Recipe]:
    own = recipe_of_base(base)
    stochastic = rounding == "stochastic"
    if own is None:
        kind, granularity = FP8_PRECISIONS[options.save_precision]
        return kind, Fp8Recipe(granularity, stochastic=stochastic, seed=options.seed)
    kind, recipe = own
    if options.save_precision not in (None, "fp8"):
        raise UserError(
            f"--save_precision {options.save_precision}: {options.model} is in fp8 and stays as it is; remove it, or "
            "merge into the bf16 model"
        )
    return kind, Fp8Recipe(recipe.granularity, recipe.fp8, exclude=(), stochastic=stochastic, seed=options.seed)


def _check_target(base: Base, save_to: Path) -> None:
    if (base.folder is None) != (save_to.suffix == ".safetensors"):
        ending = "end --save_to in .safetensors" if base.folder is None else "give --save_to a new folder"
        raise UserError(f"{save_to}: does not suit {base.path}; {ending}")
    if save_to.exists() and (base.folder is not None or save_to.samefile(base.path)):
        raise UserError(f"{save_to}: exists; choose another --save_to")


def _lost(options: argparse.Namespace, merge: Fp8Merge, flagged: Sequence[str], console: Console) -> None:
    """Refuse to round updates away; beside bf16 weights, where what is missing is the noise of rounding, say so."""
    if merge.layout is None:
        console.print(f"note: under 0.95 by the noise of rounding: {names_in_short(flagged)}; compensated has less")
        return
    raise UserError(
        f"{options.model}: rounding would lose more than 5 % of the update of {names_in_short(flagged)}; give "
        "--dataset_config for compensated rounding, merge into the bf16 model, or --accept_loss"
    )


def _calibrated(
    options: argparse.Namespace,
    merge: Fp8Merge,
    loras: Sequence[tuple[LoraSource, object]],
    compensated: bool,
    correction: dict[str, LoraWeights],
    console: Console,
) -> dict[str, UpdateRetention]:
    """Run the calibration, round and correct group by group; fill ``correction``, return what is left of updates."""
    device, dtype = flags.device_and_dtype(options)
    family = model_family(flags.model_config(options, options.model))
    calibration = prepare_calibration(family, flags.calibration_options(options), dtype, device, console)
    recipe = None if merge.layout is not None else merge.recipe
    transformer = family.load_transformer(dtype, device, fp8=Fp8Loader(recipe, compute="dequant"))
    plain = [(weights, source.ratio) for source, weights in loras if _are_loras(weights)]
    if len(plain) < len(loras):
        console.print("note: adapters of other kinds than LoRA are not in the model that is calibrated on")
    if plain:
        attach_lora(transformer, combine_loras(plain), merge.targets, "--lora")
    modules = merge.modules()
    if merge.layout is not None and not options.correction_rank:
        modules = {tensor: names for tensor, names in modules.items() if tensor in merge.updates}
    first = {names[0]: tensor for tensor, names in modules.items()}
    fit = calibration.forwards(transformer, [*calibration.fit, *calibration.check])
    left: dict[str, UpdateRetention] = {}
    memory = int(options.statistics_gb * 2**30)
    for group in collect_inputs(transformer, list(first), fit, memory_bytes=memory, seed=options.seed):
        for name, inputs in group.items():
            tensor = first[name]
            if compensated and (one := merge.compensate(tensor, inputs)) is not None:
                left[tensor] = one
            if options.correction_rank:
                correction |= merge.low_rank_correction(tensor, modules[tensor], inputs, options.correction_rank)
    return left


def _are_loras(weights: object) -> bool:
    return isinstance(weights, dict) and all(isinstance(one, LoraWeights) for one in weights.values())


def _write(options: argparse.Namespace, merge: Fp8Merge, sources: Sequence[LoraSource], console: Console) -> None:
    base = merge.base
    merged = ", ".join(f"{source.path.name}:{source.ratio:g}" for source in sources)
    place: AbstractContextManager[Path] = nullcontext(options.save_to.parent)
    if base.folder is not None:
        place = folder_copy(base, options.save_to, None)
    with place as folder:
        for index in folder.glob("*.safetensors.index.json") if base.folder is not None else ():
            index.unlink()  # the shards become one file
        target = options.save_to if base.folder is None else folder / "diffusion_pytorch_model.safetensors"
        written = write_fp8_checkpoint(
            base.weights, target, merge.kind, merge.recipe, merge=merge, metadata={"tandem.merged_loras": merged}
        )
    console.print(f"{options.save_to}: {len(merge.updates)} tensors changed; {written.quantized} in fp8")


def _write_correction(
    options: argparse.Namespace, weights: dict[str, LoraWeights], targets: LoraTargets, console: Console
) -> None:
    path = options.save_to.with_name(f"{options.save_to.stem}-correction.safetensors")
    merged = options.save_to / "transformer" if (options.save_to / "transformer").is_dir() else options.save_to
    metadata = {
        "tandem.base_fingerprint": weights_fingerprint(merged),
        "tandem.base_name": options.save_to.name,
        "tandem.retargeted": '{"correction_of": "a merge"}',
    }
    save_adapter(path, weights, targets, "diffusers", "bf16", metadata)
    console.print(f"{path}: what rounding lost of {len(weights)} layers, rank {options.correction_rank}; use it at 1.0")
