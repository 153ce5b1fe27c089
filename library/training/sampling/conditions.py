"""The images that sample prompts name: the image and mask of a fill model, the references of an edit model.

They are read, resized and encoded as those of the dataset are: a fill model's image covers the prompt's width and
height, and its region is blanked as the dataset's are; an edit model's references get the dataset's control resolution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from library.conditions import NO_CONDITIONS, Conditions
from library.config.model_types import Blank, ConditionKind
from library.data.buckets import ControlSizing, cover
from library.data.cache import TextJob
from library.data.dataset import TrainingData
from library.data.file_index import SourceFile, content_hash
from library.data.images import blanked, decode, fit_image, read_size, to_image, to_pixels
from library.data.mask_files import binary_mask, look_at_mask, read_mask
from library.data.samples import ControlImage, check_shape
from library.errors import UserError
from library.files import read_bytes
from library.models.family import Family
from library.models.vae import ImageEncoder
from library.randomness import generator
from library.training.sampling.prompts import SamplePrompt, check_steering, not_above, read_prompts, usual_prompt


@dataclass(frozen=True)
class PromptImageRules:
    """What a model does with the images of a prompt.

    Attributes:
        conditioning: what it is given.
        sizing: of references.
        pixel_multiple: their sides are multiples of it.
        blank: what the region to fill is blanked with.
    """

    conditioning: ConditionKind = "none"
    sizing: ControlSizing = field(default_factory=ControlSizing)
    pixel_multiple: int = 1
    blank: Blank = "grey"

    @classmethod
    def of(cls, data: TrainingData) -> PromptImageRules:
        """Return the rules of a training run; where subsets are blanked differently, the first one's."""
        blanks: tuple[Blank, ...] = (*data.config.inpaint_blanks, "grey")
        return cls(data.conditioning, data.control_sizing, data.pixel_multiple, blanks[0])


def check_prompt_images(
    prompts: Sequence[SamplePrompt], conditioning: ConditionKind, most_references: int | None = None
) -> list[str]:
    """Refuse prompts without the images that the model needs, or with such as it does not take; return remarks.

    Args:
        prompts: to be sampled.
        conditioning: what the model is given besides text.
        most_references: images that an edit model takes at most; None for any number.

    Raises:
        UserError: names the prompt; also where an image is missing, damaged, or a mask shows nothing to fill.
    """
    remarks = list[str]()
    for prompt in prompts:
        where, count = f"prompt {prompt.short()}", len(prompt.control_images)
        if conditioning == "none" and (count or prompt.mask_image):
            option = "--ci" if count else "--mi"
            raise UserError(f"{where}: {option} is not taken: this model generates from text alone; remove it")
        if conditioning == "references" and prompt.mask_image:
            raise UserError(f"{where}: --mi is not taken: this model edits whole images; remove it")
        if conditioning == "references" and not count:
            raise UserError(f"{where}: no image to edit; add --ci image.png")
        if conditioning == "fill" and (count != 1 or not prompt.mask_image):
            wrong = f"{count} images to fill" if count > 1 else "no image to fill" if not count else "no mask"
            raise UserError(f"{where}: {wrong}; write --ci image.png --mi mask.png, the mask white where to fill")
        if conditioning == "fill" and prompt.cfg != 1.0:
            raise UserError(f"{where}: --l is not taken: this model is guided by --g and has no negative prompt")
        if most_references is not None and count > most_references:
            raise UserError(f"{where}: {count} images; this model takes {most_references}, remove the others")
        for path in prompt.control_images:
            decode(read_bytes(path), path)
        if prompt.mask_image:
            check_shape(_source(prompt.mask_image), read_size(prompt.control_images[0]))
            source, remark, box = look_at_mask(prompt.mask_image, "inpaint_mask_directory")
            if not any(box):
                raise UserError(f"{prompt.mask_image}: nothing to fill; make what is to be filled white")
            if remark or source == "alpha":
                remarks.append(f"{prompt.mask_image}: {remark or 'its alpha is the mask: what is opaque is filled'}")
    return remarks


def read_run_prompts(
    source: str | Sequence[str] | None,
    seed: int,
    family: Family,
    pixel_multiple: int,
    largest: tuple[int, int],
    say: Callable[[str], None],
) -> list[SamplePrompt]:
    """Read a run's sample prompts and check that they suit the model; remarks go to ``say``.

    Where a prompt names no size, its sample has the family's, but no more pixels than ``largest``, the width and height
    of the largest images that are trained on.

    Raises:
        UserError: the file cannot be read, or a prompt asks for what the model does not take.
    """
    usual = not_above(usual_prompt(family), largest)
    prompts = read_prompts(source, seed, pixel_multiple, usual)
    remarks = check_steering(prompts, family.guidance_input, usual.guidance)
    for remark in [*remarks, *check_prompt_images(prompts, family.conditioning, family.most_references)]:
        say(f"note: {remark}")
    return prompts


def text_jobs(prompt: SamplePrompt, sees_references: bool, rules: PromptImageRules) -> dict[str, TextJob]:
    """Return what a prompt's embeddings are made from, by ``prompt.text_key`` of each of its texts.

    Raises:
        UserError: an image cannot be read.
    """
    images = _controls(prompt, rules) if sees_references else ()
    return {prompt.text_key(text): TextJob(text, images) for text in prompt.texts()}


def encode_prompt_images(prompt: SamplePrompt, encoder: ImageEncoder, rules: PromptImageRules) -> Conditions:
    """Return a prompt's conditions, with a batch axis of one, on the CPU.

    Raises:
        UserError: an image cannot be read.
    """
    if rules.conditioning == "fill":
        masked, mask = _masked_image(prompt, rules.blank)
        return Conditions(_encoded(masked, encoder), mask[None])
    if rules.conditioning == "references":
        loaded = (to_pixels(control.load()) for control in _controls(prompt, rules))
        return Conditions(references=tuple(_encoded(pixels, encoder) for pixels in loaded))
    return NO_CONDITIONS


def show_prompt_images(prompt: SamplePrompt, rules: PromptImageRules) -> Image.Image | None:
    """Return what a prompt starts from as one image: the image without its region, or the references in a row.

    Raises:
        UserError: an image cannot be read.
    """
    if rules.conditioning == "fill":
        return to_image(_masked_image(prompt, rules.blank)[0])
    if rules.conditioning == "references":
        return _in_a_row(control.load() for control in _controls(prompt, rules))
    return None


def _masked_image(prompt: SamplePrompt, blank: Blank) -> tuple[Tensor, Tensor]:
    """The prompt's image [3, H, W] with the region to fill blanked, and that region [1, H, W]."""
    (path,), mask_path = prompt.control_images, prompt.mask_image
    assert mask_path is not None, "check_prompt_images comes first"
    target = (prompt.width, prompt.height)
    image, _ = decode(read_bytes(path), path)
    mask, *_ = read_mask(read_bytes(mask_path), mask_path)
    fitted = fit_image(mask, cover(mask.size, target), "area")
    region = torch.from_numpy(binary_mask(fitted)).float()[None]
    pixels = to_pixels(fit_image(image, cover(image.size, target), None))
    return blanked(pixels, region, blank, generator("inpaint blank", prompt.seed)), region


def _controls(prompt: SamplePrompt, rules: PromptImageRules) -> tuple[ControlImage, ...]:
    trained, files = (prompt.width, prompt.height), map(_source, prompt.control_images)
    return tuple(ControlImage.of(file, rules.sizing, trained, rules.pixel_multiple) for file in files)


def _source(path: str) -> SourceFile:
    data, stat = read_bytes(path), Path(path).stat()
    return SourceFile(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, read_size(path), content_hash(data))


def _encoded(pixels: Tensor, encoder: ImageEncoder) -> Tensor:
    with torch.no_grad():
        return encoder.encode(pixels[None]).cpu()


def _in_a_row(images: Iterable[Image.Image]) -> Image.Image:
    loaded = list(images)
    height = loaded[0].height
    scaled = [image.resize((max(1, round(image.width * height / image.height)), height)) for image in loaded]
    return Image.fromarray(np.concatenate([np.asarray(image) for image in scaled], axis=1))
