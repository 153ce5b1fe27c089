"""Which keys of the dataset TOML describe a model's conditions, and which model takes them.

A fill model is given the region to fill: by mask files, by the pictures' own transparency, or by generated masks. An
edit model is given reference pictures. A key that the model at hand could only ignore is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from library.conditions import ConditionKind
from library.data.inpaint_masks import MASK_KINDS, MaskKind
from library.errors import UserError

DEFAULT_VARIANTS = 4  # generated masks of a picture: each costs as much cache and encoding as the picture itself
FILL_KEYS = ("inpaint_mask_directory", "inpaint_alpha_mask", "inpaint_masks", "inpaint_mask_variants")
REFERENCE_KEYS = ("control_directory", "control_resolution", "no_resize_control")

# musubi-tuner's names of single models
OTHER_CONTROL_NAMES = {
    "qwen_image_edit_control_resolution": "control_resolution",
    "qwen_image_edit_no_resize_control": "no_resize_control",
    "flux_kontext_no_resize_control": "no_resize_control",
}

_TAKES: dict[ConditionKind, str] = {
    "none": "this model paints from text alone",
    "fill": "this model fills a region of a picture",
    "references": "this model edits reference pictures",
}
_INSTEAD: dict[ConditionKind, str] = {
    "none": "remove it, or choose {wanted} model",
    "fill": "use inpaint_mask_directory, inpaint_alpha_mask or inpaint_masks",
    "references": "use control_directory",
}


def refused_condition_keys(conditioning: ConditionKind) -> dict[str, str]:
    """Return key -> why not and what instead, for the keys that a model of this kind does not take."""
    refused: dict[str, str] = {}
    for kind, keys, wanted in (("fill", FILL_KEYS, "a fill"), ("references", REFERENCE_KEYS, "an edit")):
        if conditioning != kind:
            reason = f"{_TAKES[conditioning]}; {_INSTEAD[conditioning].format(wanted=wanted)}"
            refused |= dict.fromkeys(keys, reason)
    return refused


def refused_control_path(conditioning: ConditionKind) -> str | None:
    """Return why ``control_path`` of a metadata file is not taken; None where it is."""
    return refused_condition_keys(conditioning).get("control_directory")


@dataclass(frozen=True)
class FillMasks:
    """Where the masks of a subset's pictures come from, for a fill model."""

    source: Literal["files", "alpha", "generated"]
    kinds: tuple[MaskKind, ...] = ()  # of generated masks
    variants: int = 1  # masks of a picture; each is cached
    by_default: bool = False

    def describe(self) -> str:
        """Return what the summary says of them."""
        if self.source != "generated":
            return {"files": "fill masks", "alpha": "fill masks from alpha"}[self.source]
        default = " by default" if self.by_default else ""
        return f"generated masks{default} ({', '.join(self.kinds)}; {self.variants} an image)"


def fill_masks(
    where: str, directory: str | None, alpha: bool, kinds: tuple[MaskKind, ...] | None, variants: int | None
) -> FillMasks:
    """Return the one source of masks that a subset's keys name; without one, masks of all kinds are generated.

    Raises:
        UserError: two sources, an empty list of kinds, or variants of masks that have none.
    """
    if kinds == ():
        known = ", ".join(MASK_KINDS)
        raise UserError(f"{where}: inpaint_masks = []: names no kind; name some of {known}, or remove it")
    asked = {"inpaint_mask_directory": directory is not None, "inpaint_alpha_mask": alpha, "inpaint_masks": bool(kinds)}
    named = [key for key, value in asked.items() if value]
    if len(named) > 1:
        raise UserError(f"{where}: {' and '.join(named)} each say which region to fill; keep one of them")
    if variants is not None and (directory is not None or alpha):
        raise UserError(f"{where}: inpaint_mask_variants has no effect with {named[0]}; remove it")
    if directory is not None:
        return FillMasks("files")
    if alpha:
        return FillMasks("alpha")
    return FillMasks("generated", kinds or MASK_KINDS, variants or DEFAULT_VARIANTS, by_default=not kinds)
