"""What a stage holds and computes: against the whole model, with gradients from plain autograd."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from library.accelerator import build_accelerator
from library.config.schema import (
    AccelerateConfig,
    LoggingConfig,
    NetworkConfig,
    ParallelConfig,
    SavingConfig,
    TrainingConfig,
)
from library.data.batches import Batch
from library.errors import UserError
from library.llm.chat_batches import ChatBatch
from library.models.registry import lora_targets
from library.training.parallel.parallelize import ParallelSpec, parallelize
from library.training.parallel.pipeline import (
    SplitPoints,
    microbatches_of,
    partition,
    plan_stages,
    transformer_split_points,
)
from networks.network import inject_adapter
from networks.options import parse_network_args
from tests.runs import pipeline_forward
from tests.tiny import tiny_flux_inputs, tiny_flux_transformer
from tests.worker_group import run_in_group


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


@pytest.mark.parametrize(("balance", "ends"), [("time", [29, 57]), ("weights", [17, 57])])
def test_stages_of_flux_have_equal_work_or_equal_weights(balance: str, ends: list[int]) -> None:
    millions = [340] * 19 + [142] * 38 + [19]  # weights of the published model's blocks, and of what follows them
    model = nn.Sequential(*(nn.Linear(number, 1, bias=False) for number in millions))
    points = SplitPoints([str(i) for i in range(57)], True, ("57",))
    assert [stage.stop for stage in plan_stages(model, points, 2, balance)] == ends


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
        AccelerateConfig(), TrainingConfig(), SavingConfig(output_dir=str(folder)), LoggingConfig(),
        parallel := ParallelConfig(pp=2, microbatches=microbatches, pp_balance="weights"),
    )  # fmt: skip
    model, network = whole_model()
    reference, theirs = whole_model()
    weights = sum(p.numel() for p in model.parameters())
    expected, _ = loss_of(reference, torch.arange(4))
    expected.backward()
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
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
        assert sum(p.numel() for p in stage.parameters()) < 0.7 * weights


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
