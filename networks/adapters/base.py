"""What every kind of adapter is: a frozen linear layer with a trained change to it.

Kinds differ in the change:

    lora   W + s B A                                   networks.adapters.lora
    dora   m * (W + s B A) / |W + s B A|  (by row)     networks.adapters.lora
    lokr   W + s w1 (x) w2  (Kronecker)                networks.adapters.lycoris
    loha   W + s (a1 b1) * (a2 b2)  (by element)       networks.adapters.lycoris
    oft    R W, R orthogonal in blocks                 networks.adapters.orthogonal
    boft   R_m ... R_1 W, blocks in butterfly order    networks.adapters.orthogonal

None of them keeps anything of the weight's size for backward: the base may be fp8, or lie elsewhere between the two.

Frozen layers with low-rank updates as one step of autograd, saving only what backward cannot recompute.

    x = prologue(*inputs)         y_i = base_i(x) + scale_i * (x A_i^T) B_i^T

``prologue`` stands for the cheap operations in front of a linear layer (norm and modulation, an activation, a
concatenation). Left to itself autograd keeps their result for the gradient of A, and with it the widest tensors of a
transformer block. Here ``inputs`` and the low-rank products are kept and ``prologue`` is run again in backward: a pass
over memory beside three matrix products. Further:

* the down-projections of all layers are one product over the stacked A;
* the input gradients of all layers are summed into one tensor as they are made;
* frozen weights are asked of their layers again (``library.nn.frozen_linear``), never kept.

With g_i the gradient of y_i and u = x A^T:

    du_i = scale_i g_i B_i      dB_i = scale_i g_i^T u_i      dA = du^T x      dx = sum_i g_i W_i + du A
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from library.nn.frozen_linear import add_input_gradient, has_input_gradient, output
from library.nn.tensor_split import Split, sum_over
from networks.files.weights import KINDS, AdapterWeights


class AdapterLinear(nn.Module):
    """A frozen layer with a trained change.

    Attributes:
        base: the wrapped layer: any module with ``in_features``, ``out_features`` and a forward.
        rank, alpha: as the kind understands them.
        enabled: False makes the layer its base.
    """

    kind: str

    def __init__(self, base: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.rank = rank
        self.alpha = float(alpha)
        self.enabled = True

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the initial weights; the change is zero."""
        raise NotImplementedError

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by the names they have in files (``lora_A.weight``, ``lokr_w1``)."""
        raise NotImplementedError

    @property
    def scale(self) -> float:
        """Factor of the change, of the kinds that have one."""
        return 1.0

    def state(self) -> dict[str, Tensor]:
        """Return what a training state has to hold: the trained parameters, and what they were begun from."""
        return {name: parameter.detach() for name, parameter in self.trained().items()}

    def weights(self) -> AdapterWeights:
        """Return what files hold of this layer."""
        return KINDS[self.kind].of({name: p.detach() for name, p in self.trained().items()}, self.alpha)

    def misfit(self, weights: AdapterWeights) -> tuple[str, str] | None:
        """Return why a file's ``weights`` are none for this layer, and what to do about it; None if they are."""
        if weights.kind != self.kind:
            return f"is a {weights.title}, here it is a {KINDS[self.kind].title}", "set network_type"
        for name, parameter in self.trained().items():
            found = weights.tensors.get(name)
            if found is None or found.shape != parameter.shape:
                has = "nothing" if found is None else tuple(found.shape)
                return f"has {name} {has}, here {tuple(parameter.shape)}", "set network_dim as in the file"
        return self.other_scale(weights)

    def other_scale(self, weights: AdapterWeights) -> tuple[str, str] | None:
        """Return :meth:`misfit` of a file with another scale."""
        if abs(weights.scale - self.scale) <= 1e-6 * abs(self.scale):
            return None
        return f"has the scale {weights.scale:g}, here {self.scale:g}", "set network_alpha as in the file"

    def load_weights(self, weights: AdapterWeights) -> bool:
        """Copy a file's ``weights`` into the layer, in which :meth:`misfit` sees none; return whether it rescaled."""
        for name, parameter in self.trained().items():
            fill(parameter, weights.tensors[name])
        return False

    @property
    def in_features(self) -> int:
        """Input columns of the base."""
        return self.base.in_features  # type: ignore[return-value]

    @property
    def out_features(self) -> int:
        """Output rows of the base."""
        return self.base.out_features  # type: ignore[return-value]

    @property
    def weight(self) -> Tensor:
        """The base's weight: diffusers reads its dtype in places."""
        return self.base.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """The base's bias."""
        return self.base.bias  # type: ignore[return-value]

    def extra_repr(self) -> str:
        """Show rank and alpha in ``print(model)``."""
        return f"rank={self.rank}, alpha={self.alpha:g}"


def in_compute_dtype(x: Tensor) -> Tensor:
    """Return ``x`` in autocast's dtype where autocast is on: cast once here or once per product later."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


@torch.no_grad()
def base_weight(base: Any) -> Tensor:
    """Return the weight of a base layer, [out, in] in fp32, dequantised where it is fp8."""
    return base.dequantized(torch.float32) if hasattr(base, "dequantized") else base.weight.detach().float()


def new_parameter(*shape: int, dtype: torch.dtype, device: torch.device | str | None) -> nn.Parameter:
    """Return a parameter of zeros."""
    return nn.Parameter(torch.zeros(*shape, dtype=dtype, device=device or "cpu"))


@torch.no_grad()
def fill(parameter: nn.Parameter, values: Tensor) -> None:
    """Copy ``values``, drawn in fp32 on the CPU, into ``parameter``."""
    parameter.copy_(values)


Prologue = Callable[..., Tensor]


class Update(NamedTuple):
    """One layer's frozen base and its update; ``rank`` rows of A."""

    base: nn.Module
    rank: int
    scale: float


def fused(
    updates: Sequence[Update],
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    prologue: Prologue,
    *inputs: Tensor,
    split: Split | None = None,
) -> list[Tensor]:
    """Return ``y_i`` of each update, ``[..., out_i]``, in the dtype of ``prologue(*inputs)``, or autocast's.

    Args:
        updates: layers with a common input and an input gradient (:func:`can_fuse`).
        downs: A of each, [rank_i, in].
        ups: B of each, [out_i, rank_i].
        prologue: differentiable function of ``inputs`` that draws no random numbers.
        inputs: what ``prologue`` makes x [..., in] of.
        split: the part of every layer that this process has, bases, ``downs`` and ``ups`` being that part; sums over
            its group are made here, one for all layers.
    """
    return list(_Fused.apply(tuple(updates), prologue, len(inputs), split, *inputs, *downs, *ups))


def can_fuse(bases: Sequence[nn.Module]) -> bool:
    """Return whether all of ``bases`` are frozen layers that :func:`fused` can run backward."""
    return not torch.compiler.is_compiling() and all(has_input_gradient(base) for base in bases)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, updates: tuple[Update, ...], prologue: Prologue, count: int, split: Split | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        inputs, downs, ups = _parts(tensors, count, len(updates))
        device = inputs[0].device.type
        ctx.updates, ctx.prologue, ctx.count, ctx.device, ctx.split = updates, prologue, count, device, split
        ctx.autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        x = _made(ctx, inputs)
        rows = x.reshape(-1, x.shape[-1])
        with torch.autocast(device, enabled=False):
            low = rows @ _stacked(downs, rows.dtype).t()  # [N, sum of ranks]
            outputs = []
            for update, part, up in zip(updates, low.split([u.rank for u in updates], dim=1), ups, strict=True):
                out = output(update.base, rows)
                out.addmm_(part, up.to(out.dtype).t(), alpha=update.scale)
                if split is not None and split.dim == 1:
                    sum_over(split.group, out)
                outputs.append(out.view(*x.shape[:-1], out.shape[-1]))
        ctx.save_for_backward(*tensors, low)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, low = ctx.saved_tensors
        inputs, downs, ups = _parts(tensors, ctx.count, len(ctx.updates))
        wanted = ctx.needs_input_grad[4:]
        with torch.autocast(ctx.device, enabled=False):
            rows = [g.reshape(-1, g.shape[-1]) for g in gradients]
            parts = low.split([update.rank for update in ctx.updates], dim=1)
            low_gradient = torch.cat(
                [(g @ up.to(g.dtype)).mul_(u.scale) for g, up, u in zip(rows, ups, ctx.updates, strict=True)], dim=1
            )
            up_gradients = [
                (g.t() @ part).to(up.dtype).mul_(u.scale)
                for g, part, up, u in zip(rows, parts, ups, ctx.updates, strict=True)
            ]
            # x is made, used for the gradient of A and let go, before there is a gradient of its size.
            x = _MadeAgain(ctx, inputs, wanted)
            down_gradient = low_gradient.t() @ x.free_weights()
            if any(wanted[: ctx.count]):
                x_gradient = low_gradient @ _stacked(downs, low_gradient.dtype)
                for g, update in zip(rows, ctx.updates, strict=True):
                    add_input_gradient(update.base, g, x_gradient)
                if ctx.split is not None and ctx.split.dim == 0:
                    sum_over(ctx.split.group, x_gradient)
                x.backward(x_gradient)
        ranks = [update.rank for update in ctx.updates]
        down_gradients = [part.to(down.dtype) for part, down in zip(down_gradient.split(ranks), downs, strict=True)]
        return None, None, None, None, *x.gradients, *down_gradients, *up_gradients


def _parts(tensors: Sequence[Tensor], count: int, layers: int) -> tuple[Sequence[Tensor], ...]:
    """Return inputs, downs and ups."""
    return tensors[:count], tensors[count : count + layers], tensors[count + layers :]


def _stacked(downs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([down.to(dtype) for down in downs])


def _made(ctx: Any, inputs: Sequence[Tensor]) -> Tensor:
    """Return x in the compute dtype, under the autocast that forward ran under."""
    enabled, dtype = ctx.autocast
    with torch.autocast(ctx.device, dtype, enabled=enabled):
        x = ctx.prologue(*inputs)
    return x.to(dtype) if enabled else x


class _MadeAgain:
    """x made once more from ``inputs``, with a way back to them."""

    def __init__(self, ctx: Any, inputs: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        self._leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, wanted, strict=False)]
        self._needing = [leaf for leaf in self._leaves if leaf.requires_grad]
        with torch.set_grad_enabled(bool(self._needing)):
            self._x: Tensor | None = _made(ctx, self._leaves)
        self._shape = self._x.shape
        self._edge = torch.autograd.graph.get_gradient_edge(self._x) if self._needing else None
        self.gradients: list[Tensor | None] = [None] * len(inputs)

    def free_weights(self) -> Tensor:
        """Return x, [N, in], and keep no reference to it."""
        x, self._x = self._x, None
        assert x is not None
        return x.detach().reshape(-1, x.shape[-1])

    def backward(self, x_gradient: Tensor) -> None:
        """Set ``gradients`` of the inputs, None where none is needed."""
        assert self._edge is not None
        found = iter(torch.autograd.grad(self._edge, self._needing, x_gradient.view(self._shape)))
        self.gradients = [next(found) if leaf.requires_grad else None for leaf in self._leaves]
