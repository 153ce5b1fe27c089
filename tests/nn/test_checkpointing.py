"""Blocks computed again in backward: the same gradients, and as many operations and bytes as was asked."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench.families import FAMILIES, Sizes, build_transformer, example_inputs
from library.config.run_schema import AccelerateConfig
from library.config.schema import NetworkConfig
from library.models.family_by_name import family_class
from library.models.registry import lora_targets
from library.nn.checkpointing import ATTENTION, ActivationCheckpointing, HostOffload, neighbours
from library.training.compiling import compile_blocks
from networks.network import inject_adapter
from networks.options import parse_network_args

BLOCKS, TOKENS, WIDTH = 6, 32, 16
INPUT = TOKENS * WIDTH * 4  # bytes
NAMES = {operation.name().split(".")[0] for operation in ATTENTION}


class Block(nn.Module):
    """Attention, dropout and an MLP on one stream, with a second input that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.attention: Callable[[Tensor, Tensor, Tensor], Tensor] = F.scaled_dot_product_attention
        self.seen: weakref.ref[Tensor] | None = None

    def forward(self, x: Tensor, shift: Tensor, scale: float = 1.0) -> Tensor:
        self.seen = weakref.ref(x)
        q, k, v = (part.view(1, 1, TOKENS, WIDTH) for part in self.qkv(x + shift).chunk(3, dim=-1))
        x = x + scale * F.dropout(self.out(self.attention(q, k, v).view(x.shape)), 0.2)
        return x + self.down(F.gelu(self.up(x)))


class Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))

    @property
    def attentions(self) -> int:
        return sum(self.counts[operation] for operation in ATTENTION)

    @property
    def forward_gelus(self) -> int:
        return self.counts[torch.ops.aten.gelu.default]


def stack() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(BLOCKS))


def step(blocks: nn.ModuleList, checkpointing: ActivationCheckpointing | None) -> tuple[list[Tensor], Operations]:
    """Return the gradients of a step, and the operations it took."""
    torch.manual_seed(1)
    dtype = next(blocks.parameters()).dtype
    x, shift = torch.randn(1, TOKENS, WIDTH, dtype=dtype), torch.randn(WIDTH, dtype=dtype)
    blocks.zero_grad()
    with Operations() as operations:
        for block in blocks:
            x = block(x, shift, scale=0.5) if checkpointing is None else checkpointing(block, x, shift, scale=0.5)
        x.square().sum().backward()
    return [p.grad.clone() for p in blocks.parameters() if p.grad is not None], operations


def everything_of_a_block() -> int:
    """Bytes that autograd keeps of one block, by its own count."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    block, x = Block(), torch.randn(1, TOKENS, WIDTH, requires_grad=True) * 1
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = block(x, torch.randn(WIDTH), scale=0.5)
    assert made.requires_grad
    for weight in block.parameters():  # which views of them share
        kept.pop(weight.untyped_storage().data_ptr(), None)
    return sum(kept.values())


@pytest.mark.parametrize("keep", [0, 2 * INPUT, 10**4, 10**6])
@pytest.mark.parametrize("offloaded", [False, True])
def test_gradients_are_those_of_a_step_that_keeps_everything(keep: int, offloaded: bool) -> None:
    """Bit for bit, dropout included: the second run has the first one's random numbers and operations."""
    blocks = stack()
    expected, _ = step(blocks, None)
    offload = HostOffload(torch.device("cpu"), smallest=0) if offloaded else None
    checkpointing = ActivationCheckpointing(BLOCKS, keep, offload)
    for _ in range(3):  # the first learns what blocks cost
        found, _ = step(blocks, checkpointing)
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_each_block_is_computed_again_once() -> None:
    _, operations = step(stack(), ActivationCheckpointing(BLOCKS))
    assert operations.attentions == operations.forward_gelus == 2 * BLOCKS


@pytest.mark.parametrize("count", [BLOCKS, BLOCKS - 1])
def test_two_blocks_in_one_checkpoint_are_each_computed_again_once(count: int) -> None:
    """Bit for bit the gradients of a step that keeps everything, of an odd number of blocks too."""
    blocks = nn.ModuleList(list(stack())[:count])
    expected, _ = step(blocks, None)
    pairs = neighbours(list(blocks), alone=0)
    assert len(pairs) == count // 2
    checkpointing = ActivationCheckpointing(count, pairs=pairs, chained_args=("x",))
    for _ in range(2):
        found, operations = step(blocks, checkpointing)
        assert operations.attentions == operations.forward_gelus == 2 * count
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_blocks_of_two_classes_are_no_pair() -> None:
    class Other(Block):
        pass

    blocks = [Block(), Other(), Other(), Block()]
    assert neighbours(blocks, alone=0) == {blocks[1]: blocks[2]}
    assert neighbours(blocks, alone=2) == {}


def test_attention_comes_first_and_whole_blocks_take_what_is_left() -> None:
    blocks, everything = stack(), everything_of_a_block()
    assert everything > 6 * INPUT
    for keep, attentions, gelus in (
        (BLOCKS * INPUT, BLOCKS, 2 * BLOCKS),  # all attention, nothing more
        (3 * INPUT, 2 * BLOCKS - 3, 2 * BLOCKS),  # of three blocks
        (everything + (BLOCKS - 1) * INPUT, BLOCKS, 2 * BLOCKS - 1),  # one block, and of the others attention
        (4 * everything + 2 * INPUT, BLOCKS, 2 * BLOCKS - 4),
        (BLOCKS * everything, BLOCKS, BLOCKS),
    ):
        checkpointing = ActivationCheckpointing(BLOCKS, budget_bytes=keep)
        for _ in range(3):
            _, operations = step(blocks, checkpointing)
        assert (operations.attentions, operations.forward_gelus) == (attentions, gelus), keep


def test_the_first_step_keeps_one_block_of_a_kind_to_learn_its_cost() -> None:
    _, operations = step(stack(), ActivationCheckpointing(BLOCKS, budget_bytes=1))
    assert operations.forward_gelus == 2 * BLOCKS - 1


class Pure(Block):
    def forward(self, x: Tensor, shift: Tensor, scale: float = 1.0) -> Tensor:
        q, k, v = (part.view(1, 1, TOKENS, WIDTH) for part in self.qkv(x + shift).chunk(3, dim=-1))
        x = x + scale * self.out(self.attention(q, k, v).view(x.shape))
        return x + self.down(F.gelu(self.up(x)))


def test_compiled_blocks_keep_attention_and_whole_blocks_within_the_budget() -> None:
    """Gradients are bit for bit those of compiled blocks that keep everything; attention runs again where it must."""
    torch.manual_seed(0)
    blocks, x = nn.ModuleList(Pure() for _ in range(BLOCKS)), torch.randn(1, TOKENS, WIDTH)
    compile_blocks(blocks, AccelerateConfig(torch_compile=True, dynamo_backend="aot_eager"))

    def gradients(checkpointing: ActivationCheckpointing | None) -> tuple[list[Tensor], int]:
        blocks.zero_grad()
        y = x
        for block in blocks:
            y = block(y, x[0, 0]) if checkpointing is None else checkpointing(block, y, x[0, 0])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            y.square().sum().backward()
        again = [each for each in profile.events() if each.name in NAMES]
        return [parameter.grad.clone() for parameter in blocks.parameters() if parameter.grad is not None], len(again)

    expected, none = gradients(None)
    assert none == 0
    attention = INPUT + TOKENS * 4  # the output, and the logarithms of the sums
    everything = 40 * INPUT
    for keep, again in ((1, BLOCKS), (3 * attention, BLOCKS - 3), (BLOCKS * attention, 0), (BLOCKS * everything, 0)):
        checkpointing = ActivationCheckpointing(BLOCKS, budget_bytes=keep)
        for _ in range(2):  # the first learns what blocks cost
            found, count = gradients(checkpointing)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert count == again, keep


def test_inputs_that_wait_on_the_host_leave_the_device() -> None:
    blocks = stack()
    for offload, alive in ((None, BLOCKS), (HostOffload(torch.device("cpu"), smallest=0), 0)):
        checkpointing = ActivationCheckpointing(BLOCKS, offload=offload)
        x = torch.randn(1, TOKENS, WIDTH)
        for block in blocks:
            x = checkpointing(block, x, torch.zeros(WIDTH))
        assert sum(block.seen is not None and block.seen() is not None for block in blocks) == alive
        x.sum().backward()


def test_what_backward_wants_next_is_on_its_way() -> None:
    offload = HostOffload(torch.device("cpu"), smallest=64)
    tensors = [torch.randn(4, 8) for _ in range(5)]
    away: list[Any] = [offload.pack(tensor) for tensor in tensors]
    assert offload.pack(small := torch.randn(4)) is small
    assert offload.pack(weight := nn.Parameter(torch.randn(4, 8))) is weight
    assert all(one.on_device is None for one in away)
    assert torch.equal(offload.unpack(away[4]), tensors[4])
    assert [one.on_device is not None for one in away] == [False, False, True, True, False]
    for one, tensor in zip(away, tensors, strict=True):
        assert torch.equal(offload.unpack(one), tensor)


def test_a_pass_that_is_never_taken_back_leaves_nothing_behind() -> None:
    offload = HostOffload(torch.device("cpu"), smallest=0)
    step(stack(), ActivationCheckpointing(BLOCKS, offload=offload))
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    y = ActivationCheckpointing(BLOCKS, offload=offload)(Block(), x, torch.zeros(WIDTH))
    assert len(offload._offloaded) > 0
    del x, y
    assert len(offload._offloaded) == 0


SIZES = Sizes(width=64, head_dim=32, blocks=(2, 2), image_sides=(4, 4), text_tokens=6, batch=2)
MODULATIONS = {"flux": ("norm1.linear", "norm1_context.linear", "norm.linear"), "qwen_image": ("_mod.1",)}
FROZEN = {"flux": ["img_mod_dim=0", "txt_mod_dim=0", "single_mod_dim=0"], "qwen_image": []}
TRAINED = {"flux": ["img_mod_dim=2", "txt_mod_dim=2", "single_mod_dim=2"], "qwen_image": ["img_mod_dim=2"]}
Policy = Callable[[int], ActivationCheckpointing | None]
POLICIES: dict[str, Policy] = {
    "all": ActivationCheckpointing,
    "attention kept": lambda blocks: ActivationCheckpointing(blocks, budget_bytes=30_000),
    "offloaded": lambda blocks: ActivationCheckpointing(blocks, offload=HostOffload(torch.device("cpu"), smallest=0)),
}


def modulated_step(family: str, policy: Policy | None, arguments: list[str]) -> tuple[dict[str, Tensor], Counter[str]]:
    """Take two steps; return the second's gradients, and how often it ran each modulation layer."""
    architecture = family_class(family)
    transformer: Any = architecture.optimise_forward(build_transformer(family, SIZES, torch.float32))
    targets = lora_targets()[family]
    options = parse_network_args(NetworkConfig(network_dim=2, network_alpha=2, network_args=arguments), targets)
    network = inject_adapter(transformer, options, targets, seed=0)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(parameter.numel()))
    if policy is not None:
        transformer.enable_gradient_checkpointing(policy(len(architecture.blocks(transformer))))
    runs: Counter[str] = Counter()
    for name, module in transformer.named_modules():
        if name.startswith(("transformer_blocks", "single")) and name.endswith(MODULATIONS[family]):
            module.register_forward_hook(lambda *_, name=name: runs.update([name]))
    inputs = example_inputs(family, SIZES, torch.device("cpu"))
    for sigma in (0.2, 0.7):  # what was kept of one step must not serve the next
        runs.clear()
        transformer.zero_grad()
        output = transformer.train()(**inputs | {"timestep": torch.full((2,), sigma)}, return_dict=False)[0]
        output.square().mean().backward()
    return {name: p.grad.clone() for name, p in transformer.named_parameters() if p.grad is not None}, runs


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_modulation_runs_once_a_step(family: str, policy: str) -> None:
    plain, once = modulated_step(family, None, FROZEN[family])
    again, runs = modulated_step(family, POLICIES[policy], FROZEN[family])
    assert runs == once
    assert len(runs) == {"flux": 2 * 2 + 2, "qwen_image": 2 * 2}[family]
    assert set(runs.values()) == {1}
    torch.testing.assert_close(again, plain, rtol=0, atol=0)  # the same operations on the same numbers


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_modulation_learns_the_same(family: str) -> None:
    plain, _ = modulated_step(family, None, TRAINED[family])
    again, _ = modulated_step(family, ActivationCheckpointing, TRAINED[family])
    assert any(tensor.abs().sum() > 0 for name, tensor in again.items() if "_mod." in name or "norm" in name)
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
