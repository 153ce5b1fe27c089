"""Train the tiny FLUX: rectified flow with its text encoders first, then guidance distillation as for
FLUX.1-dev.

Phase "dit". For latents x and noise e, at sigma s (logit-normal, shifted like FLUX's own schedule) the
transformer sees (1 - s) x + s e and learns the velocity e - x. One caption in ten is empty, so the model
also knows the unconditional velocity. The guidance input is random and says nothing yet.

Phase "distill". A frozen copy of the averaged weights is the teacher: target = u + g (c - u) from its
conditional and unconditional velocities, and the student is told g through FLUX's guidance embedder. One
pass then does what two did.

Optimizers: Muon for the blocks' matrices, AdamW for everything else. Every random choice is a function of
(seed, step), so a resumed run goes on as if it had never stopped.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxTransformer2DModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CLIPTextModel, T5EncoderModel

from dev.tiny_models.latent_pool import SIZES, Captions, Pool, tokenize
from dev.tiny_models.run_state import AveragedWeights, Progress, cosine_rate, load_state, save_state
from dev.tiny_models.transformer import TIME_SHIFT, TextToImage, TinySizes, build_text_to_image

TEXT_LENGTHS, LENGTH_SHARES = (
    (32, 48, 80, 128),
    (0.84, 0.08, 0.05, 0.03),
)  # so that any max_sequence_length works
LONGEST_TEXT, LONGEST_SHARE = (
    512,
    0.02,
)  # FluxPipeline's default; only while distilling, on a quarter of the batch
GUIDANCE_RANGE = (1.0, 5.0)


@dataclass(frozen=True)
class DitTraining:
    steps: int = 7000
    batch: int = 36  # a size that no other dimension has, or torch.compile takes the two for one
    muon_rate: float = 3e-3
    adam_rate: float = 1e-3
    empty_share: float = 0.1
    average_decay: float = 0.999
    sheet_every: int = 1000
    compile: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    latents: torch.Tensor  # [B, 16, h, w]
    noise: torch.Tensor  # the same
    sigmas: torch.Tensor  # [B]
    guidance: torch.Tensor  # [B]
    captions: Captions

    @property
    def noised(self) -> torch.Tensor:
        share = self.sigmas[:, None, None, None]
        return (1 - share) * self.latents + share * self.noise


Target = Callable[[Batch], torch.Tensor]
Snapshot = Callable[[TextToImage, int], None]  # called with the averaged model every `sheet_every` steps


def flow_target(batch: Batch) -> torch.Tensor:
    return batch.noise - batch.latents


def guided_target(teacher: TextToImage, empty: Captions) -> Target:
    """The teacher's velocity under classifier-free guidance, at each row's own guidance."""

    @torch.no_grad()
    def target(batch: Batch) -> torch.Tensor:
        rows, length = batch.captions.t5.shape
        nothing = empty.padded(length)
        both = Captions(
            torch.cat([batch.captions.t5, nothing.t5.expand(rows, -1)]),
            torch.cat([batch.captions.clip, nothing.clip.expand(rows, -1)]),
        )
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            velocity = teacher(batch.noised.repeat(2, 1, 1, 1), batch.sigmas.repeat(2), both, batch.guidance.repeat(2))
        conditional, unconditional = velocity.float().chunk(2)
        return unconditional + batch.guidance[:, None, None, None] * (conditional - unconditional)

    return target


def train_transformer(
    phase: str,
    model: TextToImage,
    target: Target,
    pool: Pool,
    training: DitTraining,
    state_path: Path,
    resume: bool,
    snapshot: Snapshot,
) -> None:
    """Train `model` in place towards `target`, saving all that a resumed run needs as it goes."""
    average = AveragedWeights(model, training.average_decay)
    optimizers = build_optimizers(model, training.muon_rate, training.adam_rate)
    first_step = 0
    if resume:
        first_step = _restore(load_state(state_path), model, average, optimizers)
    if training.compile:
        model.transformer.compile_repeated_blocks(dynamic=True)
    empty = tokenize([""])
    progress = Progress(phase, first_step, training.steps, every=50)
    for step in range(first_step, training.steps):
        batch = draw_batch(pool, empty, training, step, longest=phase == "distill")
        loss = _train_step(model, optimizers, batch, target(batch), training, step)
        average.update(model)
        progress.report(step, {"loss": loss})
        if (step + 1) % training.sheet_every == 0 or step + 1 == training.steps:
            state = {"model": model.state_dict(), "average": average.state_dict(), "step": step + 1}
            save_state(state_path, state | {"optimizers": [optimizer.state_dict() for optimizer in optimizers]})
            snapshot(_with_weights(model, average.shadow), step + 1)


def trained_model(sizes: TinySizes, vocabularies: tuple[int, int], state_path: Path) -> TextToImage:
    """The averaged model of a saved state, without gradients."""
    model = build_text_to_image(sizes, *vocabularies)
    model.load_state_dict(load_state(state_path)["average"]["shadow"])
    return model.eval().requires_grad_(False)


def build_optimizers(model: torch.nn.Module, muon_rate: float, adam_rate: float) -> list[torch.optim.Optimizer]:
    """[Muon on the transformer blocks' matrices, AdamW on the rest], of what needs a gradient."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        in_block = "transformer_blocks" in name  # matches the single blocks' names, too
        (matrices if in_block and parameter.ndim == 2 else others).append(parameter)
    muon = torch.optim.Muon(matrices, lr=muon_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.99), weight_decay=0.0)
    return [muon, adam]


def draw_batch(pool: Pool, empty: Captions, training: DitTraining, step: int, longest: bool) -> Batch:
    rng = np.random.default_rng([training.seed, step])
    size = list(pool)[int(rng.choice(len(pool), p=[SIZES[size] for size in pool]))]
    length = int(rng.choice(TEXT_LENGTHS, p=LENGTH_SHARES))
    rows_wanted = training.batch
    if longest and rng.random() < LONGEST_SHARE:
        length, rows_wanted = LONGEST_TEXT, max(2, training.batch // 4)
    latents, captions = pool[size]
    rows = torch.from_numpy(rng.integers(0, len(latents), rows_wanted))
    chosen = latents[rows].float()
    generator = torch.Generator().manual_seed(training.seed * 1_000_003 + step)
    odds = TIME_SHIFT * torch.exp(torch.randn(rows_wanted, generator=generator))
    dropped = torch.rand(rows_wanted, generator=generator) < training.empty_share
    return Batch(
        latents=chosen,
        noise=torch.randn(chosen.shape, generator=generator),
        sigmas=odds / (1 + odds),
        guidance=torch.empty(rows_wanted).uniform_(*GUIDANCE_RANGE, generator=generator),
        captions=captions[rows].emptied(empty, dropped).padded(length),
    )


def _train_step(
    model: TextToImage,
    optimizers: list[torch.optim.Optimizer],
    batch: Batch,
    target: torch.Tensor,
    training: DitTraining,
    step: int,
) -> float:
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):  # flash is slower at 100 tokens
        velocity = model(batch.noised, batch.sigmas, batch.captions, batch.guidance)
    loss = (velocity.float() - target).pow(2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, peak in zip(optimizers, (training.muon_rate, training.adam_rate), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = cosine_rate(step, training.steps, peak, warmup=min(200, training.steps // 10))
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def _restore(state: dict, model: TextToImage, average: AveragedWeights, optimizers: list[torch.optim.Optimizer]) -> int:
    model.load_state_dict(state["model"])
    average.load_state_dict(state["average"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"]


def _with_weights(model: TextToImage, weights: dict[str, torch.Tensor]) -> TextToImage:
    """A second, uncompiled model of the same configuration with `weights`."""
    transformer = FluxTransformer2DModel.from_config(model.transformer.config)
    copy = TextToImage(transformer, T5EncoderModel(model.t5.config), CLIPTextModel(model.clip.config))
    copy.load_state_dict(weights)
    return copy.eval().requires_grad_(False)
