"""What a server makes of a picture and its mask before the model sees them.

A fill model is given the latents of the picture with its region blanked, and the mask. Programs differ in both
(``docs/precision.md`` has a row for each): a mask is grown so that a brush's edge is covered, blurred so that it
blends, snapped to whole latent cells; the region is blanked with grey, as FLUX Fill was trained, with black or white.

An edit model (Kontext, Qwen-Image-Edit) has no mask: the region lies in the reference picture. It is the dataset's mask
where there is one, else what is black in the picture. What is changed is the picture.

The order is that of the flags: inverted, grown (by a square), snapped, blurred (a Gaussian). As ComfyUI's
``InpaintModelConditioning`` does, a fill model is given the soft mask, and what is blanked is where it is at least one
half; in a reference picture, which has nothing else, the blank itself is soft.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from library.config.family_defaults import family_defaults
from library.config.model_types import ConditionKind
from library.data.cache import Pixels
from library.data.images import blanked
from library.fidelity.calibration import Calibration
from library.fidelity.serving import LowDtype, Models, Variant
from library.precision.fp8_numbers import E4M3FN, round_to_nearest
from library.randomness import generator
from networks.files.layouts import PRECISIONS

_BLACK = 12 / 127.5 - 1  # every channel at most 12 of 255: JPEG's black
_SPECK = 9  # pixels a side: what is smaller is a shadow, not a region


@dataclass(frozen=True)
class Given:
    """What the model, and a sampler that pastes, are given of one picture.

    Attributes:
        image: the picture, [3, h, w].
        mask: as the server has it, [1, h, w] from 0 to 1; None without a region.
        shown: what the image encoder is shown, [3, h, w] each: the blanked picture of a fill model, or the references.
    """

    image: Tensor
    mask: Tensor | None
    shown: tuple[Tensor, ...]


def as_program_gives(models: Models, variant: Variant, calibration: Calibration) -> Variant:
    """Return ``variant`` with what its program gives a model by itself, where training had something else.

    What a flag says of a thing stands; where that is what training had, it is no change. ``models`` is told the
    conditions of training, for its words.
    """
    options, blanks = calibration.plan.options, calibration.data.config.inpaint_blanks
    trained, program, family = options.trained, models.server.gives, models.family
    if blanks and variant.blank is None:
        variant = replace(variant, blank=program.blank)
    if blanks == (variant.blank,) and variant.blank != "noise":  # another's noise is another
        variant = replace(variant, blank=None)
    if variant.guidance is None and family.guidance_input and options.guidance_scale == trained.guidance:
        usual = family_defaults(family.name)
        if trained.guidance not in (usual["guidance_scale"], usual["sample_guidance"]):
            variant = replace(variant, guidance=usual["sample_guidance"])
    if length := models.config.t5xxl_max_token_length:
        tokens = variant.t5_tokens or program.t5_tokens
        variant = replace(variant, t5_tokens=None if tokens == length else tokens)
    models.trained = {"blank": " and ".join(blanks), "guidance": f"{options.guidance_scale:g}"}
    models.trained |= {"t5_tokens": str(length)} if length else {}
    return variant


def give(pixels: Pixels, kind: ConditionKind, variant: Variant) -> Given:
    """Return what ``variant`` gives of ``pixels`` to a model that is conditioned by ``kind``.

    A reference variant gives what the dataset's cache was encoded from.
    """
    drawn = drawn_mask(pixels, kind)
    mask = None if drawn is None else change_mask(drawn, variant)
    if kind == "fill":
        assert mask is not None
        assert pixels.blank is not None
        hard, colour = (mask >= 0.5).float(), _colour(pixels.image, variant, pixels.blank)
        shown: tuple[Tensor, ...] = (pixels.image * (1 - hard) + colour * hard,)
    else:
        region = drawn if pixels.mask is not None else None
        shown = tuple(_reference(each, region, variant) for each in pixels.references)
    return Given(pixels.image, mask, shown)


def drawn_mask(pixels: Pixels, kind: ConditionKind) -> Tensor | None:
    """Return the region that the user drew, [1, H, W] of the picture's size: the mask, else what a reference shows."""
    if pixels.mask is not None or kind != "references":
        return pixels.mask
    found = (black_region(reference) for reference in pixels.references)
    region = next((each for each in found if each is not None), None)
    return None if region is None else _resized(region, pixels.image)


def black_region(picture: Tensor) -> Tensor | None:
    """Return where ``picture`` [3, H, W] is black, or as good as, [1, H, W]; None where that is nowhere, or everywhere.

    Specks and lines of less than 9 pixels are left out.
    """
    black = (picture.amax(0, keepdim=True) <= _BLACK).float()
    opened = grow(grow(black, -(_SPECK // 2)), _SPECK // 2) * black
    return opened if 0 < float(opened.mean()) < 1 else None


def change_mask(mask: Tensor, variant: Variant) -> Tensor:
    """Return ``mask`` [1, H, W] as ``variant`` has it."""
    mask = 1 - mask if variant.mask_invert else mask
    mask = snap(grow(mask, variant.mask_grow), variant.mask_snap)
    return blur(mask, variant.mask_blur)


def grow(mask: Tensor, pixels: int) -> Tensor:
    """Return ``mask`` [1, H, W] grown by ``pixels`` in all directions (a square), or shrunk; edges of it stay."""
    if not pixels:
        return mask
    size, reach = 2 * abs(pixels) + 1, abs(pixels)
    if pixels > 0:
        return F.max_pool2d(mask[None], size, 1, reach)[0]
    return -F.max_pool2d(-mask[None], size, 1, reach)[0]


def snap(mask: Tensor, cell: int) -> Tensor:
    """Return ``mask`` [1, H, W] grown to whole cells of ``cell`` pixels a side; 0 leaves it."""
    if not cell:
        return mask
    cells = F.max_pool2d(mask[None], cell, cell, ceil_mode=True)[0]
    return cells.repeat_interleave(cell, -2).repeat_interleave(cell, -1)[:, : mask.shape[-2], : mask.shape[-1]]


def blur(mask: Tensor, deviation: float) -> Tensor:
    """Return ``mask`` [1, H, W] blurred by a Gaussian of that standard deviation in pixels, cut off at three."""
    if not deviation:
        return mask
    reach = max(1, round(3 * deviation))
    kernel = torch.exp(-(torch.arange(-reach, reach + 1).double() / deviation).square() / 2).float()
    kernel = kernel / kernel.sum()
    for shape in ((1, 1, -1, 1), (1, 1, 1, -1)):
        sides = (0, 0, reach, reach) if shape[2] == -1 else (reach, reach, 0, 0)
        mask = F.conv2d(F.pad(mask[None], sides, mode="replicate"), kernel.view(shape))[0]
    return mask.clamp(0, 1)


def round_latents(latents: Tensor, dtype: LowDtype | None) -> Tensor:
    """Return ``latents`` as they are after a cast to ``dtype``, in their own."""
    if dtype == "fp8":
        return round_to_nearest(latents, E4M3FN).to(latents.dtype)
    return latents.to(PRECISIONS.get(dtype or "", latents.dtype)).to(latents.dtype)


def _reference(picture: Tensor, drawn: Tensor | None, variant: Variant) -> Tensor:
    """Return a reference picture [3, H, W] with its region as ``variant`` has it; as it is where it has none.

    What the region was drawn over is gone: where the mask is smaller than that, the picture keeps its blank.
    """
    region = black_region(picture) if drawn is None else _resized(drawn, picture)
    if region is None:
        return picture
    inside, soft = region >= 0.5, change_mask(region, variant)
    unchanged = picture[:, inside[0]].median(dim=1).values[:, None, None].expand_as(picture)
    colour = _colour(picture, variant, unchanged)
    if variant.blank is not None:
        picture = torch.where(inside, colour, picture)
    if not (variant.mask_invert or variant.mask_grow or variant.mask_snap or variant.mask_blur):
        return picture
    return torch.where(inside & (soft >= 0.5), picture, picture * (1 - soft) + colour * soft)


def _colour(picture: Tensor, variant: Variant, unchanged: Tensor) -> Tensor:
    if variant.blank is None:
        return unchanged
    if isinstance(variant.blank, float):
        return torch.full_like(picture, variant.blank)
    return blanked(picture, torch.ones(()), variant.blank, generator("served blank", *picture.shape))


def _resized(mask: Tensor, picture: Tensor) -> Tensor:
    size = picture.shape[-2:]
    return mask if mask.shape[-2:] == size else F.interpolate(mask[None], size, mode="nearest")[0]
