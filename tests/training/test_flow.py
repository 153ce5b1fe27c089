"""Timesteps, weights and losses against the published formulas and diffusers' own functions."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

from library.config.model_types import MODEL_TYPES
from library.config.schema import FlowConfig
from library.training.flow import (
    add_noise,
    flux_mu,
    loss_weights,
    noise_for,
    perturbation_for,
    qwen_mu,
    resolve_sampling,
    sample_losses,
    sample_sigmas,
    shift_sigmas,
    step_velocity,
)
from tests.tiny_qwen import tiny_qwen_scheduler

IDS = torch.arange(20000)


def family_class(model_type: str) -> Any:
    module, name = MODEL_TYPES[model_type].family.split(":")
    return getattr(import_module(module), name)


def _sigmas(**settings: object) -> torch.Tensor:
    return sample_sigmas(FlowConfig(**settings), IDS, 256, 0, 0)


def _same_distribution(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Kolmogorov-Smirnov on two samples of 20000: distance 0.0195 is passed once in a thousand by equal ones."""
    points = torch.linspace(0, 1, 501)
    distance = (torch.searchsorted(ours.sort()[0], points) - torch.searchsorted(theirs.sort()[0], points)).abs().max()
    return distance.item() / len(ours) < 0.0195


def test_noise_and_sigmas_are_functions_of_seed_step_and_sample_alone() -> None:
    latents = torch.zeros(3, 16, 4, 4)
    ids = torch.tensor([11, 22, 33])
    together = noise_for(latents, ids, 7, 5)
    alone = torch.cat([noise_for(latents[:1], ids[i : i + 1], 7, 5) for i in (2, 0, 1)])
    assert torch.equal(together, alone[[1, 2, 0]])
    assert not torch.equal(together, noise_for(latents, ids, 7, 6))
    assert not torch.equal(together, noise_for(latents, ids, 8, 5))
    flow = FlowConfig(timestep_sampling="flux_shift")
    assert torch.equal(sample_sigmas(flow, ids, 256, 7, 5)[1:], sample_sigmas(flow, ids[1:], 256, 7, 5))


@pytest.mark.parametrize("scale", [0.5, 1.0, 1.8])
def test_sigmoid_sigmas_are_logit_normal(scale: float) -> None:
    reference = torch.sigmoid(scale * torch.randn(20000, generator=torch.Generator().manual_seed(1)))
    assert _same_distribution(_sigmas(timestep_sampling="sigmoid", sigmoid_scale=scale), reference)


def test_flux_shift_uses_the_pipelines_own_mu() -> None:
    assert flux_mu(1024) == pytest.approx(calculate_shift(1024, 256, 4096, 0.5, 1.15))
    plain = torch.sigmoid(torch.randn(20000, generator=torch.Generator().manual_seed(2)))
    mu = calculate_shift(4096, 256, 4096, 0.5, 1.15)
    reference = math.exp(mu) / (math.exp(mu) + (1 / plain - 1))  # FlowMatchEulerDiscreteScheduler.time_shift
    assert _same_distribution(sample_sigmas(FlowConfig(timestep_sampling="flux_shift"), IDS, 4096, 0, 0), reference)


def family_with(scheduler: FlowMatchEulerDiscreteScheduler | None, folder: Path, model_type: str) -> Any:
    """Return a family with the scheduler of a folder, or of single files, which have none."""
    family = object.__new__(family_class(model_type))
    if scheduler is not None:
        scheduler.save_pretrained(folder)
    family.files = SimpleNamespace(scheduler=None if scheduler is None else folder)
    return family


@pytest.mark.parametrize(
    ("model_type", "sampling", "shift"),
    [
        ("flux_fill", "flux_shift", None),
        ("flux", "flux_shift", None),
        ("qwen_image_edit", "qwen_shift", None),
        ("krea2", "krea2_shift", None),
        ("qwen_image_21", "qwen_shift", None),
        ("ernie_image", "shift", 4.0),  # baidu/ERNIE-Image's, and its Turbo's
        ("z_image", "shift", 6.0),  # Tongyi-MAI/Z-Image's scheduler_config.json
    ],
)
def test_auto_is_the_published_scheduler_of_single_files(
    tmp_path: Path, model_type: str, sampling: str, shift: float | None
) -> None:
    family = family_with(None, tmp_path, model_type)
    own = resolve_sampling(FlowConfig(sigmoid_scale=0.7), family)
    assert (own.timestep_sampling, own.sigmoid_scale) == (sampling, 0.7)
    assert shift in (None, own.discrete_flow_shift)
    asked = FlowConfig(timestep_sampling="sigmoid")
    assert resolve_sampling(asked, family) is asked


@pytest.mark.parametrize(("model_type", "shift"), [("z_image", 6.0), ("z_image", 1.0), ("flux", 3.0)])
def test_auto_is_the_static_shift_of_the_folders_scheduler_at_every_size(
    tmp_path: Path, model_type: str, shift: float
) -> None:
    """The noise levels of training are those that sampling goes through, moved by diffusers' own scheduler."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    flow = resolve_sampling(FlowConfig(), family_with(scheduler, tmp_path, model_type))
    plain = torch.sigmoid(torch.randn(2000, generator=torch.Generator().manual_seed(3)))
    scheduler.set_timesteps(sigmas=plain.sort(descending=True)[0].tolist())
    through = scheduler.sigmas[:-1].repeat(10)
    for tokens in (256, 4096):
        drawn = sample_sigmas(flow, IDS, tokens, 0, 0)
        points = torch.linspace(0, 1, 201)
        difference = torch.searchsorted(drawn.sort()[0], points) - torch.searchsorted(through.sort()[0], points)
        assert difference.abs().max() / 20000 < 0.04  # 2000 draws: one in a thousand equal ones exceeds 0.0436


def test_auto_follows_the_size_where_the_folders_scheduler_does(tmp_path: Path) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    flow = resolve_sampling(FlowConfig(), family_with(scheduler, tmp_path, "z_image"))
    assert flow.timestep_sampling == "flux_shift"


@pytest.mark.parametrize("tokens", [256, 1024, 4096, 6889])
def test_qwen_shift_is_the_shift_of_qwen_images_pipeline_and_scheduler(tokens: int) -> None:
    scheduler = tiny_qwen_scheduler()
    config = scheduler.config
    mu = calculate_shift(
        tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    assert qwen_mu(tokens) == pytest.approx(mu)
    plain = torch.rand(100, generator=torch.Generator().manual_seed(1)) * 0.98 + 0.01
    shifted = shift_sigmas(plain, math.exp(qwen_mu(tokens)))
    torch.testing.assert_close(shifted, scheduler.time_shift(mu, 1.0, plain), rtol=1e-5, atol=1e-6)
    draws = {
        kind: sample_sigmas(FlowConfig(timestep_sampling=kind), IDS[:500], tokens, 0, 0)
        for kind in ("qwen_shift", "sigmoid")
    }
    torch.testing.assert_close(
        draws["qwen_shift"], scheduler.time_shift(mu, 1.0, draws["sigmoid"]), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("scheme", ["none", "logit_normal", "mode"])
def test_sigma_sampling_follows_diffusers_density(scheme: str) -> None:
    torch.manual_seed(3)
    u = compute_density_for_timestep_sampling(scheme, 20000, logit_mean=0.0, logit_std=1.0, mode_scale=1.29)
    reference = shift_sigmas(1 - u.float(), 3.0)
    assert _same_distribution(_sigmas(timestep_sampling="sigma", weighting_scheme=scheme), reference)


@pytest.mark.parametrize("scheme", ["none", "sigma_sqrt", "cosmap"])
def test_loss_weights_equal_diffusers(scheme: str) -> None:
    sigmas = torch.linspace(0.01, 1.0, 100)
    theirs = compute_loss_weighting_for_sd3(scheme, sigmas).float()
    torch.testing.assert_close(loss_weights(FlowConfig(weighting_scheme=scheme), sigmas), theirs)


def test_min_and_max_timestep_bound_every_sigma() -> None:
    sigmas = _sigmas(timestep_sampling="sigmoid", min_timestep=200, max_timestep=600)
    assert sigmas.min() >= 0.2
    assert sigmas.max() <= 0.6
    assert sigmas.min() < 0.25  # and the range is used, not clamped into
    assert sigmas.max() > 0.55


def test_sigmas_are_fp32_and_keep_neighbouring_timesteps_apart() -> None:
    sigmas = _sigmas(timestep_sampling="uniform")
    assert sigmas.dtype == torch.float32
    assert len(sigmas.unique()) > 19900
    assert len(sigmas.bfloat16().unique()) < 3000  # what a cast to bf16 would leave


def test_steps_draws_the_noise_levels_of_the_distilled_models_steps_equally_often() -> None:
    levels = (1.0, 0.75, 0.5, 0.25)
    drawn = sample_sigmas(FlowConfig(timestep_sampling="steps"), IDS, 256, 0, 0, levels=levels)
    shares = [float((drawn == level).float().mean()) for level in levels]
    assert shares == pytest.approx([0.25] * 4, abs=4 * (0.25 * 0.75 / len(IDS)) ** 0.5)  # binomial: four deviations


def test_a_large_steps_velocity_leads_where_the_small_ones_lead() -> None:
    """dx/ds = x and dx/ds = s by Euler's method in n parts of h: factors (1 + h)^n, and a sum over the levels."""
    noisy = torch.randn(2, 16, 4, 4, dtype=torch.float64)
    sigmas, following = torch.tensor([1.0, 0.5]).double(), torch.tensor([0.6, 0.0]).double()
    part = ((following - sigmas) / 4).view(-1, 1, 1, 1)
    growing = step_velocity(lambda x, _: x, noisy, sigmas, following, 4)
    torch.testing.assert_close(growing, noisy * ((1 + part) ** 4 - 1) / (4 * part))
    level = step_velocity(lambda x, now: now.view(-1, 1, 1, 1).expand_as(x), noisy, sigmas, following, 4)
    mean = (sigmas + 1.5 * (following - sigmas) / 4).view(-1, 1, 1, 1)
    torch.testing.assert_close(level, mean.expand_as(noisy))


def test_noisy_latents_and_velocity_are_the_two_ends_of_one_line() -> None:
    latents, noise = torch.randn(2, 16, 4, 4), torch.randn(2, 16, 4, 4)
    sigmas = torch.tensor([0.25, 1.0])
    noisy, velocity = add_noise(latents, noise, sigmas)
    torch.testing.assert_close(noisy - sigmas.view(-1, 1, 1, 1) * velocity, latents)
    torch.testing.assert_close(noisy[1], noise[1])


def test_losses_equal_their_formulas_in_float64() -> None:
    prediction, target = torch.randn(3, 16, 4, 4), torch.randn(3, 16, 4, 4)
    d, c = (prediction - target).double(), 0.3
    expected = {"l2": d**2, "huber": 2 * c * ((d**2 + c**2).sqrt() - c), "smooth_l1": 2 * ((d**2 + c**2).sqrt() - c)}
    for kind, pointwise in expected.items():
        flow = FlowConfig(loss_type=kind) if kind == "l2" else FlowConfig(loss_type=kind, huber_c=c)
        ours = sample_losses(flow, prediction, target)
        # fp32 mean over 256 values of order one: 1e-6 relative
        torch.testing.assert_close(ours.double(), pointwise.mean(dim=(1, 2, 3)), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (2.0, 0.5)])
def test_logsnr_sigmas_have_a_normal_log_snr(mean: float, spread: float) -> None:
    sigmas = _sigmas(timestep_sampling="logsnr", logit_mean=mean, logit_std=spread)
    log_snr = 2 * torch.log((1 - sigmas) / sigmas)  # of (1 - sigma) x + sigma noise
    assert log_snr.mean().item() == pytest.approx(mean, abs=4 * spread / 20000**0.5)
    assert log_snr.std().item() == pytest.approx(spread, rel=0.03)


@pytest.mark.parametrize(
    ("name", "shares"), [("qinglong_flux", (0.79, 0.11, 0.10)), ("qinglong_qwen", (0.95, 0.0, 0.05))]
)
def test_qinglong_is_musubi_tuners_mixture(name: str, shares: tuple[float, float, float]) -> None:
    """Drawn anew by the shares and densities of timesteps.py there, at 256 tokens, where the shift is e^0.5."""
    random = torch.Generator().manual_seed(9)
    kinds = torch.multinomial(torch.tensor(shares), 20000, replacement=True, generator=random)
    normal = torch.randn(20000, generator=random)
    shift = math.exp(0.5)
    plain = normal.sigmoid()
    drawn = [plain * shift / (1 + (shift - 1) * plain), (-(0.3 + 1.2 * normal) / 2).sigmoid()]
    drawn.append((-(5.36 + normal) / 2).sigmoid())
    reference = torch.stack(drawn).gather(0, kinds[None])[0]
    mixed = {"logit_mean": 0.3, "logit_std": 1.2} if name == "qinglong_flux" else {}
    assert _same_distribution(_sigmas(timestep_sampling=name, **mixed), reference)


def test_the_shape_of_a_distribution_is_cut_off_where_it_is_to_be_preserved() -> None:
    limits = {"timestep_sampling": "sigmoid", "min_timestep": 400, "max_timestep": 800}
    cut = _sigmas(preserve_distribution_shape=True, **limits)
    plain = torch.sigmoid(torch.randn(60000, generator=torch.Generator().manual_seed(4)))
    inside = plain[(plain >= 0.4) & (plain <= 0.8)][:20000]
    assert len(inside) == 20000
    assert cut.min() >= 0.4
    assert cut.max() <= 0.8
    assert _same_distribution(cut, inside)
    assert not _same_distribution(cut, _sigmas(**limits)), "squeezed it is another"
    alone = sample_sigmas(FlowConfig(preserve_distribution_shape=True, **limits), IDS[7:8], 256, 0, 0)
    assert torch.equal(alone, cut[7:8]), "a sample's draws are its own"


def test_a_perturbation_is_in_the_input_alone_and_as_strong_as_asked() -> None:
    """sd-scripts: (1 - sigma) x + sigma (noise + gamma xi), towards noise - x."""
    ids, latents = torch.arange(64), torch.randn(64, 4, 8, 8, generator=torch.Generator().manual_seed(6))
    noise, sigmas = noise_for(latents, ids, 0, 1), torch.linspace(0.1, 1, 64)
    flow = FlowConfig(ip_noise_gamma=0.3)
    xi = perturbation_for(flow, latents, ids, 0, 1)
    assert xi is not None
    noisy, target = add_noise(latents, noise, sigmas, xi)
    plain, same = add_noise(latents, noise, sigmas)
    assert torch.equal(target, same)
    added = (noisy - plain) / sigmas.view(-1, 1, 1, 1)
    assert added.std().item() == pytest.approx(0.3, rel=0.03)
    assert abs((added * noise).mean().item()) < 0.01, "drawn apart from the noise"
    assert perturbation_for(FlowConfig(), latents, ids, 0, 1) is None

    random = perturbation_for(FlowConfig(ip_noise_gamma=0.3, ip_noise_gamma_random_strength=True), latents, ids, 0, 1)
    assert random is not None
    strengths = (random / xi).flatten(1)
    torch.testing.assert_close(strengths.amax(1), strengths.amin(1), rtol=1e-4, atol=1e-6)  # one of each sample
    each = strengths.mean(1)
    assert 0 <= each.min() < 0.2 < 0.8 < each.max() <= 1
    one = perturbation_for(
        FlowConfig(ip_noise_gamma=0.3, ip_noise_gamma_random_strength=True), latents[5:6], ids[5:6], 0, 1
    )
    assert one is not None
    assert torch.equal(one, random[5:6])
