"""Refit a LoRA that was trained in bf16 to the fp8 model it will be used with: no training, the same file format.

    python tools/retarget_lora.py --lora style.safetensors --base FLUX.1-dev --deploy flux1-dev-fp8.safetensors \\
        --dataset_config my_dataset.toml --save_to style-fp8.safetensors
    python tools/retarget_lora.py ... --deploy cast               # what fp8_base makes of the base; or tensor, row, ...
    python tools/retarget_lora.py ... --correction_rank 16        # and undo more of the rounding, at a larger rank

Each layer's factors are fitted so that on your images the fp8 layer with the new LoRA computes what the bf16 layer
computed with the old one, as nearly as that rank allows (``networks.merging.refit``). Rank, alpha and keys stay, unless
--correction_rank is given: then ranks grow by it, and layers without a LoRA get one of that rank.

The cost: one forward pass of the fp8 model for each image and noise level and for each group of layers whose
statistics fit into --statistics_gb, and one reading of both files. The result fits this fp8 file and no other: its
fingerprint goes into the metadata, and loading it beside another one is remarked on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from torch import Tensor

import tools.calibration_flags as flags
from library.errors import UserError, exit_on_user_error
from library.models.family import Family, model_family, with_transformer
from library.models.layer_names import LoraTargets
from library.precision.checkpoint_layouts import Fp8Layout, WeightFiles
from library.precision.parity.activations import LayerInputs, collect_inputs
from library.precision.recipe import Fp8Loader, Fp8Recipe
from library.training.calibration import prepare_calibration
from library.training.tasks.lora_plan import describe_base
from networks.files.adapters import PRECISIONS, LoraFile, load_lora
from networks.files.base import BaseModule, find_modules, open_base
from networks.files.metadata import base_mismatch
from networks.files.weights import LoraWeights, names_in_short
from networks.injection import attach_lora
from networks.merging.refit import Refit, refit_layer
from tools.lora_output import add_output_arguments, check_output, widest_precision, write_lora
from tools.parity_tables import refit_table


@dataclass(frozen=True)
class _Weights:
    """The linear weights of a model on disk, read one at a time."""

    places: Mapping[str, BaseModule]
    weights: WeightFiles

    @classmethod
    def of(cls, path: Path, option: str, targets: LoraTargets) -> _Weights:
        weights = open_base(path, option, fp8=True).weights
        return cls(find_modules(weights, targets.keys, targets.family), weights)

    def read(self, names: Sequence[str], device: torch.device) -> Tensor:
        """Return the weights of ``names``, one below the other, fp32."""
        return torch.cat([self.places[name].read(self.weights, device) for name in names])


@dataclass(frozen=True)
class Deployment:
    """The model that will be served: an fp8 file, or a recipe for the base's weights."""

    family: Family
    layout: Fp8Layout | None
    recipe: Fp8Recipe | None
    base: _Weights
    served: _Weights | None
    name: str

    def weights(self, names: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the weights of ``names`` in high precision and as served, one below the other."""
        high = self.base.read(names, device)
        if self.served is not None:
            return high, self.served.read(names, device)
        assert self.recipe is not None
        parts = high.split([self.base.places[name].shape[0] for name in names])
        rounded = [self.recipe.quantize(name, part) for name, part in zip(names, parts, strict=True)]
        return high, torch.cat([quantized.dequantize(torch.float32) for quantized in rounded])

    def in_fp8(self, name: str) -> bool:
        """Return whether the layer ``name`` is served in fp8."""
        if self.served is not None:
            return self.layout is not None and self.served.places[name].tensor in self.layout.dtypes
        return self.recipe is not None and self.recipe.excluded_as(name) is None


def open_deployment(base: Family, options: argparse.Namespace) -> Deployment:
    """Find out what ``--deploy`` is.

    Raises:
        UserError: it is neither a model nor a recipe, or holds nothing in fp8.
    """
    targets = base.targets
    high = _Weights.of(options.base.expanduser(), "--base", targets)
    if base.fp8_layout() is not None:
        raise UserError(f"--base {options.base}: is in fp8; give the bf16 model that the LoRA was trained on")
    path = Path(options.deploy).expanduser()
    if not path.exists():
        recipe = flags.recipe_named(options.deploy, "--deploy")
        return Deployment(base, None, recipe, high, None, options.deploy)
    family = model_family(with_transformer(flags.model_config(options, options.base), path))
    layout = family.fp8_layout()
    if layout is None:
        raise UserError(f"--deploy {path}: holds no fp8 weights; give the fp8 file that will be served")
    return Deployment(family, layout, None, high, _Weights.of(path, "--deploy", targets), path.name)


def units(lora: Mapping[str, LoraWeights], extra: Sequence[str], targets: LoraTargets) -> list[list[str]]:
    """Return the layers that are fitted as one, by name: those that share A in a fused file do, others are alone."""
    found: list[list[str]] = []
    for name, weights in lora.items():
        place = targets.keys.find(name)
        for unit in found:
            first, other = lora[unit[0]], targets.keys.find(unit[0])
            fused = place is not None and other is not None and place.original == other.original
            if fused and first.alpha == weights.alpha and torch.equal(first.down, weights.down):
                unit.append(name)
                break
        else:
            found.append([name])
    return [*found, *([name] for name in extra if name not in lora)]


def fit_unit(
    names: Sequence[str],
    lora: Mapping[str, LoraWeights],
    deployment: Deployment,
    inputs: LayerInputs,
    correction_rank: int,
    dtype: torch.dtype,
) -> tuple[Refit, dict[str, LoraWeights]]:
    """Refit layers that share A; return the fit of all and the weights of each."""
    weight, served = deployment.weights(names, inputs.moment.device)
    whole = None
    if names[0] in lora:
        ups = torch.cat([lora[name].up for name in names])
        whole = LoraWeights(lora[names[0]].down.to(weight.device), ups.to(weight.device), lora[names[0]].alpha)
    done = refit_layer(whole, weight, served, inputs, correction_rank=correction_rank, dtype=dtype)
    if done.weights is None:
        return done, {}
    rows = [deployment.base.places[name].shape[0] for name in names]
    down, ups_of = done.weights.down.cpu(), done.weights.up.cpu().split(rows)
    fitted = {n: LoraWeights(down, u.contiguous(), done.weights.alpha) for n, u in zip(names, ups_of, strict=True)}
    return done, fitted


def retarget(options: argparse.Namespace, console: Console) -> dict[str, Refit]:
    """Run the tool; return each unit's fit under its layers' names.

    Raises:
        UserError: files that do not belong together, or see ``prepare_calibration``.
    """
    check_output(options.save_to, options.overwrite)
    if options.correction_rank < 0:
        raise UserError(f"--correction_rank {options.correction_rank}: is negative; give 0 or more")
    base = model_family(flags.model_config(options, options.base))
    targets = base.targets
    deployment = open_deployment(base, options)
    source = load_lora(options.lora, targets)
    own, rest = _split(source, targets)
    if absent := sorted(own.keys() - deployment.base.places.keys()):
        raise UserError(f"{options.lora}: {names_in_short(absent)} are not in {options.base}; wrong model?")
    if remark := base_mismatch(source.metadata, base.fingerprint()):
        console.print(f"note: {options.lora}: {remark}")
    in_fp8 = [name for name in deployment.base.places if deployment.in_fp8(name)]
    served = {name: weights for name, weights in own.items() if name in set(in_fp8)}
    extra = in_fp8 if options.correction_rank else []
    together = units(served, extra, targets)
    if not together:
        raise UserError(f"{options.lora}: none of its layers is in fp8 in {options.deploy}; it fits as it is")

    device, dtype = flags.device_and_dtype(options)
    calibration = prepare_calibration(base, flags.calibration_options(options), dtype, device, console)
    fp8 = Fp8Loader(deployment.recipe, compute="dequant")
    transformer = deployment.family.load_transformer(dtype, device, fp8=fp8)
    precision = describe_base(deployment.layout, fp8, dtype)
    console.print(f"deployed: {deployment.name}: {precision}")
    if own:
        attach_lora(transformer, own, targets, str(options.lora))
    fit = calibration.forwards(transformer, calibration.fit)
    check = calibration.forwards(transformer, calibration.check)
    names = [name for unit in together for name in unit]
    memory = int(options.statistics_gb * 2**30)
    stored = PRECISIONS[options.save_precision or widest_precision(source.weights)]
    fits: dict[str, Refit] = {}
    fitted: dict[str, LoraWeights] = {}
    for group in collect_inputs(transformer, names, fit, check, memory_bytes=memory, seed=options.seed):
        for unit in (unit for unit in together if unit[0] in group):
            done, weights = fit_unit(unit, own, deployment, group[unit[0]], options.correction_rank, stored)
            fits[" + ".join(unit)] = done
            fitted |= weights
        console.print(f"{len(fits)} of {len(together)} layers fitted")
    console.print(refit_table(fits, options.show))
    _save(options, own | fitted | rest, source, targets, deployment, precision, fits)
    console.print(f"{options.save_to}: {len(fitted)} layers fitted to {deployment.name}")
    return fits


def _split(source: LoraFile, targets: LoraTargets) -> tuple[dict[str, LoraWeights], dict[str, LoraWeights]]:
    """Return the transformer's weights, and those of text encoders, which stay as they are."""
    parts = targets.by_component(source.weights)
    own = parts.pop(targets.file_prefix, {})
    return own, {name: weights for part in parts.values() for name, weights in part.items()}


def _save(
    options: argparse.Namespace,
    weights: Mapping[str, LoraWeights],
    source: LoraFile,
    targets: LoraTargets,
    deployment: Deployment,
    precision: str,
    fits: Mapping[str, Refit],
) -> None:
    """Write the LoRA with the fingerprint of what it was fitted to."""
    count = len(fits)
    record = {
        "lora": options.lora.name,
        "base_fingerprint": source.metadata.get("tandem.base_fingerprint"),
        "correction_rank": options.correction_rank,
        "calibration_images": options.calibration_images,
        "calibration_sigmas": list(options.calibration_sigmas),
        "seed": options.seed,
        "mean_error_before": sum(fit.before for fit in fits.values()) / count,
        "mean_error_after": sum(fit.after for fit in fits.values()) / count,
    }
    metadata = source.metadata | {
        "tandem.base_fingerprint": deployment.family.fingerprint(),
        "tandem.base_precision": precision,
        "tandem.base_name": deployment.name,
        "tandem.retargeted": json.dumps(record),
    }
    write_lora(
        options.save_to,
        weights,
        targets,
        options.save_format or source.layout,
        options.save_precision or widest_precision(source.weights),
        metadata,
        f"retargeted to {deployment.name}",
    )


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    top.add_argument("--lora", required=True, type=Path, help="the LoRA, of any layout")
    top.add_argument("--base", required=True, type=Path, help="bf16 model: diffusers folder or transformer file")
    top.add_argument(
        "--deploy", required=True, metavar="MODEL_OR_RECIPE", help="fp8 model; or cast, tensor, row, block64, block128"
    )
    top.add_argument("--correction_rank", type=int, default=0, metavar="R", help="rank to add to every fp8 layer")
    top.add_argument("--show", type=int, default=20, metavar="N", help="layers in the table (default: %(default)s)")
    add_output_arguments(top)
    flags.add_calibration_arguments(top, required=True, model_type=False)
    return top


@exit_on_user_error
def main() -> None:
    """Parse the command line and retarget."""
    retarget(parser().parse_args(), Console(highlight=False, markup=False))


if __name__ == "__main__":
    main()
