"""The report's figures: images beside each other with their differences.

A figure is made of what was measured, or not at all. All maps of differences share one scale, which never ends below
``LEAST_RANGE`` 8-bit steps, so that what nobody can see does not look like a fire.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from library.fidelity.border import RING, STEP_8BIT
from library.fidelity.server_image import ServerResult
from library.precision.parity.seam import border_distance

LEAST_RANGE = 16  # 8-bit steps of the whole scale of differences
ZOOM = 64  # pixels of the picture in a view of the border
_IMAGES_SHOWN = 4


def server_pictures(server: ServerResult) -> Figure | None:
    """Return what a server painted beside the reference, and beside the description that comes nearest."""
    others = {"the server": server.painted, f"nearest: {server.nearest.words}": server.nearest.images}
    return picture_rows(server.reference.images, others)


def picture_rows(
    reference: Sequence[Tensor],
    others: Mapping[str, Sequence[Tensor]],
    mask_of: Callable[[int], Tensor | None] = lambda number: None,
) -> Figure | None:
    """Return images side by side: the reference, then each of ``others`` with its difference; None without images.

    A sample is a row, and where it has a mask (``mask_of`` its number, [H, W] bool) a second: the ``ZOOM`` pixels along
    the border with the largest difference of the first of ``others``. All differences share one scale; the border is
    the line in them.
    """
    count = min(_IMAGES_SHOWN, len(reference), *map(len, others.values()))
    if not count:
        return None
    served = next(iter(others.values()))
    masks = [mask_of(number) for number in range(count)]
    largest = difference_range(reference, served)
    rows: list[tuple[str, int, tuple[slice, slice]]] = []
    for number in range(count):
        rows.append((f"image {number + 1}", number, (slice(None), slice(None))))
        if (mask := masks[number]) is not None:
            steps = _steps(reference[number], served[number])
            rows.append(("its border", number, _border_view(steps, mask)))
    ratios = [height / width for height, width in (reference[n][0][view].shape for _, n, view in rows)]
    titles = ["reference", *(title for name in others for title in (name, "difference"))]
    figure = Figure(figsize=(2.2 * len(titles), 1.1 + 2.2 * sum(ratios)), layout="compressed")
    axes = figure.subplots(len(rows), len(titles), squeeze=False, height_ratios=ratios)
    for line, (label, number, view) in zip(axes, rows, strict=True):
        ours, mask = reference[number], masks[number]
        line[0].set_ylabel(label)
        line[0].imshow(_pixels(ours)[view])
        for image, other, beside in zip(line[1::2], others.values(), line[2::2], strict=True):
            image.imshow(_pixels(other[number])[view])
            drawn = beside.imshow(_steps(ours, other[number])[view], cmap="magma", vmin=0, vmax=largest)
            if mask is not None:
                beside.contour(mask[view].float(), levels=[0.5], colors="#00d5ff", linewidths=0.7, linestyles="dotted")
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, loc="left", fontsize=10)
    label = "difference, mean over red, green and blue, in 8-bit steps (255: black for white)"
    figure.colorbar(drawn, ax=axes[0], location="top", aspect=60, extend="max", label=label)
    return figure


def image_rows(images: Mapping[str, Sequence[Tensor]]) -> Figure:
    """Return pictures side by side, a column a title, a row a sample."""
    count = min(_IMAGES_SHOWN, *map(len, images.values()))
    ratios = [next(iter(images.values()))[n].shape[1] / next(iter(images.values()))[n].shape[2] for n in range(count)]
    figure = Figure(figsize=(2.2 * len(images), 0.4 + 2.2 * sum(ratios)), layout="compressed")
    axes = figure.subplots(count, len(images), squeeze=False, height_ratios=ratios)
    for column, (title, pictures) in zip(axes.T, images.items(), strict=True):
        column[0].set_title(title, loc="left", fontsize=10)
        for axis, picture in zip(column, pictures, strict=False):
            axis.imshow(_pixels(picture))
            axis.set(xticks=[], yticks=[])
    return figure


def difference_range(reference: Sequence[Tensor], served: Sequence[Tensor]) -> float:
    """Return where the one scale of all differences ends, in 8-bit steps: at ``LEAST_RANGE``, or at 99.5 % of them."""
    pairs = zip(reference[:_IMAGES_SHOWN], served, strict=False)
    steps = torch.cat([_steps(ours, theirs).flatten() for ours, theirs in pairs]).sort().values
    return max(LEAST_RANGE, float(steps[round(0.995 * (len(steps) - 1))]))


def _pixels(image: Tensor) -> Tensor:
    """Return ``image`` [3, H, W] in about [-1, 1] as [H, W, 3] in [0, 1]."""
    return ((image.clamp(-1, 1) + 1) / 2).permute(1, 2, 0)


def _steps(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the difference [H, W] of two images [3, H, W] in about [-1, 1], in 8-bit steps."""
    return (theirs - ours).abs().mean(0) / STEP_8BIT


def _border_view(steps: Tensor, filled: Tensor) -> tuple[slice, slice]:
    """Return the square of at most ``ZOOM`` pixels around the border pixel about which ``steps`` [H, W] are largest."""
    near = border_distance(filled, 1) <= 1
    around = F.avg_pool2d(steps[None, None], RING + 1, stride=1, padding=RING // 2)[0, 0]
    middle = int(torch.where(near, around, -1.0).argmax())
    size = min(ZOOM, *(side // 2 for side in steps.shape))
    places = (middle // steps.shape[1], middle % steps.shape[1])
    starts = [min(max(place - size // 2, 0), side - size) for place, side in zip(places, steps.shape, strict=True)]
    return slice(starts[0], starts[0] + size), slice(starts[1], starts[1] + size)


def as_data_uri(figure: Figure) -> str:
    """Return a PNG as a data URI, for a page without files beside it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
