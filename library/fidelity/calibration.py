"""Running a model on a few of the user's own images, to see what its layers are given.

Images, captions, latents and conditions come through the code and the caches of training, noise and noise levels are
functions of (seed, image), and the forward pass is the family's: what is collected is what training and sampling see.
Each image is one batch at each noise level. The last quarter of the images is held out: fits are made on the others,
and judged on these.

A LoRA's images are alike, and what is fitted to them alone serves them better than any other picture. Each image that
a fit is made on has a *texture* beside it (:func:`texture`), with its mask and its noise levels, and a caption about
something else (the image's own where the text encoder sees references). Nothing is judged on textures.

The conditions are those of training: what regions are blanked with, guidance, T5's tokens. They stand in the LoRA's
file, the blank in the dataset too. Where the two contradict each other the LoRA's file counts: the dataset may be
another one. A guidance-distilled model is trained at one guidance and sampled at another (FLUX.1: 1 and 3.5), so a
recorded guidance is a condition only where somebody chose one that is not the family's. A sampler's shift does not
follow from that of training's noise levels: it is the one of the model's scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from library.config.family_defaults import family_defaults
from library.config.schema import DatasetArguments, ModelConfig
from library.console import Console
from library.data.batches import Batch, ItemSource, collate
from library.data.cache import Pixels
from library.data.config import DatasetConfig, load_dataset_config
from library.data.dataset import TrainingData, build_dataset, check_masks
from library.errors import UserError, counted
from library.files import read_toml
from library.models.family import Family
from library.models.family_by_name import model_family
from library.models.vae import ImageEncoder
from library.precision.parity.activations import Forward, LayerInputs, collect_inputs
from library.randomness import generator
from library.training.flow import add_noise, noise_for
from library.training.report.progress import counting
from library.training.sampling.painting import GENERAL
from networks.files.metadata import TrainedOn

SIGMAS = (0.95, 0.75, 0.5, 0.25)  # from the sketch to the details; the tokens of one image differ more than these
IMAGES = 8


@dataclass(frozen=True)
class CalibrationOptions:
    """What to calibrate on.

    Attributes:
        dataset_config: dataset TOML, as in training.
        images: how many different images; the last quarter of them is held out.
        sigmas: noise levels, each in (0, 1].
        seed: chooses images and noise.
        guidance_scale: given to models with a guidance input.
        masked_loss: the dataset has loss masks; as in training it must be said.
        cache_directory: of latents and text; None for the place beside the images.
        statistics_gb: memory for the layers' statistics; with less the model runs more often.
        trained: what the LoRAs say of their training.
    """

    dataset_config: str
    images: int = IMAGES
    sigmas: Sequence[float] = SIGMAS
    seed: int = 0
    guidance_scale: float = 3.5
    masked_loss: bool = False
    cache_directory: str | None = None
    statistics_gb: float = 4.0
    trained: TrainedOn = field(default_factory=TrainedOn)


@dataclass(frozen=True)
class CalibrationPlan:
    """Which model to run, on what, and how it computes."""

    config: ModelConfig
    options: CalibrationOptions
    dtype: torch.dtype
    device: torch.device

    def prepare(self, console: Console, *, textures: bool = False) -> Calibration:
        """Cache what is not cached yet, with the family's encoders, each freed in turn, and choose the images.

        ``textures``: something is fitted, so each image to fit to has one beside it.

        Raises:
            UserError: anything wrong with the dataset; a sigma outside of (0, 1]; too few images.
        """
        options, family = self.options, model_family(self.config)
        if options.images < 1:
            raise UserError(f"calibration_images: {options.images} is too few; give 1 or more, 8 are usual")
        for sigma in options.sigmas:
            if not 0 < sigma <= 1:
                raise UserError(f"calibration_sigmas: {sigma:g} is no noise level; give numbers above 0 and up to 1")
        image_encoder = family.load_image_encoder(self.dtype, self.device)
        text_encoder = family.load_text_encoder(self.dtype, self.device)
        arguments = DatasetArguments(dataset_config=options.dataset_config, cache_directory=options.cache_directory)
        dataset = load_dataset_config(options.dataset_config, arguments, family.conditioning)
        dataset, remark = _blanked(dataset, options.trained)
        for each in filter(None, (*options.trained.remarks, remark)):
            console.print(f"note: {each}")
        told, usual = options.trained.guidance, family_defaults(family.name).get("guidance_scale")
        if family.guidance_input and told not in (None, usual, options.guidance_scale):
            names = ", ".join(options.trained.names)
            taken = f"run at guidance {options.guidance_scale:g} (--guidance_scale)"
            console.print(f"note: {taken}; {names}: trained at {told:g}")
        data = build_dataset(dataset, options.seed, image_encoder.pixel_multiple, image_encoder.latent_factor)
        check_masks(data, options.masked_loss)
        with counting(console) as progress:
            data.cache_latents(image_encoder, arguments.vae_batch_size, progress)
            captions = _general_captions(options.images) if textures and not text_encoder.sees_references else []
            data.cache_text(text_encoder, captions, arguments.text_encoder_batch_size, progress)
        batches, sources = _chosen(data, options)
        held_out = len(batches) // 4
        kept = len(batches) - held_out
        fit = f"{kept} to fit to, {held_out} to judge by" if held_out else f"{kept}, judged by themselves"
        beside: list[Batch] = []
        if textures:
            pairs = zip(batches[:kept], sources[:kept], strict=True)
            beside = [_textured(batch, source.pixels(), image_encoder, options.seed) for batch, source in pairs]
            image_encoder.release()
            for number, caption in enumerate(captions[:kept]):
                text = data.text_embeddings(caption)
                text = {name: each[None] for name, each in text.items() if each.dtype != torch.bool or not each.all()}
                beside[number] = replace(beside[number], text=text)
            fit += f", and {counted(kept, 'texture')}"
        console.print(
            f"calibration: {counted(len(batches), 'image')} ({fit}) at {counted(len(options.sigmas), 'noise level')}"
        )
        return Calibration(self, family, batches[:kept], batches[kept:], sources, data, beside)


@dataclass(frozen=True)
class Calibration:
    """Inputs of the model, ready to be run: ``fit`` to fit to and ``check`` to judge by; ``sources`` of all in turn.

    ``data`` is the dataset that they are of, ``textures`` are fitted to as well.
    """

    plan: CalibrationPlan
    family: Family
    fit: Sequence[Batch]
    check: Sequence[Batch]
    sources: Sequence[ItemSource]
    data: TrainingData
    textures: Sequence[Batch] = ()

    def forwards(self, transformer: nn.Module, batches: Sequence[Batch]) -> list[Forward]:
        """Return calls that run ``transformer`` on each of ``batches`` at each noise level."""
        return [
            partial(self._velocity, transformer, batch, sigma)
            for batch in batches
            for sigma in self.plan.options.sigmas
        ]

    def layer_inputs(
        self, transformer: nn.Module, names: Sequence[str], held_out: bool = False
    ) -> Iterator[dict[str, LayerInputs]]:
        """Yield what the layers ``names`` are given, as many of them at a time as their statistics fit into memory.

        ``held_out``: the images to judge by are kept apart; otherwise all images count alike.
        """
        batches = [*self.fit, *self.textures, *(() if held_out else self.check)]
        fit = self.forwards(transformer, batches)
        check = self.forwards(transformer, self.check) if held_out else []
        options = self.plan.options
        memory = int(options.statistics_gb * 2**30)
        yield from collect_inputs(transformer, names, fit, check, memory_bytes=memory, seed=options.seed)

    def velocities(self, transformer: nn.Module, batches: Sequence[Batch]) -> Tensor:
        """Return all predicted velocities on ``batches``, flat, fp32 on the CPU."""
        with torch.no_grad():
            return torch.cat([forward().flatten().cpu() for forward in self.forwards(transformer, batches)])

    def _velocity(self, transformer: nn.Module, batch: Batch, sigma: float) -> Tensor:
        options, batch = self.plan.options, batch.to(self.plan.device)
        noise = noise_for(batch.latents, batch.sample_ids, options.seed, "calibration", round(sigma * 1e6))
        sigmas = torch.full((len(batch.sample_ids),), sigma)
        noisy, _ = add_noise(batch.latents, noise, sigmas)
        return predict(self.family, transformer, batch, options.guidance_scale, self.plan.dtype, noisy, sigmas)


def predict(
    family: Family,
    transformer: nn.Module,
    batch: Batch,
    guidance: float,
    dtype: torch.dtype,
    noisy: Tensor,
    sigmas: Tensor,
) -> Tensor:
    """Return the velocity at ``noisy``, fp32; products in 16 bits are made under autocast, as in training.

    Args:
        family, transformer: that predict it.
        batch: its text and conditions.
        guidance: for models with a guidance input.
        dtype: of the products.
        noisy: latents. sigmas: their noise levels, [batch].
    """
    device = batch.latents.device
    sigmas = sigmas.to(device)
    with torch.autocast(device.type, dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
        return family.predict_velocity(transformer, noisy, sigmas, batch.text, guidance, batch.conditions).float()


def _chosen(data: TrainingData, options: CalibrationOptions) -> tuple[list[Batch], list[ItemSource]]:
    """Return different images of the training set, in an order that follows from the seed, one a batch."""
    samples = data.train.samples
    first = [0, *accumulate(sample.repeats for sample in samples)]
    order = torch.randperm(len(samples), generator=generator("calibration", options.seed)).tolist()
    positions = [(0, first[i]) for i in order[: options.images]]
    return [collate([data.train[position]]) for position in positions], [data.train.source(each) for each in positions]


def texture(height: int, width: int, rng: torch.Generator) -> Tensor:
    """Return an image of coloured noise over a gradient, [3, H, W] fp32 in [-1, 1], that no data is needed for.

    The amplitude of noise falls with the frequency f as 1/f^a, a from 0.5 to 2; that of photographs with a near 1
    (Field 1987, https://doi.org/10.1364/JOSAA.4.002379). Contrast, hue and brightness are drawn anew for each.
    """
    drawn, about = torch.rand(2, generator=rng), torch.rand(3, 1, 1, generator=rng)
    mixed, slope = torch.randn(3, 4, generator=rng), torch.randn(3, 2, 1, 1, generator=rng)
    rows, columns = torch.fft.fftfreq(height)[:, None], torch.fft.fftfreq(width)
    frequency = torch.hypot(rows, columns).clamp_min(1 / max(height, width))
    noise = torch.fft.fft2(torch.randn(3, height, width, generator=rng)) / frequency ** (0.5 + 1.5 * drawn[0])
    channels = torch.fft.ifft2(noise).real
    channels = channels / channels.std(dim=(1, 2), keepdim=True)
    channels = torch.einsum("ij,jhw->ihw", mixed[:, :3] / 2 + mixed[0, 3], channels)
    ramps = torch.linspace(-1, 1, height)[:, None] * slope[:, 0] + torch.linspace(-1, 1, width) * slope[:, 1]
    contrast = 0.1 + 0.5 * drawn[1]
    return (channels / channels.std() * contrast + 1.4 * about - 0.7 + 0.3 * ramps).clamp(-1, 1)


def _blanked(dataset: DatasetConfig, trained: TrainedOn) -> tuple[DatasetConfig, str]:
    """Return ``dataset`` blanked as in training, and a line where that is in doubt."""
    blanks, known = dataset.inpaint_blanks, trained.blanks
    if not trained.names or not blanks or {*blanks} <= {*known}:
        return dataset, ""
    own, names, file = " and ".join(blanks), ", ".join(trained.names), dataset.path.name
    subsets = (subset for each in dataset.datasets for subset in each.subsets)
    said = any("inpaint_blank" in subset.settings.model_fields_set for subset in subsets)
    if not known and not said:
        return dataset, f"neither {names} nor {file} says what regions were blanked with in training; {own} is assumed"
    if not known:
        return (
            dataset,
            f"{names} does not say what regions were blanked with in training; {own} is taken ({file})",
        )
    other = f"{file} says {own}" if said else f"{file} does not say what regions are blanked with"
    text = f"{other}, the LoRA was trained on {' and '.join(known)} ({names})"
    return dataset.blanked_with(known[0]), f"{text}; {known[0]} is taken: the LoRA's own record counts"


def _general_captions(count: int) -> list[str]:
    """Return ``count`` captions of all kinds, the same again where there are no more."""
    captions = read_toml(GENERAL)[0]["preserve_prompts"]
    return [captions[7 * number % len(captions)] for number in range(count)]


def _textured(batch: Batch, pixels: Pixels, encoder: ImageEncoder, seed: int) -> Batch:
    """Return ``batch``, one sample, with textures in the place of its image and references ``pixels``."""

    def drawn(like: Tensor, *key: int | str) -> Tensor:
        height, width = like.shape[-2:]
        return texture(height, width, generator("texture", seed, batch.sample_ids[0], *key))

    image, conditions = drawn(pixels.image), batch.conditions
    masked, references = conditions.masked_latents, enumerate(pixels.references)
    if pixels.mask is not None and pixels.blank is not None:
        masked = encoder.encode(torch.where(pixels.mask > 0, pixels.blank, image)[None])
    shown = tuple(encoder.encode(drawn(each, number)[None]) for number, each in references)
    latents = encoder.encode(image[None])
    return replace(batch, latents=latents, conditions=replace(conditions, masked_latents=masked, references=shown))
