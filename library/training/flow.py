"""Rectified flow: which noise level a sample is seen at, how the loss is weighted there, and the loss itself.

Training looks at ``x = (1 - sigma) * latents + sigma * noise`` and learns the velocity ``noise - latents``. Both
noise and sigma are functions of (seed, step, sample): see ``library.randomness``. Sigmas stay fp32 all the way
into the model; in bf16 neighbouring timesteps would fall together (8 bits: steps of 4 in a thousand).

Densities and weights: Esser et al. 2024, "Scaling Rectified Flow Transformers" (arXiv 2403.03206), sections 3.1
and 5.3.2; the resolution-dependent shift as in the models' own samplers (FLUX: mu 0.5 at 256 tokens, 1.15 at 4096;
Qwen-Image: 0.5 at 256, 0.9 at 8192; Krea 2: 0.5 at 256, 1.15 at 6400; FLUX.2 is trained with FLUX.1's line, as in
musubi-tuner, though its sampler shifts further).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from library.config.schema import FlowConfig
from library.randomness import generator

if TYPE_CHECKING:
    from library.models.family import Family  # imports diffusers, which language models do without

_MOST_DRAWS = 1000  # of preserve_distribution_shape, as in musubi-tuner; what is outside then goes to the nearer end
NOISE_LEVELS = 5  # of equal width, by which losses are told apart
STEP_PARTS = 4  # small steps of a base for each step of its distilled model: 16 for 4
_SMALLEST_SIGMA = 1e-4  # keeps 1/sigma^2 weights finite; a tenth of the finest step of the 1000-step schedule


def resolve_sampling(flow: FlowConfig, family: Family) -> FlowConfig:
    """Return ``flow`` with what the model's own scheduler says: how sigmas are drawn if "auto", an unset static shift.

    A scheduler whose shift follows the size has no static one: there it is the family's.
    """
    if flow.timestep_sampling == "auto":
        return flow.model_copy(update=family.own_sampling())
    if flow.timestep_sampling not in ("shift", "sigma") or "discrete_flow_shift" in flow.model_fields_set:
        return flow
    own = family.own_sampling()
    return flow.model_copy(update={k: own[k] for k in ("discrete_flow_shift",) if k in own})


def step_levels(flow: FlowConfig, family: Family, tokens: int) -> Sequence[float]:
    """Return the noise levels of the distilled model's steps with ``timestep_sampling = "steps"``, else nothing."""
    return family.sampling_sigmas(family.distilled_steps, tokens)[:-1] if flow.timestep_sampling == "steps" else ()


def noise_for(latents: Tensor, sample_ids: Sequence[int], *key: int | str) -> Tensor:
    """Return standard normal noise, fp32 on the latents' device, one draw a sample from its own generator.

    Args:
        latents: [B, C, h, w]; only shape and device are used.
        sample_ids: what identifies each of the B samples.
        key: what else the noise is a function of, (seed, step) in training.
    """
    draws = [torch.randn(latents.shape[1:], generator=generator("noise", *key, i)) for i in sample_ids]
    return torch.stack(draws).to(latents.device, non_blocking=True)


def sample_sigmas(
    flow: FlowConfig, sample_ids: Sequence[int], tokens: int, *key: int | str, levels: Sequence[float] = ()
) -> Tensor:
    """Draw a sigma for each sample.

    Args:
        flow: distribution and its parameters; ``auto`` is resolved before (:func:`resolve_sampling`).
        sample_ids: of the B samples.
        tokens: image tokens of the batch, which the shifts named after models depend on.
        key: (seed, step).
        levels: the only ones to draw (:func:`step_levels`), if any.

    Returns:
        [B] fp32 on the CPU, in (0, 1].
    """
    generators = [generator("sigma", *key, i) for i in sample_ids]

    if levels:
        uniform = torch.stack([torch.rand((), generator=g) for g in generators])
        return torch.tensor(levels)[(uniform * len(levels)).long()]

    def draw() -> Tensor:
        normal = torch.stack([torch.randn((), generator=g) for g in generators])
        uniform = torch.stack([torch.rand((), generator=g) for g in generators])
        return SAMPLERS[flow.timestep_sampling](flow, normal, uniform, tokens)

    sigmas = draw()
    low, high = flow.min_timestep / 1000, flow.max_timestep / 1000
    if not flow.preserve_distribution_shape:
        return (low + (high - low) * sigmas).clamp(_SMALLEST_SIGMA, 1.0)
    for _ in range(_MOST_DRAWS):
        outside = (sigmas < low) | (sigmas > high)
        if not outside.any():
            break
        sigmas = torch.where(outside, draw(), sigmas)
    return sigmas.clamp(max(low, _SMALLEST_SIGMA), high)


def _density(flow: FlowConfig, normal: Tensor, uniform: Tensor) -> Tensor:
    """Return [B] positions on the schedule, 0 at full noise (Esser 2024, section 3.1: logit-normal, mode)."""
    if flow.weighting_scheme == "logit_normal":
        return torch.sigmoid(flow.logit_mean + flow.logit_std * normal)
    if flow.weighting_scheme == "mode":
        return 1 - uniform - flow.mode_scale * (torch.cos(math.pi * uniform / 2) ** 2 - 1 + uniform)
    return uniform


def shift_sigmas(sigmas: Tensor, shift: float) -> Tensor:
    """Move sigmas towards noise: s*sigma / (1 + (s-1)*sigma) (Esser 2024, equation 23)."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def _line(most_tokens: int, most: float) -> Callable[[int], float]:
    """Return the log shift of a number of image tokens: a line through (256, 0.5) and ``most`` at ``most_tokens``."""
    return lambda tokens: 0.5 + (most - 0.5) * (tokens - 256) / (most_tokens - 256)


flux_mu, qwen_mu, krea2_mu = _line(4096, 1.15), _line(8192, 0.9), _line(6400, 1.15)


def _by_size(mu: Callable[[int], float]) -> Callable[[FlowConfig, Tensor, Tensor, int], Tensor]:
    return lambda flow, normal, uniform, tokens: shift_sigmas(_sigmoid(flow, normal), math.exp(mu(tokens)))


def _sigmoid(flow: FlowConfig, normal: Tensor) -> Tensor:
    return torch.sigmoid(flow.sigmoid_scale * normal)


def _from_log_snr(mean: float, spread: float, normal: Tensor) -> Tensor:
    """Return sigmas whose log SNR, 2 log((1 - sigma) / sigma), is normal (arXiv 2411.14793)."""
    return torch.sigmoid(-(mean + spread * normal) / 2)


def _qinglong(flow: FlowConfig, normal: Tensor, uniform: Tensor, mu: float, shifted: float, clean: float) -> Tensor:
    """Return musubi-tuner's mixture: of all draws a share ``shifted`` by the size, ``clean`` at little noise.

    The latter have a log SNR of 5.36 +- 1, those between the one of logit_mean and logit_std (``timesteps.py`` there).
    """
    between = _from_log_snr(flow.logit_mean, flow.logit_std, normal)
    by_size = shift_sigmas(_sigmoid(flow, normal), math.exp(mu))
    little = _from_log_snr(5.36, 1.0, normal)
    return torch.where(uniform < shifted, by_size, torch.where(uniform < 1 - clean, between, little))


# timestep_sampling -> sigmas [B] fp32 over the whole range 0..1, from standard normal and uniform draws [B] and the
# number of image tokens
SAMPLERS: dict[str, Callable[[FlowConfig, Tensor, Tensor, int], Tensor]] = {
    "uniform": lambda flow, normal, uniform, tokens: uniform,
    "sigmoid": lambda flow, normal, uniform, tokens: _sigmoid(flow, normal),
    "shift": lambda flow, normal, uniform, tokens: shift_sigmas(_sigmoid(flow, normal), flow.discrete_flow_shift),
    "flux_shift": _by_size(flux_mu),
    "flux2_shift": _by_size(flux_mu),
    "qwen_shift": _by_size(qwen_mu),
    "krea2_shift": _by_size(krea2_mu),
    "sigma": lambda flow, normal, uniform, tokens: shift_sigmas(
        1 - _density(flow, normal, uniform), flow.discrete_flow_shift
    ),
    "logsnr": lambda flow, normal, uniform, tokens: _from_log_snr(flow.logit_mean, flow.logit_std, normal),
    "qinglong_flux": lambda flow, normal, uniform, tokens: _qinglong(flow, normal, uniform, flux_mu(tokens), 0.79, 0.1),
    "qinglong_qwen": lambda flow, normal, uniform, tokens: _qinglong(
        flow, normal, uniform, qwen_mu(tokens), 0.95, 0.05
    ),
}


def perturbation_for(flow: FlowConfig, latents: Tensor, sample_ids: Sequence[int], *key: int | str) -> Tensor | None:
    """Return the noise that the input alone gets, like :func:`noise_for`; None without ``ip_noise_gamma``.

    Input perturbation (Ning et al. 2023, arXiv 2301.11706), as sd-scripts' ``flux_train_utils.py`` has it: the input is
    ``(1 - sigma) x + sigma (noise + gamma xi)``, what is to be predicted stays ``noise - x``. There a random strength
    is one of the whole batch; here each sample has its own.
    """
    if not flow.ip_noise_gamma:
        return None
    strength = torch.full((len(sample_ids),), flow.ip_noise_gamma)
    if flow.ip_noise_gamma_random_strength:
        draws = [torch.rand((), generator=generator("perturbation strength", *key, i)) for i in sample_ids]
        strength *= torch.stack(draws)
    strength = strength.view(-1, 1, 1, 1).to(latents.device, non_blocking=True)
    return noise_for(latents, sample_ids, "perturbation", *key) * strength


def add_noise(
    latents: Tensor, noise: Tensor, sigmas: Tensor, perturbation: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the noisy latents and the velocity to predict, both [B, C, h, w] fp32.

    Args:
        latents, noise: [B, C, h, w].
        sigmas: [B].
        perturbation: further noise in the input alone (:func:`perturbation_for`).
    """
    latents = latents.float()
    s = sigmas.to(latents.device, torch.float32).view(-1, 1, 1, 1)
    given = noise if perturbation is None else noise + perturbation
    return (1 - s) * latents + s * given, noise - latents


def noisy_latents(
    flow: FlowConfig, family: Family, latents: Tensor, sample_ids: Sequence[int], *key: int | str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a training step sees of ``latents``: :func:`add_noise` at drawn noise and sigmas, and these.

    Args:
        family: of the model in training, by whose patches and schedule sigmas are drawn.
        flow, sample_ids, key: of :func:`sample_sigmas`; all that is drawn follows from them.
        latents: [B, C, h, w].
    """
    tokens = latents.shape[-2] * latents.shape[-1] // family.patch_size**2
    sigmas = sample_sigmas(flow, sample_ids, tokens, *key, levels=step_levels(flow, family, tokens))
    noise = noise_for(latents, sample_ids, *key)
    noisy, velocity = add_noise(latents, noise, sigmas, perturbation_for(flow, latents, sample_ids, *key))
    return noisy, velocity, sigmas


def step_velocity(
    velocity: Callable[[Tensor, Tensor], Tensor], noisy: Tensor, sigmas: Tensor, following: Tensor, parts: int
) -> Tensor:
    """Return the velocity of one large step that leads where ``parts`` small ones lead, like ``noisy``.

    That is what a distilled model predicts (progressive distillation, arXiv 2202.00512, section 3).

    Args:
        velocity: of latents [B, C, h, w] at noise levels [B].
        noisy: where the step begins.
        sigmas, following: [B], where it begins and ends.
    """
    latents, part = noisy, (following - sigmas) / parts  # [B]
    for number in range(parts):
        latents = latents + part.to(noisy).view(-1, 1, 1, 1) * velocity(latents, sigmas + number * part)
    return (latents - noisy) / (following - sigmas).to(noisy).view(-1, 1, 1, 1)


def loss_weights(flow: FlowConfig, sigmas: Tensor) -> Tensor:
    """Return [B] fp32 weights of the loss at each sigma (sigma_sqrt, cosmap: Esser 2024, section 3.1)."""
    if flow.weighting_scheme == "sigma_sqrt":
        return sigmas**-2
    if flow.weighting_scheme == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))
    return torch.ones_like(sigmas)


def by_noise_level(losses: Tensor, sigmas: Tensor) -> Tensor:
    """Return each sample's loss in the column of its noise level, NaN in the others: [B, NOISE_LEVELS] fp32."""
    level = (sigmas * NOISE_LEVELS).long().clamp(max=NOISE_LEVELS - 1)  # [B]; level i begins at i / NOISE_LEVELS
    table = torch.full((len(losses), NOISE_LEVELS), torch.nan, device=losses.device)
    return table.scatter(1, level[:, None], losses.float()[:, None])


def sample_losses(flow: FlowConfig, prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the loss of each sample, [B] fp32: the mean over channels and positions.

    huber is the pseudo-Huber loss 2c(sqrt(d² + c²) - c), smooth_l1 is 2(sqrt(d² + c²) - c), as sd-scripts has
    them: the first is d² for small errors, the second |2d| for large ones. A mask multiplies the pointwise loss;
    the mean still runs over all positions, so a small mask gives a small loss.

    Args:
        prediction, target: [B, C, h, w].
        mask: weights [B, 1, h, w] (``library.training.tasks.image_step``), or None.
    """
    difference = prediction.float() - target.float()
    if flow.loss_type == "l2":
        pointwise = difference.square()
    elif flow.loss_type == "l1":
        pointwise = difference.abs()
    else:
        c = flow.huber_c
        pointwise = 2 * (torch.sqrt(difference.square() + c * c) - c)
        if flow.loss_type == "huber":
            pointwise = pointwise * c
    if mask is not None:
        pointwise = pointwise * mask
    return pointwise.flatten(1).mean(1)
