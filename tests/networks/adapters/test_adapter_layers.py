"""DoRA, LoKr and LoHa against peft's layers, and what all kinds share."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from library.nn.frozen_linear import FrozenLinear, project_recomputed, project_together
from library.precision.linear import QuantizedLinear
from networks.adapters.base import AdapterLinear
from networks.adapters.lora import DoRALinear, LoRALinear
from networks.network import make_layer
from networks.options import NetworkOptions
from tests.precision.layers import quantize

KINDS = ["dora", "lokr", "loha"]
IN, OUT, RANK, ALPHA = 24, 32, 4, 3.0


def linear(seed: int = 0) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(IN, OUT).requires_grad_(False)


def make(kind: str, base: nn.Module | None = None, trained: bool = True, **options: object) -> AdapterLinear:
    """Return a layer; ``trained`` gives all its parameters values."""
    options = {"dim": RANK, "alpha": ALPHA, "kind": kind} | options
    layer = make_layer(base or linear(), options["dim"], NetworkOptions(**options), torch.float32)
    layer.initialise(torch.Generator().manual_seed(1))
    if trained:
        rng = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in layer.trained().values():
                parameter += 0.2 * torch.randn(parameter.shape, generator=rng)
    return layer


def inputs(rows: int = 6) -> Tensor:
    return torch.randn(2, rows, IN, generator=torch.Generator().manual_seed(3))


class _Holder(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner


def peft_layer(config: object, base: nn.Linear) -> nn.Module:
    holder = _Holder(copy.deepcopy(base))
    inject_adapter_in_model(config, holder)
    return holder.inner


@pytest.mark.parametrize("kind", KINDS)
def test_an_untrained_layer_is_its_base(kind: str) -> None:
    layer = make(kind, trained=False)
    x = inputs()
    # loha and lokr add zeros, lengths over themselves round once: fp32
    torch.testing.assert_close(layer(x), layer.base(x), rtol=1e-6, atol=1e-6)
    trained = make(kind)
    assert (trained(x) - trained.base(x)).abs().max() > 0.05


def grads(layer: nn.Module, x: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x)
    (out * torch.linspace(-1, 1, OUT)).sum().backward()
    return out.detach(), {name: p.grad for name, p in parameters.items()}, x.grad


@pytest.mark.parametrize("rslora", [False, True])
def test_dora_is_pefts_forward_and_backward(rslora: bool) -> None:
    ours = make("dora", rank_stabilised=rslora)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, use_dora=True, use_rslora=rslora, target_modules=["inner"])
    theirs = peft_layer(config, ours.base)
    own = ours.trained()
    parameters = {
        "lora_A.weight": theirs.lora_A["default"].weight,
        "lora_B.weight": theirs.lora_B["default"].weight,
        "magnitude": theirs.lora_magnitude_vector["default"].weight,
    }
    for name, parameter in parameters.items():
        parameter.data.copy_(own[name])
    results = [grads(layer, inputs(), p) for layer, p in ((ours, own), (theirs, parameters))]
    # fp32, lengths by two formulas: measured 1e-6 relative
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("factor", "both", "rank"), [(-1, False, 2), (-1, False, 8), (2, True, 1), (4, True, 1)])
def test_lokr_is_pefts_forward_and_backward(factor: int, both: bool, rank: int) -> None:
    ours = make("lokr", dim=rank, factor=factor, decompose_both=both)
    config = LoKrConfig(r=rank, alpha=ALPHA, decompose_factor=factor, decompose_both=both, target_modules=["inner"])
    theirs = peft_layer(config, ours.base)
    own = ours.trained()
    if {"lokr_w1", "lokr_w2"} == own.keys():  # LyCORIS and ComfyUI leave alpha out where neither is a product
        theirs.scaling["default"] = 1.0
    parameters = {name: getattr(theirs, name)["default"] for name in own}
    for name, parameter in parameters.items():
        parameter.data.copy_(own[name])
    results = [grads(layer, inputs(), p) for layer, p in ((ours, own), (theirs, parameters))]
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)  # fp32 sums in another order


SIZES = [(24, 32), (32, 24), (30, 30), (7, 36), (36, 1)]


@pytest.mark.parametrize(("columns", "rows"), SIZES)
@pytest.mark.parametrize("options", [{"full_matrix": True}, {"dim": 1}, {"dim": 1, "decompose_both": True}])
@pytest.mark.parametrize("factor", [-1, 1, 4, 5])
def test_lokr_is_the_kronecker_product_of_its_file(columns: int, rows: int, options: dict, factor: int) -> None:
    """Forward and all gradients against the [out, in] matrix in float64, whichever product comes first."""
    layer = make("lokr", nn.Linear(columns, rows).requires_grad_(False), factor=factor, **options).double()
    own = layer.trained()
    assert layer.is_full == ({"lokr_w1", "lokr_w2"} == own.keys())
    assert layer.is_full or "full_matrix" not in options
    x = torch.randn(2, 5, columns, dtype=torch.float64, requires_grad=True)
    sides = [own[n] if n in own else own[f"{n}_a"] @ own[f"{n}_b"] for n in ("lokr_w1", "lokr_w2")]
    assert len(sides[0]) <= len(sides[1])
    update = torch.kron(*sides) * (1 if layer.is_full else ALPHA / layer.rank)
    expected = nn.functional.linear(x, layer.base.weight + update, layer.base.bias)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), [x, *own.values()])
    found = layer(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), [x, *own.values()]), wanted)


def test_a_full_lokr_saves_its_input_alone() -> None:
    """As large as x, w1 x is made again in backward: a LoRA saves x too, and little besides."""
    saved = {}
    for kind, options in (("lokr", {"full_matrix": True, "factor": 4}), ("lora", {})):
        layer, x, kept = make(kind, FrozenLinear.adopt(linear()), **options), inputs(512).requires_grad_(), set[int]()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.add(t.numel()) or t, lambda t: t):
            layer(x)
        saved[kind] = max(kept), sum(size for size in kept if size > IN * OUT)
    assert saved["lokr"] == (x.numel(), x.numel())
    assert saved["lora"][0] == x.numel()


@pytest.mark.parametrize("kind", ["lokr", "loha"])
def test_layers_with_a_common_input_keep_one_cast_of_it(kind: str) -> None:
    """Under autocast q, k and v would each save their own copy of it in bf16."""
    layers, kept = [make(kind, FrozenLinear.adopt(linear(seed)), factor=4) for seed in range(3)], dict[int, int]()
    x = inputs(512).requires_grad_()
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t.numel()) and t, lambda t: t),
    ):
        outputs = project_together(layers, x)
    assert [*kept.values()].count(x.numel()) == 1
    assert len(outputs) == 3


def test_loha_is_pefts_forward_and_backward() -> None:
    ours = make("loha")
    theirs = peft_layer(LoHaConfig(r=RANK, alpha=ALPHA, target_modules=["inner"]), ours.base)
    own = ours.trained()
    parameters = {name: getattr(theirs, name)["default"] for name in own}
    for name, parameter in parameters.items():
        parameter.data.copy_(own[name])
    results = [grads(layer, inputs(), p) for layer, p in ((ours, own), (theirs, parameters))]
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_fp8_base_is_adapted_as_the_weight_it_stands_for(kind: str) -> None:
    base = linear()
    fp8 = QuantizedLinear(quantize(base.weight, "row"), base.bias.data)
    high = copy.deepcopy(base)
    high.weight.data = fp8.dequantized(torch.float32)
    x = inputs()
    # the same numbers multiplied in pieces: fp32 sums in another order
    torch.testing.assert_close(make(kind, fp8)(x), make(kind, high)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_autocast_is_near_fp32_and_trains_fp32_parameters(kind: str) -> None:
    base = linear()
    half = copy.deepcopy(base).to(torch.bfloat16)
    expected = make(kind, base)(inputs())
    layer = make(kind, half)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(inputs())
    assert out.dtype == torch.bfloat16
    # bf16 has 8 bits: 2^-8 of each of 24 products, outputs up to 5
    torch.testing.assert_close(out.float(), expected, rtol=0.03, atol=0.06)
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.trained().values())


@pytest.mark.parametrize("kind", ["lora", *KINDS])
def test_layers_with_a_common_input_are_run_as_if_alone(kind: str) -> None:
    layers = [make(kind, linear(seed)) for seed in range(3)]
    x = inputs()
    # one product over stacked factors where the kind has them: fp32 sums in another order
    torch.testing.assert_close(project_together(layers, x), [layer(x) for layer in layers], rtol=1e-5, atol=1e-5)
    made = project_recomputed(layers, torch.tanh, x)
    torch.testing.assert_close(made, [layer(torch.tanh(x)) for layer in layers], rtol=1e-5, atol=1e-5)


def test_kinds_do_not_share_a_product() -> None:
    """A mixed group (a DoRA among LoRAs) is split by type: each is what it is alone."""
    layers = [make("lora"), make("dora"), make("lora")]
    together = project_together(layers, inputs())
    torch.testing.assert_close(together, [layer(inputs()) for layer in layers], rtol=1e-5, atol=1e-5)
    assert isinstance(layers[1], DoRALinear)
    assert isinstance(layers[0], LoRALinear)
