"""The report's pictures: each function returns one matplotlib figure or one PIL image."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from library.precision.parity.seam import border_distance
from tools.report.causes import CAUSES, Attribution
from tools.report.differences import Differences
from tools.report.layers import LayerRow
from tools.report.runs import Outcome, Probe

_CELL, _HEADER = 224, 28  # pixels of a picture and of the titles above
_REGIONS = {"whole": "#222222", "filled": "#1f77b4", "known": "#7f7f7f", "ring": "#d62728"}


def error_by_sigma(named: Mapping[str, Differences]) -> Figure:
    """Relative velocity error against the noise level, a panel for each of ``named``, a line for each region."""
    figure = Figure(figsize=(4.2 * len(named), 3.2), layout="constrained")
    axes = figure.subplots(1, len(named), sharey=True, squeeze=False)[0]
    for axis, (title, differences) in zip(axes, named.items(), strict=True):
        sigmas = sorted(differences.velocity_by_sigma)
        for region, colour in _REGIONS.items():
            values = [differences.velocity_by_sigma[sigma].get(region, math.nan) for sigma in sigmas]
            if not all(map(math.isnan, values)):
                axis.plot(sigmas, [100 * v for v in values], marker="o", color=colour, label=region)
        axis.set(xlabel="noise level σ", title=title)
    axes[0].set_ylabel("velocity error, % of its size")
    axes[0].legend()
    _from_zero(axes)
    return figure


def error_over_steps(named: Mapping[str, Differences]) -> Figure:
    """Relative error of the latents after every step of a sampling run."""
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axis = figure.subplots()
    for title, differences in named.items():
        values = [100 * value for value in differences.latents_by_step]
        axis.plot(range(1, len(values) + 1), values, marker=".", label=title)
    axis.set(xlabel="sampling step", ylabel="latents' error, % of their size")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend()
    _from_zero([axis])
    return figure


def rings(named: Mapping[str, Differences]) -> Figure:
    """rms error of rings inside and outside the border over the interior's; 1 is no seam."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axis = figure.subplots()
    outside: Mapping[int, float] = {}
    for number, (title, differences) in enumerate(named.items()):
        inside, outside = differences.seam["inside"], differences.seam["outside"]
        places = [*(-width for width in sorted(outside, reverse=True)), *sorted(inside)]
        values = [*(outside[w] for w in sorted(outside, reverse=True)), *(inside[w] for w in sorted(inside))]
        axis.plot(range(len(places)), values, marker="o", label=title, color=f"C{number}")
        axis.set_xticks(range(len(places)), [f"{abs(place)}" for place in places])
    axis.axhline(1, color="#999999", linewidth=0.8)
    axis.axvline(len(outside) - 0.5, color="#d62728", linewidth=1, linestyle="--")
    axis.set(xlabel="known side   ←   within so many latent cells of the border   →   filled side")
    axis.set_ylabel("error over the interior's")
    axis.legend()
    _from_zero([axis])
    return figure


def error_spectrum(named: Mapping[str, Differences]) -> Figure:
    """Mean power of the finished latents' error against frequency; a flat line is white noise."""
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axis = figure.subplots()
    for title, differences in named.items():
        frequencies, powers = differences.spectrum
        axis.semilogy(frequencies, powers, label=title)
    axis.axhline(1, color="#999999", linewidth=0.8)
    axis.set(xlabel="cycles per latent cell", ylabel="power of the error (1: mean)")
    axis.legend()
    return figure


def attribution_bars(full: Differences, attributions: Sequence[Attribution]) -> Figure:
    """Each cause alone, and the deployment without it, by the finished latents' error and the border's step."""
    figure = Figure(figsize=(9, 1.2 + 0.5 * (len(attributions) + 1)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    labels = ["all together", *(CAUSES[each.cause] for each in attributions)]
    alone = [_size(full), *(_size(each.alone) for each in attributions)]
    without = [math.nan, *(_size(each.without) if each.without else math.nan for each in attributions)]
    _pair(left, labels, [100 * v for v in alone], [100 * v for v in without], "error, %")
    steps = [_step(full), *(_step(each.alone) for each in attributions)]
    steps_without = [math.nan, *(_step(each.without) if each.without else math.nan for each in attributions)]
    _pair(right, labels, steps, steps_without, "error's step across the border")
    right.set_xscale("log")
    right.axvline(1, color="#999999", linewidth=0.8)
    left.legend(["alone", "all without it"], loc="lower right")
    return figure


def layer_errors(rows: Sequence[LayerRow]) -> Figure:
    """Output error of every layer in the model's order, beside what its format must cost and the LoRA's effect."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axis = figure.subplots()
    places = range(len(rows))
    axis.bar(places, [100 * row.output_error for row in rows], color="#1f77b4", label="deployed", width=0.8)
    expected = [100 * row.expected_output_error for row in rows]
    axis.plot(places, expected, "_", color="#222222", label="rounding to nearest")
    effects = [(i, 100 * row.lora_effect) for i, row in enumerate(rows) if row.lora_effect is not None]
    if effects:
        axis.plot(*zip(*effects, strict=True), "v", color="#ff7f0e", markersize=4, label="the LoRA's effect")
    axis.set(xlabel="layer, in the model's order", ylabel="% of the layer's output")
    axis.set_yscale("log")
    axis.legend()
    return figure


def picture_rows(reference: Outcome, others: Mapping[str, Outcome], probe: Probe, most: int = 4) -> Image.Image | None:
    """Return pictures side by side, a row a sample: the reference, then each of ``others`` with its error.

    Errors of a row share one scale; the border of the filled region is drawn over them. None without pictures.
    """
    count = min(most, len(reference.pictures), *(len(other.pictures) for other in others.values()))
    if not count:
        return None
    titles = ["reference", *(title for name in others for title in (name, "error"))]
    sheet = Image.new("RGB", (len(titles) * (_CELL + 6), _HEADER + count * (_CELL + 6)), "white")
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(titles):
        draw.text((column * (_CELL + 6) + 6, 6), title, fill="black", font=ImageFont.load_default(16))
    for number in range(count):
        ours = reference.pictures[number]
        errors = [(other.pictures[number] - ours).abs().mean(0) for other in others.values()]
        largest = max(float(errors[0].quantile(0.995)), 1e-6)
        cells = [_as_uint8(ours)]
        for other, error in zip(others.values(), errors, strict=True):
            heat = _with_border(_heat(error / largest), probe.mask(number))
            cells += [_as_uint8(other.pictures[number]), heat]
        for column, cell in enumerate(cells):
            image = Image.fromarray(cell.contiguous().numpy()).resize((_CELL, _CELL), Image.Resampling.NEAREST)
            sheet.paste(image, (column * (_CELL + 6) + 3, _HEADER + number * (_CELL + 6) + 3))
    return sheet


def as_data_uri(picture: Figure | Image.Image) -> str:
    """Return a PNG as a data URI, for a page without files beside it."""
    buffer = io.BytesIO()
    if isinstance(picture, Figure):
        picture.savefig(buffer, format="png", dpi=110)
    else:
        picture.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _pair(axis, labels, first, second, title) -> None:  # type: ignore[no-untyped-def]
    places = range(len(labels))
    axis.barh([p - 0.18 for p in places], first, height=0.34, color="#1f77b4")
    axis.barh([p + 0.18 for p in places], second, height=0.34, color="#bbbbbb")
    axis.set_yticks(list(places), labels)
    axis.set_xlabel(title)
    if not axis.yaxis_inverted():
        axis.invert_yaxis()


def _from_zero(axes) -> None:  # type: ignore[no-untyped-def]
    for axis in axes:
        axis.set_ylim(bottom=0)


def _size(differences: Differences) -> float:
    return differences.latents if math.isfinite(differences.latents) else differences.velocity


def _step(differences: Differences) -> float:
    seam = differences.picture_seam or differences.seam
    return seam["step"] if seam else math.nan


def _as_uint8(picture: Tensor) -> Tensor:
    """[3, H, W] in about [-1, 1] -> [H, W, 3] uint8."""
    return ((picture.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0)


def _heat(error: Tensor) -> Tensor:
    """[H, W] in 0..1 -> [H, W, 3] uint8, black over red and yellow to white."""
    e = error.clamp(0, 1)
    channels = torch.stack([(3 * e).clamp(0, 1), (3 * e - 1).clamp(0, 1), (3 * e - 2).clamp(0, 1)], dim=-1)
    return (255 * channels).round().to(torch.uint8)


def _with_border(heat: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return heat
    factor = heat.shape[0] // mask.shape[0]
    pixels = mask.repeat_interleave(factor, 0).repeat_interleave(factor, 1)
    drawn = heat.clone()
    drawn[(border_distance(pixels, 1) == 1) & pixels] = torch.tensor([0, 255, 255], dtype=torch.uint8)
    return drawn
