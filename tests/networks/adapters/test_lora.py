"""LoRALinear against its formula in float64, against peft, and under autocast, checkpointing and compile."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from peft import LoraConfig
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from library.nn.frozen_linear import has_input_gradient, project_recomputed, project_together
from library.precision.linear import QuantizedLinear
from networks.adapters.lora import LoRALinear, init_pissa
from networks.options import Dropouts
from tests.networks.adapters.test_adapter_layers import peft_layer
from tests.precision.layers import quantize


def make_layer(
    out_features: int = 6, rank: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64, **options: Dropouts
) -> LoRALinear:
    rng = torch.Generator().manual_seed(seed)
    base = nn.Linear(5, out_features, dtype=dtype).requires_grad_(False)
    layer = LoRALinear(base, rank, 2.0, dtype=dtype, **options)
    with torch.no_grad():
        for tensor in (base.weight, base.bias, layer.lora_A.weight, layer.lora_B.weight):
            tensor.normal_(generator=rng)
    return layer


def make_input(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9)).to(dtype).requires_grad_()


def by_formula(layer: LoRALinear, x: Tensor) -> Tensor:
    delta = layer.alpha / layer.rank * layer.lora_B.weight @ layer.lora_A.weight
    return x @ (layer.base.weight + layer.multiplier * delta).T + layer.base.bias


def gradients(y: Tensor, *wanted: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum(), wanted))


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 7, 5), (2, 3, 4, 5)])
def test_output_and_gradients_follow_the_formula(shape: tuple[int, ...]) -> None:
    layer, x = make_layer(), make_input(*shape)
    layer.multiplier = 0.7
    expected, got = by_formula(layer, x), layer(x)
    torch.testing.assert_close(got, expected)
    wanted = (x, layer.lora_A.weight, layer.lora_B.weight)
    torch.testing.assert_close(gradients(got, *wanted), gradients(expected, *wanted))
    assert layer.base.weight.grad is None


def test_initialised_layer_equals_its_base_and_is_kaiming_uniform_below_one_over_root_in() -> None:
    layer = LoRALinear(nn.Linear(400, 6), 50, 1.0)
    layer.initialise(torch.Generator().manual_seed(0))
    x = torch.randn(3, 400)
    assert torch.equal(layer(x), layer.base(x))
    bound = 400**-0.5  # kaiming_uniform(a=sqrt(5)): sqrt(6 / ((1 + 5) * in))
    assert layer.lora_A.weight.abs().max() <= bound
    assert layer.lora_A.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)  # 20,000 draws: error of 0.5 %


def test_building_a_layer_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    base = nn.Linear(5, 6)
    state = torch.get_rng_state()
    LoRALinear(base, 3, 1.0).initialise(torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), state)


OPTIONS = {"plain": {}, "dropouts": {"dropouts": Dropouts(0.3, 0.4, 0.5)}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_projecting_together_equals_projecting_separately(options: dict[str, Dropouts]) -> None:
    layers = [make_layer(6, 3, 1, **options), make_layer(6, 2, 2, **options), make_layer(4, 3, 3, **options)]
    mixed = [layers[0], nn.Linear(5, 3, dtype=torch.float64), *layers[1:]]
    x = make_input(2, 7, 5)
    wanted = (x, *(p for layer in layers for p in (layer.lora_A.weight, layer.lora_B.weight)))
    for seed in range(4):  # several draws, so that module dropout is seen both ways
        torch.manual_seed(seed)
        together = project_together(mixed, x)
        torch.manual_seed(seed)
        separate = [layer(x) for layer in mixed]
        torch.testing.assert_close(together, separate)
        torch.testing.assert_close(
            gradients(torch.cat(together, -1), *wanted), gradients(torch.cat(separate, -1), *wanted)
        )


def test_rank_dropout_zeroes_ranks_per_sample_and_rescales() -> None:
    layer = make_layer(rank=3, dropouts=Dropouts(of_ranks=0.5))
    x = make_input(2, 4, 5)
    torch.manual_seed(0)
    kept = (torch.rand(2, 3) > 0.5).double()
    torch.manual_seed(0)
    low = (x @ layer.lora_A.weight.T) * kept[:, None]
    expected = layer.base(x) + layer.alpha / 3 / 0.5 * low @ layer.lora_B.weight.T
    torch.testing.assert_close(layer(x), expected)


def test_module_dropout_switches_the_whole_layer_off_without_rescaling() -> None:
    layer, x = make_layer(dropouts=Dropouts(of_module=0.5)), make_input(2, 4, 5)
    seen = set()
    for seed in range(8):
        torch.manual_seed(seed)
        dropped = bool(torch.rand(()) < 0.5)
        torch.manual_seed(seed)
        torch.testing.assert_close(layer(x), layer.base(x) if dropped else by_formula(layer, x))
        seen.add(dropped)
    assert seen == {True, False}


def test_neuron_dropout_acts_on_the_down_projection() -> None:
    layer, x = make_layer(dropouts=Dropouts(0.5)), make_input(2, 4, 5)
    torch.manual_seed(3)
    low = nn.functional.dropout(x @ layer.lora_A.weight.T, 0.5)
    torch.manual_seed(3)
    torch.testing.assert_close(layer(x), layer.base(x) + layer.alpha / 3 * low @ layer.lora_B.weight.T)


def test_nothing_is_dropped_in_eval_mode() -> None:
    layer, x = make_layer(dropouts=Dropouts(0.5, 0.5, 0.9)).eval(), make_input(2, 4, 5)
    torch.testing.assert_close(layer(x), by_formula(layer, x))


def test_fp32_weights_under_bf16_autocast_compute_in_bf16_and_learn_in_fp32() -> None:
    layer = make_layer(dtype=torch.float32)
    layer.base.to(torch.bfloat16)
    x = make_input(2, 7, 5, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    exact = by_formula(copy.deepcopy(layer).double(), x.double())
    # bf16 has 8 significant bits; inputs, weights and the low-rank product are each rounded once
    torch.testing.assert_close(y.double(), exact, rtol=0.02, atol=0.05)
    y.float().sum().backward()
    assert layer.lora_A.weight.grad is not None
    assert layer.lora_A.weight.grad.dtype == torch.float32


def test_fp32_lora_on_a_bf16_base_works_without_autocast() -> None:
    layer = make_layer(dtype=torch.float32)
    layer.base.to(torch.bfloat16)
    assert layer(make_input(2, 5, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_pure_bf16_stays_bf16() -> None:
    layer = make_layer(dtype=torch.bfloat16)
    layer(make_input(2, 5, dtype=torch.bfloat16)).sum().backward()
    assert layer.lora_B.weight.grad is not None
    assert layer.lora_B.weight.grad.dtype == torch.bfloat16


def test_autocast_casts_the_input_once_for_base_and_lora() -> None:
    layers = [make_layer(6, 3, s, dtype=torch.float32) for s in range(3)]
    for layer in layers:
        layer.base.to(torch.bfloat16)
    x = make_input(2, 7, 5, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.profiler.profile(record_shapes=True) as profile:
        project_together(layers, x)
    casts = [e for e in profile.events() if e.name == "aten::_to_copy" and e.input_shapes[0] == [2, 7, 5]]
    assert len(casts) == 1


class Block(nn.Module):
    """Three projections of one input and one of their sum."""

    def __init__(self, **options: Dropouts) -> None:
        super().__init__()
        self.q, self.k, self.v = (make_layer(5, 2, s, torch.float32, **options) for s in range(3))
        self.out = make_layer(5, 3, 4, torch.float32, **options)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = project_together([self.q, self.k, self.v], x)
        return x + self.out(torch.tanh(q) * k + v)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_checkpointing_gives_the_same_gradients(options: dict[str, Dropouts]) -> None:
    block, x = Block(**options), make_input(2, 7, 5, dtype=torch.float32)
    wanted = (x, *(p for p in block.parameters() if p.requires_grad))
    torch.manual_seed(0)
    expected = gradients(block(x), *wanted)
    torch.manual_seed(0)
    got = gradients(checkpoint(block, x, use_reentrant=False), *wanted)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_block_compiles_as_one_graph_with_the_same_result(options: dict[str, Dropouts]) -> None:
    block, x = Block(**options), make_input(2, 7, 5, dtype=torch.float32)
    wanted = (x, *(p for p in block.parameters() if p.requires_grad))
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            torch.manual_seed(0)
            got = compiled(x)
            torch.manual_seed(0)
            expected = block(x)
        # fp32 sums in the same order; in bf16 the update is rounded (2**-8 of it) before it is added
        rounding = 2**-7 * float(expected.detach().abs().max())
        tolerance = {"rtol": 2**-7, "atol": rounding} if autocast else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(got, expected, **tolerance)
        if not autocast:
            torch.testing.assert_close(gradients(got, *wanted), gradients(expected, *wanted), **tolerance)


def test_no_sum_of_a_compiled_block_can_become_an_addmm_that_copies_it_first() -> None:
    """TorchInductor makes addmm of a product that is added as it is; out of place, addmm begins with a copy."""
    graphs: list[torch.fx.Graph] = []

    def record(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    block, x = Block(), make_input(2, 7, 5, dtype=torch.float32)
    compiled = torch.compile(block, backend=aot_autograd(fw_compiler=record), fullgraph=True)
    gradients(compiled(x), x)
    ops, products = torch.ops.aten, 0
    for node in (node for graph in graphs for node in graph.nodes):
        products += node.target is ops.mm.default
        first = node.args[0].meta["val"] if node.target is ops.addmm.default else None
        assert first is None or first.ndim == 1  # a bias
        if node.target in (ops.add.Tensor, ops.add_.Tensor):
            assert all(getattr(term, "target", None) is not ops.mm.default for term in node.args)
    assert len(graphs) == 2
    assert products >= 12  # so many has the backward pass


def test_weight_bias_and_features_are_those_of_the_base() -> None:
    layer = make_layer()
    assert layer.weight is layer.base.weight
    assert layer.bias is layer.base.bias
    assert (layer.in_features, layer.out_features) == (5, 6)
    assert "rank=3, alpha=2" in repr(layer)


def _norm_and_modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


def _layers(dtype: torch.dtype, fp8: bool = False) -> list[LoRALinear]:
    torch.manual_seed(0)
    layers = []
    for out, rank, alpha in ((24, 4, 2.0), (16, 3, 5.0), (40, 8, 8.0)):
        base: nn.Module = nn.Linear(32, out).requires_grad_(False).to(dtype)
        if fp8:
            base = QuantizedLinear(quantize(base.weight, "row"), base.bias)  # type: ignore[arg-type]
        layer = LoRALinear(base, rank, alpha)
        nn.init.normal_(layer.lora_A.weight)
        nn.init.normal_(layer.lora_B.weight)
        layers.append(layer)
    return layers


def _plain(layers: list[LoRALinear], x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    x = x.to(dtype)
    return [
        F.linear(F.linear(x, layer.lora_A.weight.to(dtype)), layer.lora_B.weight.to(dtype)) * layer.scale
        + layer.base(x)
        for layer in layers
    ]


def _gradients(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    random = torch.Generator().manual_seed(3)
    loss = sum((out.float() * torch.randn(out.shape, generator=random)).sum() for out in outputs)
    return [*(out.detach().float() for out in outputs), *torch.autograd.grad(loss, leaves)]  # type: ignore[arg-type]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_outputs_and_all_gradients_are_those_of_the_plain_form(autocast: bool, fp8: bool) -> None:
    layers = _layers(torch.bfloat16 if autocast and not fp8 else torch.float32, fp8)
    inputs = [torch.randn(2, 5, 32), torch.randn(2, 1, 32), torch.randn(2, 1, 32)]
    for tensor in inputs:
        tensor.requires_grad_()
    weights = [p for layer in layers for p in (layer.lora_A.weight, layer.lora_B.weight)]
    dtype = torch.bfloat16 if autocast else torch.float32
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = project_recomputed(layers, _norm_and_modulate, *inputs)
        plain = _plain(layers, _norm_and_modulate(*inputs), dtype)
    assert all(out.dtype == dtype for out in ours)
    for a, b in zip(_gradients(ours, [*inputs, *weights]), _gradients(plain, [*inputs, *weights]), strict=True):
        # bf16: a handful of roundings of 2^-9 each, in another order; fp32: sums in another order
        assert (a - b).norm() <= (2e-2 if autocast else 2e-6) * b.norm()


def test_only_the_inputs_of_make_and_low_rank_products_are_kept() -> None:
    layers = _layers(torch.float32)
    inputs = [torch.randn(2, 500, 32, requires_grad=True), torch.randn(2, 1, 32), torch.randn(2, 1, 32)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        project_recomputed(layers, _norm_and_modulate, *inputs)
    known = {t.data_ptr() for t in (*inputs, *(p for layer in layers for p in layer.parameters()))}
    assert [tuple(t.shape) for t in kept if t.data_ptr() not in known] == [(1000, 4 + 3 + 8)]


def test_inputs_that_need_no_gradient_get_none_and_the_update_still_learns() -> None:
    (layer, *_) = _layers(torch.float32)
    layer(torch.randn(3, 32)).sum().backward()
    assert layer.lora_A.weight.grad is not None
    assert layer.lora_B.weight.grad is not None


def test_what_cannot_be_fused_takes_the_plain_way() -> None:
    class Strange(nn.Module):
        in_features = out_features = 8

        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    assert not has_input_gradient(Strange())
    layer = LoRALinear(Strange(), 2, 2)
    layer.initialise(torch.Generator().manual_seed(0))
    x = torch.randn(3, 8)
    assert torch.equal(project_recomputed([layer], torch.relu, x)[0], 2 * x.relu())
    assert torch.equal(project_recomputed([nn.Identity()], torch.relu, x)[0], x.relu())


def plain_layer(out_features: int = 40, in_features: int = 24) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(in_features, out_features).requires_grad_(False)


def begun(base: nn.Module, rslora: bool = False) -> LoRALinear:
    layer = LoRALinear(base, 4, 3.0, rank_stabilised=rslora)
    init_pissa(layer, "inner", torch.Generator().manual_seed(0))
    return layer


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_it_begins_and_learns_as_pefts(shape: tuple[int, int], rslora: bool) -> None:
    base = plain_layer(*shape)
    ours = begun(base, rslora)
    config = LoraConfig(r=4, lora_alpha=3.0, init_lora_weights="pissa", use_rslora=rslora, target_modules=["inner"])
    theirs = peft_layer(config, base)
    parameters = theirs.lora_A["default"].weight, theirs.lora_B["default"].weight
    own = ours.lora_A.weight, ours.lora_B.weight
    # singular vectors have a sign of their own: the products have none
    start_product = parameters[1] @ parameters[0]
    torch.testing.assert_close(own[1] @ own[0], start_product, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own[0].abs(), parameters[0].abs(), rtol=1e-3, atol=1e-4)
    for mine, other in zip(own, parameters, strict=True):  # the same signs, then a step of training
        mine.data.copy_(other)
    ours.start.A.copy_(parameters[0].data)
    ours.start.B.copy_(parameters[1].data)
    x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        outputs = ours(x), theirs(x)
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)  # fp32, W - c B A against W and - c B A
        for out in outputs:
            out.square().sum().backward()
        for mine, other in zip(own, parameters, strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-3)  # gradients of size 10
            for parameter in (mine, other):
                parameter.data -= 1e-3 * parameter.grad
                parameter.grad = None


def test_a_layer_begins_as_its_base_and_its_file_is_a_plain_lora() -> None:
    base = plain_layer()
    layer = begun(base)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(layer(x), base(x), rtol=1e-5, atol=1e-5)  # B A - B_0 A_0 cancels in fp32
    with torch.no_grad():
        layer.lora_B.weight += 0.1
    weights = layer.weights()
    assert (weights.rank, weights.alpha) == (8, 6.0)
    expected = x @ (base.weight + weights.delta()).t() + base.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_an_fp8_base_is_decomposed_as_the_weight_it_stands_for() -> None:
    base = plain_layer()
    fp8 = QuantizedLinear(quantize(base.weight, "row"), base.bias.data)
    high = copy.deepcopy(base)
    high.weight.data = fp8.dequantized(torch.float32)
    assert torch.equal(begun(fp8).lora_A.weight, begun(high).lora_A.weight)
