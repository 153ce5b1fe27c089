"""What rounding to fp8 does, on a layer of known shape: the numbers behind the figures of ``docs/precision.md``.

    python dev/precision_numbers.py     # prints them, in a minute

Weights are Student-t with 4 degrees of freedom and eight columns five times as large, at any standard deviation: the
kind that FLUX's layers are, made from a seed. Inputs lie mostly in a few directions. An update either has no direction
at all, or lies where the inputs are, as a trained LoRA's does. Everything is measured by rounding with
``library.precision`` and comparing; nothing here knows a formula for it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from library.precision.activations import round_activations
from library.precision.files.base import in_units
from library.precision.files.fp8 import Fp8Scheme, Fp8Weight
from library.precision.fp8_numbers import E4M3FN, dequantize, round_to_nearest
from library.precision.names import ActivationRounding, Granularity
from library.precision.parity.compensated import merge_into
from library.precision.parity.layer_errors import moment_energy, update_retention

SIZE = 512
RANK = 16
_FREEDOM, _OUTLIERS, _OUTLIER_SIZE = 4, 8, 5.0


def heavy_tailed_weight(std: float, size: int = SIZE, seed: int = 0) -> Tensor:
    """Return a weight [size, size], fp32, of standard deviation ``std``."""
    random = torch.Generator().manual_seed(seed)
    normal = torch.randn(size, size, generator=random)
    spread = torch.randn(size, size, _FREEDOM, generator=random).square().mean(-1).sqrt()
    weight = normal / spread  # Student's t: a normal number over the root of a chi square
    weight[:, torch.randperm(size, generator=random)[:_OUTLIERS]] *= _OUTLIER_SIZE
    return weight * (std / weight.std())


def input_moment(size: int = SIZE, seed: int = 1) -> Tensor:
    """Return the second moment [size, size] of inputs, float64.

    Their k-th direction has a variance of 1 / k, and eight channels are ten times the rms of the others.
    """
    random = torch.Generator().manual_seed(seed)
    directions, _ = torch.linalg.qr(torch.randn(size, size, generator=random, dtype=torch.float64))
    variances = 1.0 / torch.arange(1, size + 1, dtype=torch.float64)
    moment = directions @ (variances[:, None] * directions.t())
    outliers = torch.randperm(size, generator=random)[:_OUTLIERS]
    moment[outliers, outliers] += 100 * float(moment.diagonal().mean())
    return moment


def update_without_direction(weight: Tensor, share: float = 0.01, seed: int = 2) -> Tensor:
    """Return normal numbers of ``share`` of the weight's size."""
    update = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    return update * (share * weight.norm() / update.norm())


def update_along_inputs(weight: Tensor, moment: Tensor, share: float = 0.01, seed: int = 3) -> Tensor:
    """Return an update of rank 16 and ``share`` of the weight's size that looks where the inputs are."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(RANK, weight.shape[1], generator=random)
    down = inputs @ torch.linalg.cholesky(moment).t().float()  # rows are distributed as the inputs are
    update = torch.randn(weight.shape[0], RANK, generator=random) @ down
    return update * (share * weight.norm() / update.norm())


Lines = dict[str, list[float]]  # what a line is called -> its points
Rounding = Literal["nearest", "stochastic", "compensated"]


MERGES: dict[str, tuple[Granularity, Rounding]] = {
    "plain cast, nearest": ("cast", "nearest"),
    "block64, nearest": ("block64", "nearest"),
    "plain cast, stochastic": ("cast", "stochastic"),
    "plain cast, compensated": ("cast", "compensated"),
}


def weight_errors(stds: Sequence[float], granularities: Sequence[Granularity]) -> Lines:
    """Return granularity -> relative error of a weight, rounded to e4m3fn, at each standard deviation."""
    lines: Lines = {name: [] for name in granularities}
    for std in stds:
        weight = heavy_tailed_weight(std)
        for name in granularities:
            error = Fp8Scheme(name).quantize(weight).dequantize(torch.float32) - weight
            lines[name].append(float(error.norm() / weight.norm()))
    return lines


def cast_shares(stds: Sequence[float]) -> Lines:
    """Return the shares of weights that a plain cast makes zero and subnormal."""
    lines: Lines = {"zero": [], "subnormal": []}
    for std in stds:
        weight = heavy_tailed_weight(std)
        values = round_to_nearest(weight, E4M3FN).float().abs()
        lines["zero"].append(float((values == 0).double().mean()))
        lines["subnormal"].append(float(((values > 0) & (values < E4M3FN.min_normal)).double().mean()))
    return lines


def merged(base: Fp8Weight, update: Tensor, granularity: Granularity, how: Rounding, moment: Tensor) -> Tensor:
    """Return ``base`` plus ``update`` rounded into its own kind of fp8, as numbers."""
    if how == "compensated":
        return merge_into(base, update, moment, Fp8Scheme(granularity)).dequantize(torch.float32)
    random = torch.Generator().manual_seed(4) if how == "stochastic" else None
    total = base.dequantize(torch.float32) + update
    return (
        Fp8Scheme(granularity)
        .quantize(total, stochastic=how == "stochastic", generator=random)
        .dequantize(torch.float32)
    )


def merges(stds: Sequence[float]) -> dict[str, Lines]:
    """Merge both kinds of update into an fp8 file, in each of the ways of ``MERGES``, at each standard deviation.

    Returns, against the file with the LoRA beside it:
        - ``anywhere``: share that is left of an update of 1 % without direction, entry by entry.
        - ``along_inputs``: share that is left of the effect on outputs of an update of 1 % along the inputs.
        - ``error``: of the output, over what that update does to it; 1 is as far off as no LoRA.
    """
    moment = input_moment()
    result: dict[str, Lines] = {what: {name: [] for name in MERGES} for what in ("anywhere", "along_inputs", "error")}
    for std in stds:
        weight = heavy_tailed_weight(std)
        for name, (granularity, how) in MERGES.items():
            base = Fp8Scheme(granularity).quantize(weight)
            served = base.dequantize(torch.float32)
            update = update_without_direction(served)
            found = update_retention(merged(base, update, granularity, how, moment), served, update)
            result["anywhere"][name].append(found.gain)
            update = update_along_inputs(served, moment)
            made = merged(base, update, granularity, how, moment)
            left = update_retention(made, served, update, moment).output_gain
            result["along_inputs"][name].append(math.nan if left is None else left)
            error = moment_energy(made - served - update, moment) / moment_energy(update, moment)
            result["error"][name].append(math.sqrt(error))
    return result


def saturation(shares: Sequence[float]) -> Lines:
    """Merge updates of ``shares`` of the weight's size into a file with scales in blocks.

    Returns:
        Relative error of the weight with the file's scales (``old_scale``) and with fresh ones (``new_scale``), and the
        share of entries that the old ones clamp (``clamped``).
    """
    result: Lines = {"old_scale": [], "new_scale": [], "clamped": []}
    base = Fp8Scheme("block64").quantize(heavy_tailed_weight(0.02))
    served = base.dequantize(torch.float32)
    moment = input_moment()
    for share in shares:
        wanted = served + update_along_inputs(served, moment, share)
        assert base.scale is not None
        old = _with_scale(wanted, base.scale)
        result["old_scale"].append(float((old - wanted).norm() / wanted.norm()))
        fresh = Fp8Scheme("block64").quantize(wanted).dequantize(torch.float32)
        result["new_scale"].append(float((fresh - wanted).norm() / wanted.norm()))
        result["clamped"].append(float((in_units(wanted, base.scale).abs() > base.fp8.max).double().mean()))
    return result


def activation_errors(outliers: Sequence[float], how: ActivationRounding) -> tuple[list[float], list[float]]:
    """Return the error of ordinary activations beside one outlier of each size: in its own token, in all others.

    512 tokens of 512 channels, normal numbers of rms 1; the first channel of the first token is the outlier. Errors are
    relative and leave the outlier itself out.
    """
    ordinary = torch.randn(512, 512, generator=torch.Generator().manual_seed(5))
    own, others = [], []
    for size in outliers:
        x = ordinary.clone()
        x[0, 0] = size
        error = round_activations(x, how) - x
        own.append(float(error[0, 1:].norm() / x[0, 1:].norm()))
        others.append(float(error[1:].norm() / x[1:].norm()))
    return own, others


def unscaled_errors(sizes: Sequence[float]) -> Lines:
    """Return rounding -> relative error of activations of each rms, without scales (ComfyUI's --fast) and by rows."""
    ordinary = torch.randn(256, 512, generator=torch.Generator().manual_seed(6))
    hows: dict[str, ActivationRounding] = {"unit": "unit", "row": "row"}
    return {
        name: [
            float((round_activations(size * ordinary, how) / size - ordinary).norm() / ordinary.norm())
            for size in sizes
        ]
        for name, how in hows.items()
    }


def _with_scale(values: Tensor, scale: Tensor) -> Tensor:
    """Return ``values`` [out, in] rounded under ``scale`` [1 or out, blocks], saturating."""
    blocked = values.view(values.shape[0], scale.shape[1], -1) / scale.unsqueeze(-1)
    return dequantize(round_to_nearest(blocked, E4M3FN).view(values.shape), scale, torch.float32)


def main() -> None:
    """Print what each figure shows."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    stds, shares = [0.005, 0.01, 0.02, 0.04, 0.08], [0.01, 0.03, 0.1, 0.3, 1.0]
    outliers, sizes = [1e1, 1e2, 1e3, 1e4, 1e5, 1e6], [2.0**exponent for exponent in range(-14, 11, 4)]
    tables: dict[str, Lines] = {
        "error of a weight": {"std": stds, **weight_errors(stds, ("cast", "tensor", "row", "block64"))},
        "share of weights in a plain cast": {"std": stds, **cast_shares(stds)},
    }
    for what, lines in merges(stds).items():
        tables[f"a merged update of 1 %: {what}"] = {"std": stds, **lines}
    tables["error of a merged weight"] = {"size of the update": shares, **saturation(shares)}
    for how in ("tensor", "row"):
        own, others = activation_errors(outliers, how)
        name = f"activations beside an outlier, scale per {how}"
        tables[name] = {"outlier": outliers, "its token": own, "other tokens": others}
    tables["activations without scales"] = {"rms": sizes, **unscaled_errors(sizes)}
    for title, lines in tables.items():
        print(title)
        for name, values in lines.items():
            print(f"  {name:<24}", *(f"{value:9.3g}" for value in values))


if __name__ == "__main__":
    main()
