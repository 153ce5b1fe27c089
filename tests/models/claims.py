"""What every family claims, each claim written once; a family's own tests say of which model, inputs and counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from library.conditions import NO_CONDITIONS, Conditions
from library.config.model_types import MODEL_TYPES
from library.config.schema import FlowConfig, ModelConfig, NetworkConfig
from library.data.batches import Batch
from library.errors import UserError
from library.models.family import Family, SampleSettings
from library.models.family_by_name import model_family
from library.models.layer_names import LoraTargets
from library.precision.files.fp8 import Fp8Scheme
from library.precision.recipe import Recipe, WeightLoader
from library.training.flow import noise_for, sample_sigmas
from library.training.tasks.image_step import FlowStep
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.parity.peft_lora import assert_gradients_are_pefts, copy_to_peft, fill_up

Text = dict[str, Tensor]


def family_maker(model_type: str, kind: type) -> Callable[..., Any]:
    """Return a function that gives the family of a folder or file, of class ``kind``."""

    def family_of(folder: Path, **changes: object) -> Any:
        settings: dict[str, object] = {"model_type": model_type, "pretrained_model_name_or_path": str(folder)}
        family = model_family(ModelConfig(**(settings | changes)))  # type: ignore[arg-type]
        assert isinstance(family, kind)
        return family

    return family_of


def quiet(pipeline: Any) -> Any:
    """Return a pipeline of diffusers' that prints no progress."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def assert_as_near_as_diffusers(ours: Sequence[Tensor], theirs: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Hold bf16 to fp32: no further from it than diffusers' own bf16 is, with 20 % to spare for luck."""
    for mine, diffusers, reference in zip(ours, theirs, exact, strict=True):
        assert (mine.float() - reference).norm() <= 1.2 * (diffusers.float() - reference).norm()


def assert_timesteps_are_not_rounded(
    ours: nn.Module, theirs: nn.Module, run: Callable[[nn.Module], object], exact: Tensor, most: float = 2**-9
) -> None:
    """Compare timesteps' embeddings under bf16 autocast with ``exact``: ``most`` is bf16's rounding of a cosine.

    Those of diffusers are far off: the time is rounded before its cosine is taken.
    """
    torch.testing.assert_close(_timesteps_under_autocast(ours, run), exact, rtol=0, atol=most)
    assert (_timesteps_under_autocast(theirs, run) - exact).abs().max() > 0.5


def _timesteps_under_autocast(transformer: nn.Module, run: Callable[[nn.Module], object]) -> Tensor:
    """Return what a transformer's embedder of timesteps is given when ``run`` calls it under bf16 autocast."""
    given: list[Tensor] = []
    embedder = transformer.time_text_embed.timestep_embedder
    embedder.register_forward_pre_hook(lambda _, args: given.append(args[0].float()))
    with torch.autocast("cpu", torch.bfloat16):
        run(transformer)
    return given[0]


def assert_same_picture(ours: Any, theirs: Any, most: int = 1) -> None:
    """Compare two pictures: the same numbers up to ``most`` of 255, where a number lies between two."""
    found, expected = (np.asarray(each, dtype=int) for each in (ours, theirs))
    difference = np.abs(found - expected)
    assert difference.max() <= most
    assert most > 1 or difference.mean() < 0.01
    assert found.std() > 1, "a flat picture would agree with another flat one"


def gradients_of(
    forward: Callable[[dict[str, Tensor]], Tensor], inputs: Mapping[str, Tensor], names: Sequence[str]
) -> tuple[Tensor, list[Tensor]]:
    """Return ``forward(inputs)``, and the gradients of a random sum of it with respect to the inputs of ``names``."""
    leaves = {name: inputs[name].clone().requires_grad_() for name in names}
    output = forward(dict(inputs) | leaves)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    (output * weight).sum().backward()
    return output.detach(), [leaf.grad for leaf in leaves.values() if leaf.grad is not None]


def assert_same_gradients(ours: tuple[Tensor, list[Tensor]], theirs: tuple[Tensor, list[Tensor]]) -> None:
    """Compare what :func:`gradients_of` gives: fp32 and the same operations; sums may be split differently."""
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    assert len(ours[1]) == len(theirs[1]) > 0
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert other.abs().max() > 1e-3  # every input matters
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def saved_bytes(forward: Callable[[], Any]) -> int:
    """Return how many bytes beside parameters ``forward`` saves for backward."""
    storages: dict[int, tuple[Tensor, int]] = {}  # the tensors too, or another one might have the same address

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    total = sum(size for _, size in storages.values())
    del output
    return total


def inject_every_layer(transformer: nn.Module, targets: LoraTargets) -> AdapterNetwork:
    """Return a LoRA on all groups of ``targets``."""
    single = targets.dim_options().values()
    kinds = [f"{kind.name}_dim=2" for kind in targets.layer_groups if not kind.default and kind.name in single]
    kinds += [f"{option}={[2] * len(names)}" for option, names in targets.dim_lists.items()]
    options = parse_network_args(NetworkConfig(network_dim=4, network_alpha=3, network_args=kinds), targets)
    return inject_adapter(transformer, options, targets, seed=0, dtype=torch.float32)


def assert_step_is_pefts(
    family: Family,
    targets: LoraTargets,
    inputs: Mapping[str, Tensor],
    text: Text,
    flow: FlowConfig,
    theirs: Any,
    velocity: Callable[[Any, Tensor, Tensor], Tensor],
    conditions: Conditions = NO_CONDITIONS,
) -> set[str]:
    """Compare loss and gradients of a step with a LoRA on all groups of ``targets`` with peft's.

    Args:
        inputs: ``latents`` of three samples.
        theirs: diffusers' transformer with the same weights.
        velocity: calls it, with noisy latents and noise levels.

    Returns:
        Linear layers of ``theirs`` that have no LoRA.
    """
    step, ids = 11, [5, 6, 7]
    batch = Batch(inputs["latents"], text, torch.ones(3), None, ids, conditions=conditions)
    transformer = family.load_transformer(torch.float32)
    network = inject_every_layer(transformer, targets)
    fill_up(network)
    loss, _ = FlowStep(family, flow, seed=9).loss(transformer.train(), batch, step)
    loss.backward()

    linears = {name for name, module in theirs.named_modules() if isinstance(module, nn.Linear)}
    ranks = {f"^{name}$": layer.rank for name, layer in network.modules.items()}
    alphas = dict.fromkeys(ranks, 3.0)
    names = list(network.modules)
    theirs.requires_grad_(False).add_adapter(
        LoraConfig(r=4, target_modules=names, rank_pattern=ranks, alpha_pattern=alphas)
    )
    named = dict(theirs.named_parameters())
    copy_to_peft(network, named)
    noise = noise_for(batch.latents, ids, 9, step)
    sigmas = sample_sigmas(flow, ids, 16, 9, step)
    noisy = torch.lerp(batch.latents, noise, sigmas.view(-1, 1, 1, 1))
    their_loss = torch.nn.functional.mse_loss(velocity(theirs.train(), noisy, sigmas), noise - batch.latents)
    their_loss.backward()
    # fp32, the same operations with the down-projections of layers on one input stacked: rounding of sums
    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=0)
    assert_gradients_are_pefts(network, named, 1e-5)
    return linears - set(names)


def assert_same_model(single: Family, whole: Family, captions: list[str]) -> None:
    """Compare a model in split files with that of the folder they were made of: settings, weights, latents, texts."""
    ours, theirs = (family.load_transformer(torch.float32) for family in (single, whole))
    settings = [
        {k: v for k, v in json.loads(model.to_json_string()).items() if k[0] != "_"} for model in (ours, theirs)
    ]
    assert settings[0] == settings[1]
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())
    pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(*(family.load_image_encoder(torch.float32).encode(pixels) for family in (single, whole)))
    texts = [family.load_text_encoder(torch.float32).encode(captions) for family in (single, whole)]
    assert all(torch.equal(a["prompt_embeds"], b["prompt_embeds"]) for a, b in zip(*texts, strict=True))
    schedules = [{k: v for k, v in f.scheduler().config.items() if k[0] != "_"} for f in (single, whole)]
    assert schedules[0] == schedules[1]


def assert_lone_file_is_read(
    folder: Path, family_of: Callable[..., Family], file: Path, more: dict[str, Tensor] | None = None, **changes: object
) -> None:
    """Read the folder's transformer as a file in diffusers' names, with ``more`` tensors that are passed over."""
    state = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    save_file(state | (more or {}), file)
    tokenizer = next(iter(MODEL_TYPES[str(changes["model_type"])].tokenizers))
    parts = {"vae": str(folder), "text_encoder": str(folder), tokenizer: str(folder / "tokenizer")}
    loaded = family_of(file, **parts, **changes).load_transformer(torch.float32).state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)


@torch.no_grad()
def assert_fp8_is_near(
    family: Family, inputs: Mapping[str, Tensor], text: Text, exclude: tuple[str, ...], counts: tuple[int, int]
) -> None:
    """Quantise all but the kinds of ``exclude``; ``counts``: of layers that are quantised, and that are excluded."""
    loading = WeightLoader(Recipe(Fp8Scheme("block64"), exclude=exclude), compute="dequant")
    plain, quantised = (
        family.predict_velocity(
            family.load_transformer(torch.float32, fp8=fp8), inputs["latents"], inputs["sigmas"], text
        )
        for fp8 in (None, loading)
    )
    assert (loading.quantized, loading.excluded) == counts
    assert 0 < (quantised - plain).norm() / plain.norm() < 0.1


@torch.no_grad()
def assert_bf16_is_near(family: Family, inputs: Mapping[str, Tensor], text: Text) -> None:
    """Compare bf16 weights, with and without autocast, with fp32."""
    arguments = (inputs["latents"], inputs["sigmas"], text)
    exact = family.predict_velocity(family.load_transformer(torch.float32), *arguments)
    transformer = family.load_transformer(torch.bfloat16)
    plain = family.predict_velocity(transformer, *arguments)
    with torch.autocast("cpu", torch.bfloat16):
        cast = family.predict_velocity(transformer, *arguments)
    for velocity in (plain, cast):
        assert velocity.dtype == torch.float32
        assert (velocity - exact).norm() / exact.norm() < 0.03  # at most six blocks of bf16, 8 bits


@torch.no_grad()
def assert_timesteps_are_exact(family: Family, inputs: Mapping[str, Tensor], text: Text) -> None:
    """Two noise levels that are one in bf16 give a bf16 model two velocities; ``inputs`` are of one sample."""
    transformer = family.load_transformer(torch.bfloat16)
    sigmas = torch.tensor([0.7127, 0.7124])
    assert len(set(sigmas.bfloat16().tolist())) == len(set((1 - sigmas).bfloat16().tolist())) == 1
    one, other = (family.predict_velocity(transformer, inputs["latents"], sigma[None], text) for sigma in sigmas)
    assert not torch.equal(one, other)


def assert_refused(config: Callable[..., ModelConfig], wanted: Mapping[str, Mapping[str, object]]) -> None:
    """Build the family of ``config(**changes)`` for each of ``wanted``, message -> changes: an error of one line."""
    for message, changes in wanted.items():
        with pytest.raises(UserError, match=message) as caught:
            model_family(config(**changes))
        assert "\n" not in str(caught.value)


def assert_sample_is_the_pipelines(
    family: Family,
    pipeline: Any,
    cfg: float,
    shown: Callable[[Any], np.ndarray] = np.asarray,
    most: int = 1,
    **theirs: Any,
) -> None:
    """Sample 64 x 96 pixels in three steps with both.

    Args:
        shown: the pipeline's image as RGB; numbers up to 255.
        most: by how much a number may differ.
        theirs: the pipeline's own names of the guidance; ``negative_prompt_embeds`` among them are those of "blurry,
            large", where the pipeline takes no negative text.
    """
    transformer, encoder = family.load_transformer(torch.float32).train(), family.load_text_encoder(torch.float32)
    text, negative = encoder.encode(["a red disc", "blurry, large"])
    image = family.sample(
        transformer,
        family.load_image_encoder(torch.float32),
        text,
        SampleSettings(64, 96, steps=3, guidance=3.5, seed=7, cfg=cfg),
        negative_text=negative if cfg > 1 else None,
    )
    if cfg > 1 and "negative_prompt_embeds" not in theirs:
        theirs["negative_prompt"] = "blurry, large"
    expected = pipeline(
        prompt="a red disc",
        width=64,
        height=96,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(7),
        **theirs,
    ).images[0]
    assert image.size == expected.size == (64, 96)
    tokens = 64 * 96 // (family.patch_size * pipeline.vae_scale_factor) ** 2
    assert family.sampling_sigmas(3, tokens) == pytest.approx(pipeline.scheduler.sigmas.tolist())
    ours = np.asarray(image, dtype=int)
    # the same numbers up to rounding, sums may be split differently: one step of 255 may be left
    assert np.abs(ours - shown(expected).astype(int)).max() <= most
    assert ours.std() > 5, "a flat image would agree with another flat one"
    assert transformer.training, "the mode is put back"
