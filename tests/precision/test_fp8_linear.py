"""The fp8 layer against a plain linear layer of the dequantised weight; under DDP and FSDP2 against one process."""

from __future__ import annotations

import copy
import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import library.precision.linear as linear
from library.errors import UserError
from library.precision.files.fp8 import device_has_fp8_matmul
from library.precision.fp8_numbers import E5M2
from library.precision.linear import QuantizedLinear, QuantizedLinearOfHiddenDtype, ddp_ignored_names
from library.precision.names import GRANULARITIES, Granularity
from networks.adapters.lora import LoRALinear
from tests.forked import fork_server
from tests.precision.layers import quantize

OUT, IN = 192, 256


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fp8_layer(granularity: Granularity = "row", bias: bool = True, **options: object) -> QuantizedLinear:
    quantized = quantize(random(OUT, IN, seed=0) * 0.05, granularity)
    return QuantizedLinear(quantized, random(OUT, seed=1) if bias else None, **options)  # type: ignore[arg-type]


def plain(layer: QuantizedLinear, dtype: torch.dtype) -> nn.Linear:
    """A linear layer with the same numbers."""
    reference = nn.Linear(IN, OUT, bias=layer.bias is not None, dtype=dtype)
    reference.requires_grad_(False)
    reference.weight.copy_(layer.dequantized(dtype))
    if layer.bias is not None:
        reference.bias.copy_(layer.bias)
    return reference


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_input_gradient_equal_a_linear_layers(granularity: Granularity, bias: bool) -> None:
    layer = fp8_layer(granularity, bias)
    reference = plain(layer, torch.float32)
    x = random(2, 5, IN, seed=2).requires_grad_()
    gradient = random(2, 5, OUT, seed=3)
    y, expected = layer(x), reference(x)
    (dx,) = torch.autograd.grad(y, x, gradient)
    (expected_dx,) = torch.autograd.grad(expected, x, gradient)
    # fp32 sums of 256 products in another order
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx, expected_dx, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_work_in_chunks_gives_what_work_in_one_gives(granularity: Granularity, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = fp8_layer(granularity)
    x = random(7, IN, seed=2).requires_grad_()
    whole = layer(x)
    (whole_dx,) = torch.autograd.grad(whole.sum(), x)
    monkeypatch.setattr(linear, "_CPU_CHUNK", 1)  # 64 rows, 64 columns
    pieces = layer(x)
    (pieces_dx,) = torch.autograd.grad(pieces.sum(), x)
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pieces_dx, whole_dx, rtol=1e-5, atol=1e-5)


def test_autocast_computes_in_bf16_and_keeps_the_bias_high() -> None:
    layer = fp8_layer()
    x = random(6, IN, seed=2).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    expected = F.linear(x.bfloat16(), layer.dequantized(torch.bfloat16), layer.bias.bfloat16())
    # both sum in fp32 and round once to bf16's 8 bits
    torch.testing.assert_close(y, expected, rtol=2**-8, atol=1e-3)
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_nothing_of_the_weights_size_is_saved_for_backward() -> None:
    layer = fp8_layer("block64")
    saved: list[int] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t)
    with hooks:
        y = layer(random(3, IN, seed=2).requires_grad_())
    assert y.requires_grad
    assert sum(saved) == 0  # not even the activations: a frozen layer's backward needs none
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        nn.Linear(IN, OUT)(random(3, IN, seed=2).requires_grad_())
    assert max(saved) >= OUT * IN  # the hooks do see a plain layer's weight


def test_no_gradient_reaches_weight_or_scale_and_the_bias_gets_its_own_if_asked() -> None:
    layer = fp8_layer()
    layer.bias.requires_grad_(True)
    layer(random(3, IN, seed=2)).sum().backward()
    assert layer.weight.grad is None
    assert torch.equal(layer.bias.grad, torch.full((OUT,), 3.0))


@pytest.mark.parametrize("granularity", ["cast", "tensor", "block64"])
def test_compiled_in_one_graph_it_gives_the_same(granularity: Granularity) -> None:
    model = LoRALinear(fp8_layer(granularity), rank=4, alpha=4.0)
    model.initialise(torch.Generator().manual_seed(3))
    nn.init.normal_(model.lora_B.weight, generator=torch.Generator().manual_seed(4))
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    results = []
    for run in (model, compiled):
        x = random(6, IN, seed=2).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = run(x)
        y.float().square().sum().backward()
        results.append((y, x.grad, run.lora_A.weight.grad))
    for direct, other in zip(*results):
        # bf16 products of pieces and of the whole round alike up to one unit in the last place, the sum of two bf16
        # terms up to two
        torch.testing.assert_close(direct, other, rtol=2**-6, atol=2**-6 * float(direct.detach().abs().max()))


def test_compiled_in_one_graph_where_nothing_before_it_is_trained() -> None:
    layer, x = fp8_layer("tensor"), random(6, IN, seed=2)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    for track in (True, False):  # in training, and in sampling
        with torch.set_grad_enabled(track):
            torch.testing.assert_close(compiled(x), layer(x))


def test_casting_a_model_moves_no_bit_of_codes_and_scales() -> None:
    layer = fp8_layer("row")
    codes, scale = layer.weight.view(torch.uint8).clone(), layer.scale.clone()
    for cast in (lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double(), lambda m: m.to("cpu")):
        cast(layer)
        assert layer.weight.dtype == torch.float8_e4m3fn
        assert torch.equal(layer.weight.view(torch.uint8), codes)
        assert layer.scale.dtype == torch.float32
        assert torch.equal(layer.scale, scale)
    assert layer.bias.dtype == torch.float64  # high precision, cast like any other parameter
    assert layer.to("meta").weight.is_meta


def test_it_is_a_linear_layer_to_others_and_survives_state_dicts_and_copies() -> None:
    layer = fp8_layer("block64")
    assert isinstance(layer, nn.Linear)
    assert (layer.in_features, layer.out_features) == (IN, OUT)
    assert set(layer.state_dict()) == {"weight", "bias", "scale"}
    other = fp8_layer("block64")
    other.weight.view(torch.uint8).zero_()
    other.load_state_dict(layer.state_dict())
    x = random(2, IN, seed=5)
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert "e4m3fn, a scale per 64 inputs, compute=auto" in repr(layer)


def test_a_hidden_weight_reads_as_none_and_works_as_any_other() -> None:
    quantized = quantize(random(OUT, IN, seed=0), "row")
    layer, hidden = QuantizedLinear(quantized), QuantizedLinearOfHiddenDtype(quantized)
    x = random(3, IN, seed=2)
    assert hidden.weight is None
    assert torch.equal(hidden(x), layer(x))
    assert torch.equal(hidden.to(torch.bfloat16)(x), layer(x))
    assert copy.deepcopy(hidden).quantized().values.dtype == torch.float8_e4m3fn


def test_scaled_mm_is_refused_where_the_weight_does_not_suit() -> None:
    with pytest.raises(UserError, match=r"192 x 256 weight \(e4m3fn, a scale per 64 inputs\) cannot be multiplied as"):
        fp8_layer("block64", compute="quantised")
    with pytest.raises(UserError, match=r"e5m2, one scale a tensor\) cannot"):
        QuantizedLinear(quantize(random(16, 16, seed=0), "tensor", E5M2), compute="quantised")


def test_frozen_parameters_and_buffers_are_named_for_ddp() -> None:
    model = nn.Sequential(LoRALinear(fp8_layer(), rank=2, alpha=2.0))
    model[0].base.requires_grad_(False)
    assert sorted(ddp_ignored_names(model)) == sorted(["0.base.weight", "0.base.bias", "0.base.scale"])


TALL, WIDE = 48, 64


def layers(granularity: Granularity) -> tuple[QuantizedLinear, QuantizedLinear, torch.Tensor]:
    torch.manual_seed(0)
    quantized, bias = quantize(torch.randn(TALL, WIDE) * 0.05, granularity), torch.randn(TALL)
    exact = QuantizedLinear(quantized, bias, compute="dequant")
    rounded = QuantizedLinear(quantized, bias, compute="quantised")
    return exact, rounded, torch.randn(3, 8, WIDE, dtype=torch.bfloat16)


def relative(error: torch.Tensor, reference: torch.Tensor) -> float:
    return float(error.float().norm() / reference.float().norm())


@pytest.mark.parametrize("granularity", ["cast", "tensor", "row"])
def test_fp8_products_differ_from_dequantised_ones_by_the_rounding_of_activations(granularity: Granularity) -> None:
    exact, rounded, x = layers(granularity)
    results = []
    for layer in (exact, rounded):
        own = x.clone().requires_grad_()
        y = layer(own)
        y.backward(torch.ones_like(y) + y.detach())
        assert y.dtype == torch.bfloat16
        results.append((y.detach(), own.grad))
    # e4m3 has 3 mantissa bits: an rms rounding error of 2.6 %; another 0.3 % from bf16
    assert 0.005 < relative(results[1][0] - results[0][0], results[0][0]) < 0.035
    # the gradient differs since y does
    assert relative(results[1][1] - results[0][1], results[0][1]) < 0.05


@pytest.mark.parametrize("granularity", ["cast", "tensor", "row"])
def test_with_activations_that_fp8_can_hold_the_product_is_exact(granularity: Granularity) -> None:
    """Rows whose largest value is 448 have scale 1, so integers up to 16 pass through unrounded."""
    exact, rounded, _ = layers(granularity)
    x = torch.randint(-16, 17, (8, WIDE), generator=torch.Generator().manual_seed(1)).float()
    x[:, 0] = 448
    expected = exact(x)
    torch.testing.assert_close(rounded(x), expected, rtol=1e-5, atol=1e-4)  # fp32 sums in two orders


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 2e-2)])
def test_the_product_is_as_exact_as_the_activations_dtype(dtype: torch.dtype, digits: float) -> None:
    """fp32 activations (mixed_precision "no") are not cut down to bf16 on the way out; 1 + 2^-9 has more bits."""
    weight = quantize(torch.ones(16, 16), "cast")
    x = torch.zeros(16, 16, dtype=dtype)
    x[:, 0], x[:, 1] = 1.0, 2.0**-9  # fp8 has both, once the row is scaled by 448
    out = weight.product(x)
    assert out.dtype == dtype
    assert float((out.double() - 1 - 2.0**-9).abs().max()) <= digits


def test_auto_takes_the_dequantising_path_on_a_cpu() -> None:
    assert not device_has_fp8_matmul(torch.device("cpu"))
    exact, rounded, x = layers("row")
    rounded.set_compute("auto")
    assert torch.equal(rounded(x), exact(x))


WORLD, WIDTH = 2, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)  # FSDP2 groups need a dtype that gloo knows beside fp8
        self.linears = nn.ModuleList()
        for granularity in ("cast", "row", "block64"):
            weight = torch.randn(WIDTH, WIDTH, generator=random) * 0.1
            base = QuantizedLinear(quantize(weight, granularity), torch.randn(WIDTH, generator=random))
            lora = LoRALinear(base, rank=4, alpha=4.0)
            lora.initialise(random)
            nn.init.normal_(lora.lora_B.weight, generator=random)
            self.linears.append(lora)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora_" in name)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.linears:
            x = x + layer(self.norm(x))
        return x


def batch() -> Tensor:
    return torch.randn(WORLD * 3, WIDTH, generator=torch.Generator().manual_seed(9))


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model(x).square().mean().backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            gradient = parameter.grad
            found[name.removeprefix("module.")] = (
                gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            )
    return found


def work(rank: int, folder: str) -> None:
    """Both kinds in one process: starting it takes longer than everything else."""
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", store, datetime.timedelta(seconds=60), WORLD, rank)
    try:
        for kind in ("ddp", "fsdp2"):
            model: nn.Module = Block()
            if kind == "ddp":
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ddp_ignored_names(model))
                model = DistributedDataParallel(model)
            else:
                fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (WORLD,)))
            found = gradients(model, batch().chunk(WORLD)[rank])
            if rank == 0:
                torch.save(found, Path(folder) / f"{kind}.pt")
    finally:
        dist.destroy_process_group()


def test_two_processes_under_ddp_and_fsdp2_give_the_gradients_of_one(tmp_path: Path) -> None:
    fork_server()
    torch.multiprocessing.start_processes(work, (str(tmp_path),), nprocs=WORLD, start_method="forkserver")
    expected = gradients(Block(), batch())
    for kind in ("ddp", "fsdp2"):
        found = torch.load(tmp_path / f"{kind}.pt")
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            # fp32 means over two halves instead of the whole
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
