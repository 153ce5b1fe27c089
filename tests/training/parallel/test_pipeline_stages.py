"""What a stage holds and computes, and layers that two processes have together: against whole models and layers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import FluxTransformer2DModel, ZImageTransformer2DModel
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader

from library.accelerator import build_accelerator, device_mesh
from library.config.run_schema import AccelerateConfig, LoggingConfig, ParallelConfig, SavingConfig
from library.config.schema import NetworkConfig, TrainingConfig
from library.data.batches import Batch
from library.errors import UserError
from library.llm.chat_batches import ChatBatch
from library.models.family import split_plan
from library.models.family_by_name import family_class
from library.models.registry import lora_targets
from library.nn.cross_entropy import token_cross_entropy
from library.nn.tensor_split import Parts
from library.precision.linear import QuantizedLinear
from library.training.parallel.gradients import average_gradients
from library.training.parallel.parallelize import ParallelSpec, parallelize
from library.training.parallel.pipeline import (
    SplitPoints,
    microbatches_of,
    partition,
    plan_stages,
    transformer_split_points,
)
from library.training.parallel.tensor import split_layers
from networks.network import inject_adapter
from networks.options import parse_network_args
from tests.precision.layers import quantize
from tests.runs import pipeline_forward
from tests.tiny import tiny_flux_inputs, tiny_flux_transformer
from tests.tiny_flux2 import run_flux2, tiny_flux2_transformer
from tests.tiny_qwen import tiny_qwen_inputs, tiny_qwen_transformer
from tests.tiny_qwen_21 import run_21, tiny_21_transformer
from tests.worker_group import Job, run_in_group


@pytest.mark.parametrize("seed", range(5))
def test_the_largest_stage_is_as_small_as_it_can_be(seed: int) -> None:
    draw = random.Random(seed)
    sizes, stages = [draw.randint(1, 9) for _ in range(draw.randint(4, 9))], draw.randint(2, 4)
    found = partition(sizes, stages)
    assert [i for stage in found for i in stage] == list(range(len(sizes)))
    assert all(found)
    cuts = itertools.combinations(range(1, len(sizes)), stages - 1)
    best = min(max(sum(sizes[a:b]) for a, b in itertools.pairwise((0, *ends, len(sizes)))) for ends in cuts)
    assert max(sum(sizes[i] for i in stage) for stage in found) == best


def test_a_stage_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="pp: 3 stages, but the model has 2 blocks; lower pp"):
        partition([1, 1], 3)


def test_stages_of_flux_have_equal_work() -> None:
    millions = [340] * 19 + [142] * 38 + [19]  # weights of the published model's blocks, and of what follows them
    model = nn.Sequential(*(nn.Linear(number, 1, bias=False) for number in millions))
    points = SplitPoints([str(i) for i in range(57)], True, ("57",))
    assert [stage.stop for stage in plan_stages(model, points, 2)] == [29, 57]


@pytest.mark.parametrize(("samples", "wanted", "count"), [(8, 4, 4), (6, 4, 6), (3, 2, 3), (1, 4, 1), (4, 8, 4)])
def test_batches_are_cut_into_equal_pieces(samples: int, wanted: int, count: int) -> None:
    assert microbatches_of(samples, wanted) == count


def test_pieces_of_a_batch_are_the_batch() -> None:
    ids = list(range(6))
    batch = Batch(torch.rand(6, 2, 4, 4), {"a": torch.rand(6, 3)}, torch.ones(6), None, ids, list("abcdef"))
    pieces = batch.chunk(3)
    assert [piece.captions for piece in pieces] == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert torch.equal(torch.cat([piece.text["a"] for piece in pieces]), batch.text["a"])
    tokens = torch.arange(8).view(4, 2)
    windows = ChatBatch(tokens, tokens, None, 9).chunk(2)
    assert [piece.microbatches for piece in windows] == [2, 2]
    assert torch.equal(torch.cat([piece.tokens for piece in windows]), tokens)


def whole_model() -> tuple[nn.Module, Any]:
    """Return diffusers' own FLUX with a LoRA that is not zero; the same on every process."""
    model, targets = tiny_flux_transformer(), lora_targets()["flux"]
    network = inject_adapter(model, parse_network_args(NetworkConfig(network_dim=4), targets), targets, seed=1)
    for i, parameter in enumerate(network.parameters()):
        parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(i))
    return model, network


def loss_of(model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss of some rows of the inputs, and these as metrics."""
    inputs = {key: value[rows] for key, value in tiny_flux_inputs(batch=4).items()}
    text = {"prompt_embeds": inputs["prompt_embeds"], "pooled_prompt_embeds": inputs["pooled_prompt_embeds"]}
    return pipeline_forward(model, inputs["latents"], inputs["sigmas"], text).square().mean(), rows.float()


def compare(folder: Path, microbatches: int) -> None:
    """On each of two processes hold its stage to the whole model."""
    accelerator = build_accelerator(
        AccelerateConfig(), TrainingConfig(mixed_precision="no"), SavingConfig(output_dir=str(folder)), LoggingConfig(),
        parallel := ParallelConfig(pp=2, microbatches=microbatches),
    )  # fmt: skip
    model, network = whole_model()
    reference, theirs = whole_model()
    expected, _ = loss_of(reference, torch.arange(4))
    expected.backward()

    def places() -> list[nn.Module]:
        return [*model.transformer_blocks, *model.single_transformer_blocks]  # type: ignore[misc]

    blocks = places()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    spec = ParallelSpec(
        model, [], lambda: transformer_split_points(model, blocks, ("norm_out", "proj_out")), lambda _: {}, network
    )
    loader = DataLoader(torch.arange(4), batch_size=None)  # type: ignore[arg-type]
    stage, _, _, _, pipeline = parallelize(accelerator, parallel, spec, optimizer, loader)
    assert pipeline is not None

    drawn, _ = loss_of(stage, torch.arange(4))  # a plain call, of both stages together
    assert torch.equal(drawn.detach(), expected.detach())
    for _ in range(2):  # the second time with buffers that are there
        loss, (sums, counts) = pipeline.forward_backward(torch.arange(4), lambda rows: loss_of(stage, rows))
        torch.testing.assert_close(loss, expected.detach())
        assert (sums.tolist(), counts.tolist()) == ([0 + 1 + 2 + 3], [4])
        gradients = [None if p.grad is None else p.grad.clone() for p in network.parameters()]
        optimizer.zero_grad()
    with_gradient = [i for i, gradient in enumerate(gradients) if gradient is not None]
    torch.save({i: gradients[i] for i in with_gradient}, folder / f"{microbatches}_{accelerator.process_index}.pt")
    if accelerator.process_index == 0:
        torch.save([p.grad for p in theirs.parameters()], folder / f"{microbatches}_.pt")
        held = [p for layer in network.modules.values() for p in layer.base.parameters()]
        assert any(p.is_meta for p in held)
        kept = sum(any(True for _ in block.parameters()) for block in places())
        assert abs(kept - len(blocks) / 2) <= 1  # the layers after the blocks count for some


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    jobs = [(str(microbatches), compare, (folder, microbatches)) for microbatches in (4, 1)]
    assert run_in_group(jobs, folder) == {"4": "", "1": ""}
    return folder


@pytest.mark.parametrize("microbatches", [4, 1])  # alternating, and with fewer microbatches than stages
def test_gradients_of_the_stages_are_those_of_the_whole(microbatches: int, folder: Path) -> None:
    first, second, whole = (torch.load(folder / f"{microbatches}_{name}.pt") for name in ("0", "1", ""))
    assert not first.keys() & second.keys()  # each trained layer lies in one stage here
    assert first.keys() | second.keys() == set(range(len(whole)))
    for i, gradient in (first | second).items():
        assert (gradient - whole[i]).norm() <= 1e-5 * whole[i].norm()  # sums over four microbatches in fp32


# Relative to a tensor's norm. Sums of a hundred fp32 products in another order, through a few blocks: findings
# measured 1e-6 for gradients; those of a layer early in the model come through all later ones.
SAME_IN_FP32 = 1e-5
ARGUMENTS = {
    "flux": ["img_mod_dim=2", "single_mod_dim=2", "in_dims=[2,2,2,2,2]"],  # gathered, and whole on every process
    "flux_partly": ["include_patterns=['.*to_q', '.*proj_out', '.*ff.net.2']"],  # beside split layers without a LoRA
    "flux_fp8": [],
    "qwen": ["img_mod_dim=2"],
    "flux2": ["single_mod_dim=2", "img_in_dim=2"],  # packed: a process has its share of q, k, v, gate and factor each
    "qwen_21": ["mod_dim=2"],
}


def flux() -> nn.Module:
    return tiny_flux_transformer(double_blocks=2, single_blocks=2)


def flux_velocity(model: nn.Module) -> Tensor:
    inputs = tiny_flux_inputs()
    return pipeline_forward(model, inputs.pop("latents"), inputs.pop("sigmas"), inputs, guidance=3.5)


def qwen_velocity(model: nn.Module) -> Tensor:
    inputs = tiny_qwen_inputs()
    packed = (
        inputs["latents"].unflatten(2, (4, 2)).unflatten(4, (4, 2)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    )
    return model(
        hidden_states=packed,
        timestep=inputs["sigmas"],
        encoder_hidden_states=inputs["prompt_embeds"],
        encoder_hidden_states_mask=inputs["prompt_embeds_mask"],
        img_shapes=[[(1, 4, 4)]] * len(packed),
        return_dict=False,
    )[0]


def quantised(model: nn.Module, plain: bool) -> nn.Module:
    """Put fp8 layers in the place of blocks' linear ones: scales by row, by 64 columns, or one.

    ``plain``: the same numbers in layers of torch's.
    """
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and "blocks" in name]
    for i, name in enumerate(names):
        linear = model.get_submodule(name)
        granularity = ("block64", "row", "tensor")[i % 3]  # a part may have 32 columns
        codes = quantize(linear.weight, granularity)
        if plain:
            linear.weight.data = codes.dequantize(torch.float32)
        else:
            model.set_submodule(name, QuantizedLinear(codes, linear.bias))
    return model


BUILDERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "flux": (flux, flux_velocity),
    "flux_partly": (flux, flux_velocity),
    "flux_fp8": (flux, flux_velocity),
    "qwen": (tiny_qwen_transformer, qwen_velocity),
    "flux2": (tiny_flux2_transformer, run_flux2),
    "qwen_21": (tiny_21_transformer, run_21),
}
FAMILIES = {"qwen": "qwen_image", "qwen_21": "qwen_image_21", "flux2": "flux2_klein"}


def with_lora(case: str, swap: bool) -> tuple[nn.Module, Any]:
    """Return a model with a LoRA that is not zero, Tandem's layers in it, or diffusers' own ones."""
    model = BUILDERS[case][0]()
    if case.endswith("fp8"):
        quantised(model, plain=not swap)
    if swap:
        family_class(FAMILIES.get(case, "flux")).optimise_forward(model)
    targets = lora_targets()[FAMILIES.get(case, "flux")]
    config = NetworkConfig(network_dim=4, network_alpha=2, network_args=ARGUMENTS[case])
    network = inject_adapter(model, parse_network_args(config, targets), targets, seed=0)
    draws = torch.Generator().manual_seed(1)
    for layer in network.modules.values():
        layer.lora_B.weight.data.normal_(0, 0.05, generator=draws)
    return model, network


def two_processes(folder: Path) -> Accelerator:
    saving = SavingConfig(output_dir=str(folder))
    return build_accelerator(
        AccelerateConfig(), TrainingConfig(mixed_precision="no"), saving, LoggingConfig(), ParallelConfig(tp=2)
    )


def compute_together(folder: Path, case: str) -> None:
    """Write the output and the LoRA's gradients of two processes that have the layers together."""
    accelerator = two_processes(folder)
    model, network = with_lora(case, swap=True)
    kind = family_class(FAMILIES.get(case, "flux")).transformer_class
    split_layers(model, split_plan(kind, model.config, 2), device_mesh(accelerator)["tp"])
    output = BUILDERS[case][1](model)
    output.square().mean().backward()
    average_gradients(accelerator, network.parameters())
    found = {f"{name}.{part}": p.grad for name, m in network.modules.items() for part, p in m.trained().items()}
    weights = sum(p.numel() for n, p in model.named_parameters() if "blocks" in n and n.endswith("base.weight"))
    torch.save((output.detach(), found, weights), folder / f"{case}{accelerator.process_index}.pt")


def reference(case: str) -> tuple[Tensor, dict[str, Tensor], int]:
    """Return the same of diffusers' own model on one process, every weight W + scale * B A."""
    model, network = with_lora(case, swap=False)
    whole = sum(p.numel() for n, p in model.named_parameters() if "blocks" in n and n.endswith("base.weight"))
    factors, merged = {}, {}
    for name, layer in network.modules.items():
        path = network.targets.path_in_model(name)
        a, b = (p.detach().requires_grad_() for p in (layer.lora_A.weight, layer.lora_B.weight))
        factors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        merged[f"{path}.weight"] = layer.base.weight + layer.alpha / layer.rank * b @ a
        model.set_submodule(path, layer.base)
    output = functional_call(_Called(model, BUILDERS[case][1]), {f"model.{k}": v for k, v in merged.items()}, ())
    gradients = torch.autograd.grad(output.square().mean(), list(factors.values()))
    return output.detach(), dict(zip(factors, gradients, strict=True)), whole


class _Called(nn.Module):
    def __init__(self, model: nn.Module, call: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self) -> Tensor:
        return self.call(self.model)


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    jobs: list[Job] = [(case, compute_together, (folder, case)) for case in BUILDERS]
    said = run_in_group([*jobs, ("loss", loss_together, (folder,))], folder)
    assert said == dict.fromkeys([*BUILDERS, "loss"], "")
    return folder


@pytest.mark.parametrize("case", list(BUILDERS))
def test_output_and_gradients_are_those_of_one_process_with_merged_weights(computed: Path, case: str) -> None:
    output, gradients, whole = reference(case)
    for process in range(2):
        found_output, found, part = torch.load(computed / f"{case}{process}.pt")
        assert apart(found_output, output) < SAME_IN_FP32
        assert found.keys() == gradients.keys()
        largest = max(gradients.values(), key=lambda tensor: tensor.norm()).norm()
        wrong = {n: apart(found[n], g) for n, g in gradients.items() if g.norm() > 1e-4 * largest}
        assert max(wrong.values()) < SAME_IN_FP32
        assert part * 2 == whole


def language_head(tokens: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Return an embedding and a head with 64 rows, what they are called with, and targets among ``tokens``."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64, bias=False))
    given, targets = torch.randint(tokens, (2, 3, 7))
    targets[0, 2] = -100
    return model, given, targets


def loss_together(folder: Path) -> None:
    """Write loss and gradients where each process has 32 rows: of 50 tokens both have some, of 20 one has them all."""
    mesh, plan = device_mesh(two_processes(folder))["tp"], {"0": Parts(0, (64,)), "1": Parts(0, (64,), gathered=True)}
    found = []
    for tokens in (50, 20):
        model, given, targets = language_head(tokens)
        split_layers(model, plan, mesh)
        loss = token_cross_entropy(model[0](given), model[1], targets, tokens)
        loss.backward()
        with torch.no_grad():
            again = token_cross_entropy(model[0](given), model[1], targets, tokens)
        whole = [layer.split.gather(layer.weight.grad, 0) for layer in model]
        found.append((loss.detach(), again, *whole))
    torch.save(found, folder / f"loss{mesh.get_local_rank()}.pt")


def test_a_vocabulary_is_split_and_the_loss_is_torchs(computed: Path) -> None:
    for process in range(2):
        for tokens, found in zip((50, 20), torch.load(computed / f"loss{process}.pt"), strict=True):
            model, given, targets = language_head(tokens)
            logits = model(given)[..., :tokens]
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            expected = [loss.detach(), loss.detach(), *(p.grad for p in model.parameters())]
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)  # a few fp32 sums of 64 numbers


def apart(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(UserError, match="diffusers says of no layer of ZImageTransformer2DModel how it is split"):
        split_plan(ZImageTransformer2DModel, {}, 2)
    config = tiny_flux_transformer(heads=2, head_dim=32).config
    with pytest.raises(UserError, match="tp: 2 heads cannot be split among 4 processes; set a divisor"):
        split_plan(FluxTransformer2DModel, config, 4)
    assert split_plan(FluxTransformer2DModel, config, 2)["single_transformer_blocks.0.proj_out"] == Parts(1, (64, 256))
