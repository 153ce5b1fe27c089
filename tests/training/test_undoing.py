"""What is changed for a while is given back whatever fails, at whichever call; or the run stops and saves nothing."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from library.errors import NotRestoredError
from library.nn.checkpointing import evaluating
from library.processes import agreed
from library.training.engine import Engine
from library.training.memory.block_swap import swap_blocks
from library.training.optim.after_update import WeightAverage
from library.training.optim.stochastic_rounding import update_stochastically
from library.training.sampling.sample_model import SampleModel
from networks.adapters.lora import DoRALinear, LoRALinear
from tests.networks.conftest import inject, make_flux

_OURS = tuple(str(Path(__file__).parents[2] / folder) for folder in ("library", "networks"))
CPU = torch.device("cpu")


class Fault(RuntimeError):
    """What fails."""


@pytest.fixture(autouse=True)
def gradients_are_on() -> Iterator[None]:
    """A fault within the end of torch.no_grad leaves them off."""
    yield
    torch.set_grad_enabled(True)


@contextmanager
def fault_at(number: int, places: list[str] | None = None) -> Iterator[list[str]]:
    """Let the call ``number`` inside the block fail, of our functions or by one of them; yield which, if there is one.

    A call fails before it does anything, or (of what is written in C) after it has done all. ``places`` gets a line for
    each call.
    """
    calls, failed, begun = 0, list[str](), set[FrameType]()
    places = [] if places is None else places

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        if event == "call" and frame in begun:  # a generator goes on: an error here would leave out its "finally"
            return
        begun.add(frame)
        if event in ("call", "c_call", "c_return") and frame.f_code.co_filename.startswith(_OURS):
            calls += 1
            places.append(f"{event} {frame.f_code.co_qualname}:{frame.f_lineno}")
            if calls == number:
                failed.append(f"{places[-1]} {argument}")
                raise Fault(failed[0])

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield failed
    finally:
        sys.setprofile(before)


def calls_of(change: Callable[[], tuple[nn.Module, Engine, Callable[[], Any]]]) -> Iterator[int]:
    """Yield the number of each place's first, second and last call, and one more than there are."""
    places, times = list[str](), Counter[str]()
    _, _, scope = change()
    with fault_at(0, places), agreed("sampling", list[Exception]().append), scope():
        pass
    last = {place: number for number, place in enumerate(places, 1)}
    for number, place in enumerate(places, 1):
        times[place] += 1
        if times[place] <= 2 or number == last[place]:
            yield number
    yield len(places) + 1


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Any]:
    """Return all that a step follows from: values and dtypes, modes, hooks, groups of the optimizer."""
    state: list[Any] = [
        (n, t.dtype, t.detach().clone()) for n, t in [*model.named_parameters(), *model.named_buffers()]
    ]
    state += [(m.training, getattr(m, "bypassed", None)) for m in model.modules()]
    hooks = [*model._forward_pre_hooks.values(), *model._forward_hooks.values()]
    state.append([answer for hook in hooks if (answer := hook(model, (), {})) is not None])
    groups = optimizer.param_groups if optimizer else []
    return state + [{key: value for key, value in group.items() if key != "params"} for group in groups]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return all(map(equal, one, other)) if isinstance(one, (list, tuple)) else one == other


def trained_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return two layers, in training, with gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(), nn.Linear(5, 4)).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def engine_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    engine = Engine(Accelerator(cpu=True), 0)
    engine.optimizer, engine.parameters = optimizer, [*model.parameters()]
    engine._bad_losses, engine._device, engine._on_gpu = torch.zeros(()), CPU, False
    engine._copied, engine.schedule = None, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    engine._is_finite_on_host, engine.after_update = torch.ones((), dtype=torch.bool), lambda is_taken: None
    return engine


def averaged(dtype: torch.dtype) -> tuple[nn.Module, Engine, Callable[[], Any]]:
    model = trained_model(dtype)
    engine = engine_of(model, AdamWScheduleFree(model.parameters(), lr=0.1))
    update_stochastically(engine.optimizer, 0)
    engine.optimizer.train()
    engine.optimizer.step()
    engine.average = WeightAverage([*model.parameters()], 0.5)
    engine.average.averages[0] += 1
    return model, engine, engine.deployed_weights


def exchanged(kind: type[LoRALinear]) -> tuple[nn.Module, Engine, Callable[[], Any]]:
    """Blocks with adapters, most of them swapped, take another model's weights."""

    def blocks(wrap: Callable[[nn.Linear], nn.Module]) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(wrap(nn.Linear(4, 4, bias=False))) for _ in range(3)))

    torch.manual_seed(0)
    model, other = blocks(lambda linear: kind(linear, 2, 2)), blocks(lambda linear: linear)
    for layer in [block[0] for block in model]:
        layer.base.requires_grad_(False)
        layer.initialise(torch.Generator().manual_seed(1))
        layer.lora_B.weight.data.normal_()
    other.requires_grad_(False)
    for layer in [block[0] for block in model] if kind is DoRALinear else []:
        layer.squared_norms *= 1 + 1e-6  # as measured on another device
    rings = swap_blocks(model, [*model], 1, CPU)
    sampled = SampleModel(lambda: copy.deepcopy(other), rings)
    return model, engine_of(model, torch.optim.SGD(model.parameters())), lambda: sampled.in_place(model)


def looked_at() -> tuple[nn.Module, Engine, Callable[[], Any]]:
    """A model samples: in eval mode, its adapter bypassed."""
    model = make_flux(blocks=1)
    network = inject(model)
    model.train()

    @contextmanager
    def sampling() -> Iterator[None]:
        with evaluating(model), network.bypassed():
            yield

    return model, engine_of(model, torch.optim.SGD(network.parameters())), sampling


CHANGES: dict[str, Callable[[], tuple[nn.Module, Engine, Callable[[], Any]]]] = {
    "averages in fp32": lambda: averaged(torch.float32),
    "averages in bf16": lambda: averaged(torch.bfloat16),
    "another model under a LoRA": lambda: exchanged(LoRALinear),
    "another model under a DoRA": lambda: exchanged(DoRALinear),
    "modes": looked_at,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_fault_at_any_call_leaves_the_model_as_it_was_or_ends_the_run(change: str) -> None:
    """The scope's errors are optional, as those of sampling are."""
    stopped, left_out = 0, list[Exception]()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    output = CHANGES[change]()[0](x) if change.startswith("another") else None
    for number in calls_of(CHANGES[change]):
        model, engine, scope = CHANGES[change]()
        before, changed = snapshot(model, engine.optimizer), False
        with fault_at(number) as failed:
            try:
                with agreed("sampling", left_out.append), scope():
                    changed = not equal(snapshot(model, engine.optimizer), before)
            except (NotRestoredError, Fault) as error:  # the run ends: what is trained is saved if it is whole
                stopped += isinstance(error, NotRestoredError)
                if change.startswith("averages") and engine.is_whole:
                    assert equal(snapshot(model), before[: -len(engine.optimizer.param_groups)]), failed
                continue
        assert equal(snapshot(model, engine.optimizer), before), failed
        if failed and output is not None:  # the ring brings what lies at home
            assert torch.equal(model(x), output), failed
    assert changed, "the scope changes something"
    assert not failed, "there is no further call"
    assert len(left_out) > 5, "faults are taken back"
    assert stopped, "some are not"


class Uncounted(torch.optim.SGD):
    """Writes where torch does not count it, as kernels of other packages do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad)


class Replacing(torch.optim.SGD):
    """Puts new tensors into its state before it writes to a weight."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = self.state[parameter].get("sum", 0) + parameter.grad
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(self.state[parameter]["sum"])


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "one by one": lambda weights: torch.optim.AdamW(weights, foreach=False),
    "together": lambda weights: torch.optim.AdamW(weights, foreach=True),
    "fused": lambda weights: torch.optim.AdamW(weights, fused=True),
    "momentum": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9),
    "schedule-free": lambda weights: AdamWScheduleFree(weights, lr=0.1),
    "replacing": lambda weights: Replacing(weights, 0.1),
    "uncounted": lambda weights: Uncounted(weights, 0.1),
}


def failing() -> None:
    raise Fault


class FaultInTorch(TorchFunctionMode):
    """Lets the call ``number`` of torch (from 0) fail before it does anything."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number + 1

    def __torch_function__(self, function: Any, types: Any, given: Any = (), more: Any = None) -> Any:
        self.number -= 1
        if self.number == 0:
            raise Fault(str(function))
        return function(*given, **(more or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_fails_is_taken_back_if_it_wrote_nothing_and_else_nothing_is_saved(kind: str) -> None:
    for number in range(-1, 1000):
        model = trained_model()
        gradients = [parameter.grad for parameter in model.parameters()]
        engine = engine_of(model, KINDS[kind]([*model.parameters()]))
        getattr(engine.optimizer, "train", lambda: None)()
        engine.update(torch.ones(()))
        assert engine.settle()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        before = copy.deepcopy(tree_leaves([snapshot(model), engine.optimizer.state_dict()]))
        if number == -1:  # the step fails at its start
            engine.optimizer.step = failing  # type: ignore[method-assign]
        try:
            with FaultInTorch(number):
                engine.update(torch.ones(()))
        except Fault:
            assert number >= 0 or engine.is_whole == (kind != "uncounted")
            if engine.is_whole:
                assert equal(tree_leaves([snapshot(model), engine.optimizer.state_dict()]), before), number
                assert engine.is_settled
            continue
        break
    assert number > 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fault_at_any_call_of_an_update_leaves_what_may_be_saved_or_says_that_nothing_may(dtype: torch.dtype) -> None:
    number = 0
    while True:
        model = trained_model(dtype)
        engine = engine_of(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        update_stochastically(engine.optimizer, 0)
        before, number = snapshot(model), number + 1
        with fault_at(number) as failed:
            try:
                engine.update(torch.ones(()))
            except (Fault, NotRestoredError):
                assert failed
                assert not engine.is_whole or equal(snapshot(model), before), failed
                continue
        assert not failed, "no error is swallowed"
        assert number > 50
        return
