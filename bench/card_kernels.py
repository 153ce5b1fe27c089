"""Kernels alone, as a step of FLUX.1 at 1024 x 1024 calls them: attention, products, dequantising, rounding.

Each row is the median milliseconds of a call, of forward alone and with its backward, and the relative error of output
and input gradient to fp32. The functions are those that training calls; a kernel that is not there is a row that says
so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.benchmark import Timer

from bench.card_step import relative_error
from bench.measure import reason
from library.nn.attention import KernelName, attend
from library.precision.linear import QuantizedLinear
from library.precision.recipe import scheme_named

SCHEMES = ("row", "block64", "int8_row", "int8_convrot")


def kernels(tiny: bool, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row a kernel."""
    cases = attention_kernels(tiny, device) | products(tiny, device)
    for name, measure in cases.items():
        try:
            yield {"case": name} | measure()
        except Exception as error:  # the others are worth having
            yield {"case": name, "error": reason(error)}


def attention_kernels(tiny: bool, device: torch.device) -> dict[str, Callable[[], dict[str, float]]]:
    """Return kernel -> what measures it: of all tokens, and with a ninth of the keys left out, as padding is."""
    tokens, heads, width = (128, 2, 64) if tiny else (4608, 24, 128)
    random = torch.Generator(device).manual_seed(0)
    made = [torch.randn(1, tokens, heads, width, device=device, generator=random) for _ in range(3)]
    query, key, value = (each.bfloat16() for each in made)
    mask = torch.arange(tokens, device=device)[None] < tokens - tokens // 9

    def measure(backend: KernelName, mask: Tensor | None) -> dict[str, float]:
        def call(q: Tensor) -> Tensor:
            kernel = "math" if q.dtype == torch.float32 else backend
            return attend(q, key.to(q.dtype), value.to(q.dtype), mask=mask, backend=kernel)

        return both_passes(call, query, query.float())

    named = {name: (name, None) for name in get_args(KernelName)} | {"auto, keys masked": ("auto", mask)}
    return {f"attention {name}": lambda given=given: measure(*given) for name, given in named.items()}


def products(tiny: bool, device: torch.device) -> dict[str, Callable[[], dict[str, float]]]:
    """Return product, or part of one -> what measures it: a layer of FLUX.1's MLP, of 12288 x 3072."""
    tokens, inputs, outputs = (64, 128, 256) if tiny else (4608, 3072, 12288)
    random = torch.Generator(device).manual_seed(0)
    weight = torch.randn(outputs, inputs, device=device, generator=random) * inputs**-0.5
    x = torch.randn(tokens, inputs, device=device, generator=random).bfloat16()

    def layer(scheme: str, compute: Any) -> dict[str, float]:
        stored = scheme_named(scheme).quantize(weight)
        one, exact = QuantizedLinear(stored, compute=compute), QuantizedLinear(stored, compute="dequant")
        return both_passes(lambda q: (exact if q.dtype == torch.float32 else one)(q), x, x.float())

    def dequantize(scheme: str) -> dict[str, float]:
        stored = scheme_named(scheme).quantize(weight)
        return {"forward_ms": milliseconds(lambda: stored.dequantize(torch.bfloat16))}

    stored = {torch.float32: weight.bfloat16().float(), torch.bfloat16: weight.bfloat16()}
    found: dict[str, Callable[[], dict[str, float]]] = {
        "product bf16": lambda: both_passes(lambda q: linear(q, stored[q.dtype]), x, x.float())
    }
    for scheme in SCHEMES:
        ways = ["dequant", *(["quantised"] if scheme in ("row", "int8_row", "int8_convrot") else [])]
        found |= {f"product {scheme}, {way}": lambda s=scheme, w=way: layer(s, w) for way in ways}
        found[f"dequantise {scheme}"] = lambda s=scheme: dequantize(s)
    return found


def both_passes(call: Callable[[Tensor], Tensor], x: Tensor, exact: Tensor) -> dict[str, float]:
    """Return the milliseconds of ``call`` without and with its backward, and its errors to ``call`` of ``exact``."""
    x, exact = x.detach().requires_grad_(), exact.detach().requires_grad_()
    upstream = torch.randn_like(call(x))

    def backward(x: Tensor) -> tuple[Tensor, Tensor]:
        x.grad = None
        output = call(x)
        output.backward(upstream.to(output.dtype))
        assert x.grad is not None
        return output.detach(), x.grad

    (output, gradient), (wanted, wanted_gradient) = backward(x), backward(exact)
    with torch.no_grad():
        forward_ms = milliseconds(lambda: call(x))
    return {
        "forward_ms": forward_ms,
        "both_ms": milliseconds(lambda: backward(x)),
        "output_error": relative_error(output.float(), wanted),
        "gradient_error": relative_error(gradient.float(), wanted_gradient),
    }


def milliseconds(call: Callable[[], Any]) -> float:
    """Return how long a call takes: the median of as many as fit into a fifth of a second."""
    return 1e3 * Timer("call()", globals={"call": call}).blocked_autorange().median
