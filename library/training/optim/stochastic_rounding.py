"""Training bf16 weights with any optimizer: step in fp32, write back with stochastic rounding.

A bf16 number has 8 significant bits: an update smaller than 1/512 of a weight is rounded away, and at the
learning rates LoRAs are trained with nearly every update is. Stochastic rounding rounds up with a
probability equal to the distance from the lower neighbour, so that the expected value of what is stored is
the exact value, and small updates add up on average (Zamirai et al. 2020, "Revisiting BFloat16 Training",
arXiv 2010.06192).

How it is put into any ``torch.optim.Optimizer``, ours or third-party, without touching its code: around
``step`` an fp32 copy stands in the place of each bf16 weight and gradient, the optimizer steps as if it were
training fp32 weights, and the copies are rounded into the original bf16 storage. Weights have the same storage
before and after, so DDP, compiled graphs and fused kernels do not notice. (Hooks of torch's would do, but none
is called after a ``step`` that raises an error: then the copies are dropped, and the weights are those before it.)

What it costs: the optimizer's state is fp32, as for fp32 weights (Adam's second moment could not decay in
bf16 anyway: beta2 = 0.999 changes it by less than half a unit in the last place). While ``step`` runs, 4
bytes for each weight and 4 for each gradient are held besides; no activations live at that time, so the peak
of a training step does not rise. Kept over fp32 LoRA weights: 2 bytes a weight and 2 a gradient saved, and a
bf16 backward pass.

The random bits are a function of (seed, number of the step, position of the weight among all) and of
nothing else: every process rounds its replica alike, and a resumed run goes on with the same bits, since the
step number is kept in the parameter groups and so in the optimizer's state dict. (CPU and CUDA generators
give different bits.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from library.errors import undone
from library.randomness import derive_seed

STEP_KEY = "stochastic_rounding_step"  # in every parameter group: the number of updates written so far
_CHUNK = 1 << 24  # weights rounded by one kernel launch: 64 MiB of fp32, and launches stay few for a thousand LoRAs


def round_stochastically(values: Tensor, random: torch.Generator) -> Tensor:
    """Round fp32 ``values`` to bf16, up or down with the probability that keeps the expected value.

    bf16 is the upper half of an fp32 number. Adding 16 random bits to the lower half carries into the upper
    half with just that probability; then the lower half is cut off. Works on the magnitude, so on both signs
    alike, and on denormals. NaN and infinity are kept.
    """
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=values.device, generator=random)
    rounded = (noise.add_(bits) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isfinite(), rounded, values.to(torch.bfloat16))


@contextmanager
def weights_in_float32(
    parameters: Sequence[torch.nn.Parameter], randomness: tuple[int, int] | None = None, with_gradients: bool = False
) -> Iterator[None]:
    """Hold bf16 ``parameters`` in fp32 inside the block, ``with_gradients`` their gradients too.

    After it they are rounded into their own storage: stochastically for ``randomness``, (seed, step), else to nearest.
    After an error weights and gradients are as they were; one in rounding may leave some of them rounded.

    Raises:
        NotRestoredError: the fp32 copies could not be taken away.
    """
    parameters = [p for p in parameters if p.dtype == torch.bfloat16]
    weights, gradients = [p.data for p in parameters], [p.grad for p in parameters]
    present = [i for i, gradient in enumerate(gradients) if gradient is not None and with_gradients]
    # what needs memory comes before the first change
    wide, wide_gradients = _widen(weights), _widen([gradients[i] for i in present])  # type: ignore[misc]

    def put_back() -> None:
        for parameter, weight, gradient in zip(parameters, weights, gradients, strict=True):
            parameter.grad = None  # torch refuses a gradient of another dtype than its weight's
            parameter.data = weight
            parameter.grad = gradient

    with undone("the fp32 copies of the weights", put_back):
        for parameter, value in zip(parameters, wide, strict=True):
            parameter.grad = None
            parameter.data = value
        for i, gradient in zip(present, wide_gradients, strict=True):
            parameters[i].grad = gradient
        yield
        with torch.no_grad():
            wide = [parameter.data for parameter in parameters]
            if randomness is not None:
                _round_into(weights, wide, *randomness)
            else:
                for weight, value in zip(weights, wide, strict=True):
                    weight.copy_(value)


def update_stochastically(optimizer: Optimizer, seed: int) -> None:
    """Make ``optimizer.step()`` update its bf16 weights in fp32 and round them stochastically."""
    step = optimizer.step

    def rounded_step(_optimizer: Optimizer, *arguments: Any, **more: Any) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        number = optimizer.param_groups[0][STEP_KEY]
        with weights_in_float32(parameters, (seed, number), with_gradients=True):
            result = step(*arguments, **more)
        for group in optimizer.param_groups:
            group[STEP_KEY] = number + 1
        return result

    for group in optimizer.param_groups:
        group[STEP_KEY] = 0
    optimizer.step = MethodType(rounded_step, optimizer)  # type: ignore[method-assign]


def _widen(tensors: list[Tensor]) -> list[Tensor]:
    """Return fp32 copies of ``tensors``."""
    wide = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    if wide:
        torch._foreach_copy_(wide, tensors)
    return wide


def _round_into(targets: list[Tensor], values: list[Tensor], seed: int, step: int) -> None:
    """Round fp32 ``values`` stochastically into bf16 ``targets``, many small tensors at a time."""
    for number, chunk in enumerate(_chunks(values)):
        device = values[chunk[0]].device
        random = torch.Generator(device).manual_seed(derive_seed(seed, "stochastic rounding", step, number))
        flat = torch.cat([values[i].reshape(-1) for i in chunk])
        pieces = round_stochastically(flat, random).split([values[i].numel() for i in chunk])
        torch._foreach_copy_(
            [targets[i] for i in chunk],
            [piece.view(targets[i].shape) for i, piece in zip(chunk, pieces, strict=True)],
        )


def _chunks(tensors: list[Tensor]) -> Iterator[list[int]]:
    """Yield runs of indices whose tensors lie on one device and hold at most ``_CHUNK`` numbers."""
    run: list[int] = []
    size = 0
    for i, tensor in enumerate(tensors):
        if run and (size + tensor.numel() > _CHUNK or tensor.device != tensors[run[0]].device):
            yield run
            run, size = [], 0
        run.append(i)
        size += tensor.numel()
    if run:
        yield run
