"""What a server really painted, beside the reference, and which description of a server comes nearest to it.

A picture that a server painted is all that is needed: the reference is run with its seed, number of steps, size and
mask, then with one description at a time of what a server may do otherwise, and the one whose picture is nearest is
combined once with each of the others. Distances are rms over all pixels, in 8-bit steps.

The noise is what ComfyUI (``comfy/sample.py``, ``prepare_noise``) and diffusers (``randn_tensor``) draw for a seed: on
the CPU, fp32, [1, C, h, w] before it is packed; a pipeline in bf16 draws it in bf16, which is another noise, and one of
the descriptions. What no description explains is *unexplained*: another sampler, prompt, picture or seed are among what
is not looked for.

A picture saved in 8 bits differs by 1/sqrt(12) of a step from the one that was painted, a JPEG by more: by what the
reference's own picture loses with the same quantisation tables. Nothing below that *floor* can be told apart.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from library.config.model_types import BLANKS
from library.console import Console
from library.data.batches import Batch, ItemSource
from library.data.buckets import cover
from library.data.cache import load_pixels
from library.data.images import decode, to_image, to_pixels
from library.errors import UserError, counted, did_you_mean
from library.fidelity.calibration import Calibration
from library.fidelity.conditioning import give
from library.fidelity.intervals import interval
from library.fidelity.runs import EvalSet, Outcome, batched, conditions_of, run_variant
from library.fidelity.serving import REFERENCE, Models, Served, Variant
from library.files import read_bytes

_STEPS = 127.5  # 8-bit steps in 1 of [-1, 1]
_ROUNDING = 1 / math.sqrt(12)
_NEAR = 1.5  # times the floor: as near as can be told
_MOST = 0.5  # of the difference: a description that explains less explains nothing
_GUIDANCES, _SHIFTS = (1.0, 2.5, 3.5, 30.0), (1.0, 1.15, 3.0)


@dataclass(frozen=True)
class ServerPicture:
    """A picture that a server painted.

    Attributes:
        path: of the file. seed: of its noise. name: of the dataset's image that it belongs to; empty: found out.
    """

    path: Path
    seed: int
    name: str = ""


@dataclass(frozen=True)
class Description:
    """What a server may do, and how near its picture comes.

    Attributes:
        words: for people. variant: what is run. noise: dtype that it is drawn in.
        distances: of each picture, rms in 8-bit steps. explained: share of the squared difference between server and
            reference that is gone with it, beyond the floor; low, high: its 95 % interval over pictures, NaN of one.
        images: that were painted, [3, H, W] each.
    """

    words: str
    variant: Variant
    noise: torch.dtype = torch.float32
    distances: tuple[float, ...] = ()
    explained: float = 0.0
    low: float = math.nan
    high: float = math.nan
    images: tuple[Tensor, ...] = ()

    @property
    def distance(self) -> float:
        """Rms over all pictures, in 8-bit steps."""
        return _rms(self.distances)


@dataclass(frozen=True)
class ServerResult:
    """What is known of a server by its pictures.

    Attributes:
        names: of the files. steps: of the sampling runs.
        painted: the server's pictures, [3, H, W] each in [-1, 1]. reference: the description that changes nothing.
        descriptions: the others, the nearest first. floor: what saving the picture makes, rms in 8-bit steps.
    """

    names: tuple[str, ...]
    steps: int
    painted: tuple[Tensor, ...]
    reference: Description
    descriptions: tuple[Description, ...]
    floor: float

    @property
    def nearest(self) -> Description:
        """The description that comes nearest."""
        return self.descriptions[0]

    @property
    def unexplained(self) -> float:
        """Share of the squared difference that the nearest leaves."""
        return max(0.0, 1 - self.nearest.explained)

    def sentence(self) -> str:
        """Return what was found, in words."""
        shown = counted(len(self.names), "server picture")
        what = f"{shown}: {self.reference.distance:.1f} of 255 steps from the reference"
        if self.reference.distance <= _NEAR * self.floor:
            return (
                f"{what}, no more than saving it makes ({self.floor:.1f}): the server paints what the reference paints."
            )
        best, tried = self.nearest, counted(len(self.descriptions), "description")
        if best.explained < _MOST:
            return (
                f"{what}, unexplained: of {tried} the nearest ({best.words}) explains {max(0.0, best.explained):.0%}. "
                "Check seed, steps, sampler, prompt and mask first: with another one of them nothing comes near."
            )
        doubt = "" if math.isnan(best.low) else f" [{best.low:.0%} to {best.high:.0%}]"
        rest = "nothing that could be told apart" if best.distance <= _NEAR * self.floor else f"{self.unexplained:.0%}"
        found = f"Of {tried} the nearest is: {best.words}. It explains {best.explained:.0%}{doubt}"
        return f"{what}. {found}; unexplained: {rest}."

    def lines(self, most: int = 10) -> list[str]:
        """Return the nearest descriptions, one a line."""
        rows = [(each.distance, each.explained, each.words) for each in (*self.descriptions[:most], self.reference)]
        return [f"  {distance:7.2f}  {share:6.1%}  {words}" for distance, share, words in rows]

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        rows = [
            {"words": each.words, "distance": each.distance, "explained": each.explained, "by_picture": each.distances}
            for each in (self.reference, *self.descriptions)
        ]
        found = {"sentence": self.sentence(), "pictures": self.names, "steps": self.steps, "floor": self.floor}
        return found | {"unexplained": self.unexplained, "descriptions": rows}


def explain_server(
    models: Models,
    declared: Variant,
    calibration: Calibration,
    pictures: Sequence[ServerPicture],
    steps: int,
    console: Console,
) -> ServerResult:
    """Return which description of a server comes nearest to what it painted.

    Args:
        models, declared: the deployment as it was declared, one of the descriptions.
        calibration: has the dataset.
        pictures: that the server painted.
        steps: of its sampler.
        console: for progress.

    Raises:
        UserError: a picture cannot be read, belongs to no image, or has a size that the model cannot paint.
    """
    painted = [to_pixels(decode(read_bytes(str(each.path)), str(each.path))[0]) for each in pictures]
    eval_set = _eval_set(models, calibration, pictures, painted, steps)
    seeds = [each.seed for each in pictures]

    def paint(descriptions: Sequence[Description]) -> Iterator[Description]:
        by_network: dict[Any, list[Description]] = {}
        for each in descriptions:
            by_network.setdefault(models.runs_as(each.variant), []).append(each)
        for group in by_network.values():
            with models.transformer(group[0].variant) as network:
                for each in group:
                    noise = [
                        _noise(batch.latents, seed, each.noise)
                        for batch, seed in zip(eval_set.batches, seeds, strict=True)
                    ]
                    given = replace(eval_set, noise=noise)
                    outcome = run_variant(models, each.variant, given, console, each.words, network)
                    yield replace(each, images=tuple(outcome.images), distances=_distances(outcome, painted))

    (reference,) = paint([Description("the reference", REFERENCE)])
    floors = [_floor(each.path, image) for each, image in zip(pictures, reference.images, strict=True)]
    tried = [_judged(each, reference, floors) for each in paint(catalogue(models, declared, eval_set))]
    best = min(tried, key=lambda each: each.distance)
    if best.distance > _NEAR * _rms(floors):
        pairs = (_together(best, each) for each in tried)
        tried += [_judged(each, reference, floors) for each in paint([pair for pair in pairs if pair is not None])]
    tried.sort(key=lambda each: each.distance)
    kept = [each if place == 0 else replace(each, images=()) for place, each in enumerate(tried)]
    names = tuple(each.path.name for each in pictures)
    return ServerResult(names, steps, tuple(painted), reference, tuple(kept), _rms(floors))


def catalogue(models: Models, declared: Variant, eval_set: EvalSet) -> list[Description]:
    """Return what servers are known to do, one thing at a time, and the deployment as it was declared."""
    found: list[tuple[str, dict[str, Any]]] = []
    if any(eval_set.drawn(number) is not None for number in range(len(eval_set.batches))):
        found += [(f"mask grown by {pixels} px", {"mask_grow": pixels}) for pixels in (2, 4, 8, 16)]
        found += [(f"mask blurred by {pixels} px", {"mask_blur": float(pixels)}) for pixels in (2, 4, 8)]
        found += [("mask snapped to latent cells", {"mask_snap": 8}), ("mask snapped to tokens", {"mask_snap": 16})]
        found += [("mask inverted", {"mask_invert": True})]
        found += [(f"region blanked with {colour}", {"blank": colour}) for colour in BLANKS]
        found += [("pixels pasted into the finished picture", {"paste": "pixels"})]
        found += [("known latents pasted at every step", {"paste": "latents"})]
    if models.family.conditioning != "none":
        found += [(f"given latents in {dtype}", {"latents_dtype": dtype}) for dtype in ("bf16", "fp16", "fp8")]
    if models.family.guidance_input:
        found += [("guidance ignored", {"guidance": "ignored"})]
        found += [(f"guidance {each:g}", {"guidance": each}) for each in _GUIDANCES if each != eval_set.guidance]
    if models.loras:
        found += [("no LoRA", {"strength": 0.0}), ("LoRA at half its strength", {"strength": 0.5})]
        found += [("LoRA twice", {"strength": 2.0})]
    if len(models.loras) > 1:
        found += [("LoRA not in the text encoders", {"lora_without": ("^text_encoder",)})]
    found += [(f"static shift {shift:g}", {"shift": shift}) for shift in _SHIFTS]
    found += [("timesteps in bf16", {"timestep": torch.bfloat16})]
    found += [(f"VAE in {dtype}", {"vae": Served(dtype=dtype)}) for dtype in ("fp8", "bf16")]
    found += [("text encoder in fp8", {"text": Served(dtype="fp8")})]
    found += [
        (f"declared: {models.words(name, value)}", {name: value})
        for name, value in declared.changes().items()
        if name not in ("merge", "activations")
    ]
    every = [Description(words, replace(REFERENCE, **change)) for words, change in found]
    if len(declared.changes()) > 1:
        every.append(Description("the whole declared deployment", declared))
    every.append(Description("noise drawn in bf16", REFERENCE, torch.bfloat16))
    seen: dict[Any, Description] = {}
    for each in every:
        seen.setdefault((each.variant, each.noise), each)
    return list(seen.values())


def _together(one: Description, other: Description) -> Description | None:
    """Return both at once; None where both are about the same, or one of them is no change."""
    changes, more = one.variant.changes(), other.variant.changes()
    noise = torch.bfloat16 if torch.bfloat16 in (one.noise, other.noise) else torch.float32
    if one is other or changes.keys() & more.keys() or one.noise == other.noise != torch.float32:
        return None
    return Description(f"{one.words} and {other.words}", replace(one.variant, **more), noise)


def _judged(found: Description, reference: Description, floors: Sequence[float]) -> Description:
    """Return ``found`` with the share that it explains."""

    def beyond(description: Description) -> list[float]:
        pairs = zip(description.distances, floors, strict=True)
        return [max(0.0, distance**2 - floor**2) for distance, floor in pairs]

    left, whole = beyond(found), beyond(reference)
    shares = torch.tensor([1 - a / b if b else 0.0 for a, b in zip(left, whole, strict=True)])
    low, high = interval(shares)
    return replace(found, explained=1 - sum(left) / sum(whole) if sum(whole) else 0.0, low=low, high=high)


def _eval_set(
    models: Models,
    calibration: Calibration,
    pictures: Sequence[ServerPicture],
    painted: Sequence[Tensor],
    steps: int,
) -> EvalSet:
    """Return the dataset's images that ``pictures`` belong to, at the pictures' sizes."""
    encoder, kind = models.image_encoder(REFERENCE), models.family.conditioning
    batches, pixels, jobs = [], [], []
    for picture, image in zip(pictures, painted, strict=True):
        size, multiple = (image.shape[-1], image.shape[-2]), encoder.pixel_multiple
        if size[0] % multiple or size[1] % multiple:
            raise UserError(
                f"--server_image {picture.path}: {size[0]} x {size[1]} pixels, and the model paints multiples of "
                f"{multiple}; give the picture as it was painted, not resized or cropped"
            )
        source = _source(calibration, picture)
        of_file = source.sample.image.size
        assert of_file is not None, "sizes are read when a dataset is scanned"
        sample = replace(source.sample, fit=cover(of_file, size))
        fitted = load_pixels(sample, False, 0, source.sample_id, source.seed)
        text = batched(calibration.data.text_embeddings(source.text), models)
        conditions = conditions_of(give(fitted, kind, REFERENCE), kind, REFERENCE, encoder, models)
        latents, ids = encoder.encode(fitted.image[None]), [source.sample_id]
        batch = Batch(latents, text, torch.ones(1), None, ids, [source.text.caption], conditions)
        batches.append(batch.to(models.device))
        pixels.append(fitted)
        jobs.append(source.text)
    options = calibration.plan.options
    return EvalSet(batches, pixels, jobs, kind, (), steps, options.guidance_scale, options.seed)


def _source(calibration: Calibration, picture: ServerPicture) -> ItemSource:
    """Return the dataset's image that ``picture`` belongs to: the one named, that of its name, the only one."""
    dataset = calibration.data.train
    by_name = {Path(sample.image.path).stem: number for number, sample in enumerate(dataset.samples)}
    wanted = Path(picture.name or picture.path).stem
    number = by_name.get(wanted, 0 if len(by_name) == 1 and not picture.name else None)
    if number is None:
        raise UserError(
            f"--server_image {picture.path}: the dataset has no image {wanted!r}{did_you_mean(wanted, by_name)}; write "
            "FILE=NAME with the name of the image that it was painted from"
        )
    return dataset.source((0, sum(sample.repeats for sample in dataset.samples[:number])))


def _noise(latents: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return noise.to(latents)


def _distances(outcome: Outcome, painted: Sequence[Tensor]) -> tuple[float, ...]:
    """Return each picture's rms distance in 8-bit steps."""
    pairs = zip(outcome.images, painted, strict=True)
    return tuple(
        _STEPS * float((image.clamp(-1, 1) - wanted).double().square().mean().sqrt()) for image, wanted in pairs
    )


def _floor(path: Path, image: Tensor) -> float:
    """Return what saving ``image`` [3, H, W] as the file ``path`` is saved changes, rms in 8-bit steps."""
    with Image.open(path) as opened:
        tables = getattr(opened, "quantization", None) if opened.format == "JPEG" else None
        if opened.format in ("PNG", "BMP", "TIFF") or not (tables or opened.format in ("JPEG", "WEBP")):
            return _ROUNDING
    saved = io.BytesIO()
    to_image(image).save(saved, "JPEG", **({"qtables": tables} if tables else {"quality": 90}))
    lossy = to_pixels(Image.open(saved))
    return max(_ROUNDING, _STEPS * float((lossy - image.clamp(-1, 1)).double().square().mean().sqrt()))


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values)) if values else 0.0
