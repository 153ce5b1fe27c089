"""Several linear layers on one input.

Attention computes q, k and v from the same hidden states. Three frozen base matrices stay three matrix
products, but the low-rank layers around them can share one: a wrapper that knows how
(``networks.lora.LoRALinear``) offers ``forward_together``, found here by name, so that this layer of the
code needs to know nothing about LoRA.

What stands before a linear layer is often cheap to make and wide to keep: a norm with modulation, an activation. A
wrapper may keep what it is made of instead, if it is told how: :func:`project_made`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn


def project_together(linears: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Return ``[linear(x) for linear in linears]``, sharing the down-projection where the layers offer it.

    Args:
        linears: layers that map ``[..., in]`` to ``[..., out_i]``; any mix of plain and LoRA-wrapped ones.
        x: their common input, ``[..., in]``.

    Returns:
        One tensor ``[..., out_i]`` per layer, in the given order. Equal to separate calls up to rounding.
    """
    groups: dict[type[nn.Module], list[int]] = {}
    for position, linear in enumerate(linears):
        if hasattr(type(linear), "forward_together"):
            groups.setdefault(type(linear), []).append(position)
    outputs: dict[int, Tensor] = {}
    for kind, positions in groups.items():
        together = kind.forward_together([linears[i] for i in positions], x)  # type: ignore[attr-defined]
        outputs.update(zip(positions, together, strict=True))
    return [outputs[i] if i in outputs else linear(x) for i, linear in enumerate(linears)]


def project_made(linears: Sequence[nn.Module], make: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return :func:`project_together` of ``make(*inputs)``, which is made again in backward where the layers can.

    Args:
        linears: as there.
        make: cheap and differentiable, drawing no random numbers.
        inputs: its arguments; these are kept for backward.
    """
    kind = type(linears[0])
    if hasattr(kind, "forward_together") and all(type(linear) is kind for linear in linears):
        return kind.forward_together(linears, *inputs, make=make)
    return project_together(linears, make(*inputs))
