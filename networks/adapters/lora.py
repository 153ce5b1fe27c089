"""LoRA and its relatives: a low-rank update beside a frozen linear layer (https://arxiv.org/abs/2106.09685).

The textbook needs two lines:

    low = dropout(A(x))                       A: [rank, in], B: [out, rank], both small; only they are trained
    out = base(x) + alpha / rank * B(low)

``base`` is frozen and can be any module with ``in_features``, ``out_features`` and a forward that returns a fresh
tensor: ``nn.Linear``, an fp8 one. Written so, each layer makes two more tensors of the output's size and saves x, the
widest tensor there is, for the gradient of A. So the same numbers are computed in another order:

* Under autocast x is cast once, for the base and for A; the weights are cast to x, never the reverse.
* B's product is accumulated into the base's output by one in-place ``addmm`` that also applies the scale, so no tensor
  of the output's size is made besides the output itself.
* Layers with a common input (q, k, v) run A as one matrix product (:meth:`LoRALinear.forward_together`).
* Without dropout, and outside of a compiler, base and updates are one step of autograd (:class:`_Fused`):

      x = prologue(*inputs)         y_i = base_i(x) + scale_i * (x A_i^T) B_i^T

  ``prologue`` stands for the cheap operations in front of a linear layer (norm and modulation, an activation, a
  concatenation). ``inputs`` and the low-rank products are saved, x is recomputed in backward: a pass over memory beside
  three matrix products. The input gradients of all layers are summed into one tensor as they are made, and frozen
  weights are asked of their layers again (``library.nn.frozen_linear``), never saved. With g_i the gradient of y_i and
  u = x A^T:

      du_i = scale_i g_i B_i      dB_i = scale_i g_i^T u_i      dA = du^T x      dx = sum_i g_i W_i + du A

Against peft's layers, which are the textbook's, a step of FLUX adds 0.71 of the memory in bf16 and 0.41 over fp8
weights, of Qwen-Image 0.75 and 0.45, in 0.92, 0.64, 0.96 and 0.81 of the time (docs/benchmarks.md).

*Dropouts* follow kohya's sd-scripts: neuron dropout on ``A(x)``; rank dropout zeroes whole ranks per sample and divides
by the share kept; module dropout switches the layer off for a call, without rescaling. kohya's module dropout leaves a
Python-level branch; here it is a factor of 0 or 1, which compiles, works under checkpointing and gives DDP a (zero)
gradient for every parameter. All draws come from torch's global generator of the device.

*Joined layers* (:func:`join`). The original FLUX has one ``qkv`` where diffusers has three layers, and sd-scripts
trains one LoRA on it: one A [rank, in], one B with the rows of all parts. Here the parts stay layers, the first of them
holds that A and that B, and each multiplies x A^T, made once, by its rows of B: the same numbers, gradients and
parameters.

*PiSSA* (:func:`init_pissa`, https://arxiv.org/abs/2404.02948) starts at the largest singular directions of W = U S V^T
instead of at random, c being the scale:

    A = diag(sqrt(s/c)) V^T        B = U diag(sqrt(s/c))

The paper, and peft, take ``c B A`` off W, so that the layer begins as it was, and train A and B. Here W stays as it is
and the layer keeps the start instead, computing W + c (B A - B_0 A_0): the same numbers, but W is not rounded (a bf16
weight minus its largest directions loses bits), it may be fp8, and switching the LoRA off gives the base. It costs a
product of the rank's size. The file then is a plain LoRA of twice the rank, as the one that peft converts to, but in
the form [A; A - A_0] and [B - B_0, B_0]: peft's [A; A_0] and [B, -B_0] are the difference of two large products, of
which bf16 keeps little.

*DoRA* (https://arxiv.org/abs/2402.09353) trains the norms of the merged weight's rows (its magnitude) besides:

    W' = m * V / |V|        V = W + s B A, its rows divided by their norm, m [out] trained

As in peft, whose file diffusers loads: m begins at |W|, and |V| is a constant to the gradient (section 4.3 of the
paper). With c = m / |V| and z = V x + b, what a LoRA computes, y = c * z + (1 - c) * b, so all of LoRA's fast paths
serve here too. |V| is had without forming V:

    |v_i|^2 = |w_i|^2 + 2 s b_i . (A w_i) + s^2 b_i (A A^T) b_i^T

in fp32. |w_i|^2 is computed once; A W^T anew in every forward, a product with as many columns as the rank, for which a
weight in bf16 or fp8 is there in fp32 for a moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils import skip_init

from library.errors import UserError
from library.nn.frozen_linear import add_input_gradient, has_input_gradient, output
from library.nn.tensor_split import Split, entering, gathering, leaving, sum_over
from networks.adapters.base import AdapterLinear, base_weight, device_of, fill, in_compute_dtype, new_parameter
from networks.files.weights import AdapterWeights, DoraWeights, LoraWeights
from networks.merging.low_rank import decompose
from networks.options import NO_DROPOUTS, Dropouts

Prologue = Callable[..., Tensor]


class LoRALinear(AdapterLinear):
    """A frozen layer with a trained low-rank update.

    Attributes:
        base: the wrapped layer. lora_A, lora_B: the trained layers, without bias.
        rank, alpha: the update's scale is ``alpha / rank``, or ``alpha / sqrt(rank)`` if ``rank_stabilised``
            (rsLoRA, https://arxiv.org/abs/2312.03732).
        start: what A and B were begun from if that was no zero update (``networks.adapters.lora``); it is taken off
            again, so that the layer begins as its base.
        dropouts: probabilities, see the module's text.
        multiplier: user strength of the update, 1.0 while training.
        split: which part of the base this process has; None: all of it. A and B are whole either way.
        joined: the layer that holds A and B of several layers, and this one's rows of B; None: A and B are its own.
        row_strengths: in training, a factor on the update for each sample of a batch, [B]; None: 1.
    """

    kind, from_zero = "lora", ("lora_B.weight",)

    def __init__(
        self,
        base: nn.Module,
        rank: int,
        alpha: float,
        *,
        dropouts: Dropouts = NO_DROPOUTS,
        rank_stabilised: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(base, rank, alpha)
        self.rank_stabilised = rank_stabilised
        self.dropouts = dropouts
        self.multiplier = 1.0
        self.start: LoraInit | None = None
        self.split: Split | None = None
        self.joined: Joined | None = None
        self.row_strengths: Tensor | None = None
        # skip_init: the default initialisation would draw from (and shift) the global generator
        self.lora_A = skip_init(nn.Linear, self.in_features, rank, bias=False, dtype=dtype, device=device_of(base))
        self.lora_B = skip_init(nn.Linear, rank, self.out_features, bias=False, dtype=dtype, device=device_of(base))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]`` in the dtype the base computes in."""
        return self.forward_together([self], x)[0]

    @staticmethod
    def forward_together(
        layers: Sequence[LoRALinear], x: Tensor, *more: Tensor, prologue: Prologue | None = None
    ) -> list[Tensor]:
        """Return ``[layer(x) for layer in layers]`` with one matrix product for all A.

        Args:
            layers: LoRA layers with the same ``in_features``, of any ranks and output sizes, split alike.
            x: ``[..., in]``; with ``prologue`` its first argument.
            more: the further arguments of ``prologue``.
            prologue: if given, the layers' input is ``prologue(x, *more)``, recomputed in backward instead of saved.

        Returns:
            One ``[..., out_i]`` per layer. Dropouts are drawn in the layers' order, as in separate calls.
        """
        simple = all(not layer._drops() and has_input_gradient(layer.base) for layer in layers)
        if not simple or layers[0].bypassed or torch.compiler.is_compiling():
            return LoRALinear._textbook(layers, prologue(x, *more) if prologue else x)
        split = layers[0].split
        holders = list(dict.fromkeys(layer.holder for layer in layers))
        updates = tuple(
            _Update(layer.base, holders.index(layer.holder), layer.scale * layer.multiplier) for layer in layers
        )
        first = [next(layer for layer in layers if layer.holder is holder) for holder in holders]
        downs, ups = [layer._local_down() for layer in first], [layer._local_up() for layer in layers]
        strengths = layers[0].row_strengths if layers[0].training else None
        outputs = _Fused.apply(updates, prologue, 1 + len(more), split, strengths, x, *more, *downs, *ups)
        return [gathering(y, split) for y in outputs]

    @staticmethod
    def _textbook(layers: Sequence[LoRALinear], x: Tensor) -> list[Tensor]:
        """Return base(x) + scale * B(dropout(A(x))) of each layer; base(x) of bypassed ones."""
        x = in_compute_dtype(entering(x, layers[0].split))
        rows = x.reshape(-1, x.shape[-1])  # [N, in]: base outputs are then no views and may be added to in place
        # A compiler makes addmm of a product and a sum of two dimensions, and copies the sum first: 1,102 copies in a
        # step of FLUX. Sums of x's own dimensions are made where they are read, in backward too.
        compiled = torch.compiler.is_compiling()
        if layers[0].bypassed:
            plain = [leaving(layer.base(rows), layer.split) for layer in layers]
            return [out.view(*x.shape[:-1], out.shape[-1]) for out in plain]
        first = list({layer.holder: layer for layer in reversed(layers)}.values())[::-1]  # of each A
        stacked = [layer._local_down().to(x.dtype) for layer in first]
        low = F.linear(rows, stacked[0] if len(stacked) == 1 else torch.cat(stacked))  # A(x): [N, sum of ranks]
        low = _at_strengths(low, layers[0].row_strengths if layers[0].training else None, x.shape)
        parts = dict(
            zip((layer.holder for layer in first), low.split([a.shape[0] for a in stacked], dim=-1), strict=True)
        )
        outputs = []
        for layer in layers:
            out = layer.base(x if compiled else rows)
            if layer.training and layer in first:
                parts[layer.holder] = layer._drop(parts[layer.holder], x.shape)
            part, scale = parts[layer.holder].to(out.dtype), layer.scale * layer.multiplier
            scale = scale / (1 - layer.dropouts.of_ranks) if layer.training else scale
            up = layer._local_up().to(out.dtype)
            if compiled:
                out = torch.add(out, F.linear(part, up).view(out.shape), alpha=scale)
            else:
                out.addmm_(part, up.t(), alpha=scale)
            out = leaving(out, layer.split)
            outputs.append(out.view(*x.shape[:-1], out.shape[-1]))
        return outputs

    def _drops(self) -> bool:
        """Return whether some dropout is at work."""
        return self.training and max(self.dropouts) > 0

    def _drop(self, low: Tensor, shape: torch.Size) -> Tensor:
        """Apply the three dropouts to ``low`` [N, rank]."""
        gate = None
        if self.dropouts.of_module > 0:
            gate = torch.rand((), device=low.device) >= self.dropouts.of_module
        if self.dropouts.of_neurons > 0:
            low = F.dropout(low, p=self.dropouts.of_neurons)
        if self.dropouts.of_ranks > 0:
            samples = shape[0] if len(shape) > 1 else 1
            kept = torch.rand((samples, self.rank), device=low.device) > self.dropouts.of_ranks
            kept = kept if gate is None else kept & gate
            return (low.view(samples, -1, self.rank) * kept[:, None].to(low.dtype)).view(-1, self.rank)
        return low if gate is None else low * gate.to(low.dtype)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw A from Kaiming's uniform with a = sqrt(5), that is U(-1, 1) / sqrt(in); set B to zero."""
        if self.holder is not self:
            return
        values = torch.empty(self.lora_A.weight.shape, dtype=torch.float32)
        nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        with torch.no_grad():
            self.lora_A.weight.copy_(values)
            self.lora_B.weight.zero_()

    def trained(self) -> dict[str, nn.Parameter]:
        """Return A and B, nothing where another layer holds them."""
        if self.holder is not self:
            return {}
        return {"lora_A.weight": self.lora_A.weight, "lora_B.weight": self.lora_B.weight}

    @property
    def holder(self) -> LoRALinear:
        """The layer that holds A and B."""
        return self if self.joined is None else self.joined.holder

    def state(self) -> dict[str, Tensor]:
        """Return A and B, and what they were begun from."""
        return super().state() | ({} if self.start is None else {"start_A": self.start.A, "start_B": self.start.B})

    def weights(self, comfy: bool = True) -> AdapterWeights:
        """Return the update; where a start is taken off again, one of twice the rank."""
        down, up = self.holder.lora_A.weight.detach(), self._b().detach()
        if self.start is not None:  # (B - B_0) A + B_0 (A - A_0): 16 bits round the change, not the far larger start
            down = torch.cat([down.float(), down.float() - self.start.A.float()])
            up = torch.cat([up.float() - self.start.B.float(), self.start.B.float()], dim=1)
        plain = self.start is None and not self.rank_stabilised
        # the alpha it was given, where that is the scale's numerator as it stands
        return LoraWeights(down, up, self.alpha if plain else self.scale * self.width)

    def misfit(self, weights: AdapterWeights) -> tuple[str, str] | None:
        """Return why a file's ``weights`` are none for this layer; another scale fits, see :meth:`load_weights`."""
        if weights.kind != self.kind:
            return super().misfit(weights)
        remedy = "set network_dim and *_dim as in the file"
        if weights.rank != self.rank:
            return f"has rank {weights.rank}, this network {self.rank}", remedy
        if made_for := weights.made_for_other((self.out_features, self.in_features)):
            return f"is for a layer of {made_for}, the model's has {self.out_features}x{self.in_features}", remedy
        return None

    def load_weights(self, weights: AdapterWeights) -> bool:
        """Copy A and B; another alpha / rank goes into B, so that the update is the file's and alpha the config's."""
        ratio = weights.scale / self.scale
        down, up = weights.tensors["down"], weights.tensors["up"]
        fill(self.holder.lora_A.weight, down)
        fill(self._b(), up if ratio == 1 else up.float() * ratio)
        return ratio != 1

    @property
    def scale(self) -> float:
        """alpha / rank, or alpha / sqrt(rank)."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)

    @property
    def width(self) -> int:
        """Rows of :meth:`down`: the rank, twice where a start is taken off."""
        return self.rank if self.start is None else 2 * self.rank

    def down(self) -> Tensor:
        """Return A, and below it the A of the start: [width, in]."""
        weight = self.holder.lora_A.weight
        return weight if self.start is None else torch.cat([weight, self.start.A])

    def up(self) -> Tensor:
        """Return B, and beside it minus the B of the start: [out, width]."""
        weight = self._b()
        return weight if self.start is None else torch.cat([weight, -self.start.B], dim=1)

    def _b(self) -> Tensor:
        """Return B, or this layer's rows of it."""
        return self.lora_B.weight if self.joined is None else self.joined.holder.lora_B.weight[self.joined.rows]

    def _local_down(self) -> Tensor:
        """Return :meth:`down` for the inputs that the base has here."""
        return self.down() if self.split is None or self.split.dim == 0 else self.split.local(self.down(), 1)

    def _local_up(self) -> Tensor:
        """Return :meth:`up` for the outputs that the base has here."""
        return self.up() if self.split is None or self.split.dim == 1 else self.split.local(self.up(), 0)


class Joined(NamedTuple):
    """Whose A and B a layer of several has, and its rows of B."""

    holder: LoRALinear
    rows: slice


@torch.no_grad()
def join(layers: Sequence[LoRALinear]) -> None:
    """Give fresh layers of the same input and rank one A and one B, of all their rows; the first layer holds them."""
    holder, weight, start = layers[0], layers[0].lora_B.weight, 0
    rows = sum(layer.out_features for layer in layers)
    holder.lora_B = skip_init(nn.Linear, holder.rank, rows, bias=False, dtype=weight.dtype, device=weight.device)
    nn.init.zeros_(holder.lora_B.weight)
    for layer in layers:
        layer.joined = Joined(holder, slice(start, start + layer.out_features))
        start += layer.out_features
        if layer is not holder:
            del layer.lora_A, layer.lora_B


class _Update(NamedTuple):
    """One layer's frozen base and its update, by the ``low``-th A."""

    base: nn.Module
    low: int
    scale: float


class _Fused(torch.autograd.Function):
    """``y_i`` of each update, ``[..., out_i]``, in the dtype of x = ``prologue(*inputs)``, or autocast's.

    ``tensors`` are the ``count`` inputs, then each A, [rank_k, in], then B of each update, [out_i, rank_k]. The
    prologue is differentiable and draws no random numbers; None: the input is x. ``split`` is the part of every layer
    that this process has, bases, A and B being that part; sums over its group are made here, one for all layers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        updates: tuple[_Update, ...],
        prologue: Prologue | None,
        count: int,
        split: Split | None,
        strengths: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        inputs, downs, ups = _parts(tensors, count, len(updates))
        device = inputs[0].device.type
        ctx.updates, ctx.prologue, ctx.count, ctx.device, ctx.split = updates, prologue, count, device, split
        ctx.strengths = strengths
        ctx.autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        x = _made(ctx, inputs)
        rows = x.reshape(-1, x.shape[-1])
        with torch.autocast(device, enabled=False):
            low = rows @ _stacked(downs, rows.dtype).t()  # [N, sum of ranks]
            low = _at_strengths(low, strengths, x.shape)
            lows = low.split([down.shape[0] for down in downs], dim=1)
            outputs = []
            for update, up in zip(updates, ups, strict=True):
                out = output(update.base, rows)
                out.addmm_(lows[update.low], up.to(out.dtype).t(), alpha=update.scale)
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
        wanted = ctx.needs_input_grad[5:]
        with torch.autocast(ctx.device, enabled=False):
            rows = [g.reshape(-1, g.shape[-1]) for g in gradients]
            ranks = [down.shape[0] for down in downs]
            lows = low.split(ranks, dim=1)
            low_gradients: list[Tensor | None] = [None] * len(downs)
            for g, up, u in zip(rows, ups, ctx.updates, strict=True):
                more = (g @ up.to(g.dtype)).mul_(u.scale)
                before = low_gradients[u.low]
                low_gradients[u.low] = more if before is None else before.add_(more)
            low_gradient = torch.cat([gradient for gradient in low_gradients if gradient is not None], dim=1)
            low_gradient = _at_strengths(low_gradient, ctx.strengths, gradients[0].shape)
            up_gradients = [
                (g.t() @ lows[u.low]).to(up.dtype).mul_(u.scale)
                for g, up, u in zip(rows, ups, ctx.updates, strict=True)
            ]
            # x is recomputed, used for the gradient of A and let go, before there is a gradient of its size.
            leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, wanted, strict=False)]
            with torch.set_grad_enabled(any(wanted[: ctx.count])):
                x = _made(ctx, leaves)
            shape, edge = x.shape, torch.autograd.graph.get_gradient_edge(x) if x.requires_grad else None
            down_gradient = low_gradient.t() @ x.detach().reshape(-1, shape[-1])
            del x
            found: Iterator[Tensor] = iter(())
            if edge is not None:
                x_gradient = low_gradient @ _stacked(downs, low_gradient.dtype)
                for g, update in zip(rows, ctx.updates, strict=True):
                    add_input_gradient(update.base, g, x_gradient)
                if ctx.split is not None and ctx.split.dim == 0:
                    sum_over(ctx.split.group, x_gradient)
                needing = [leaf for leaf in leaves if leaf.requires_grad]
                found = iter(torch.autograd.grad(edge, needing, x_gradient.view(shape)))
        input_gradients = [next(found, None) if leaf.requires_grad else None for leaf in leaves]
        down_gradients = [part.to(down.dtype) for part, down in zip(down_gradient.split(ranks), downs, strict=True)]
        return None, None, None, None, None, *input_gradients, *down_gradients, *up_gradients


def _at_strengths(low: Tensor, strengths: Tensor | None, shape: torch.Size) -> Tensor:
    """Return ``low`` [N, ranks] times each sample's strength; the first axis of the input's ``shape`` is the batch's.

    Vectors, of two axes, may be there for several timesteps: the batch then stands as often, one after the other. Of
    more axes the first may count a sample's tokens, too, which stand together.

    Raises:
        UserError: rows belong to no sample, as Qwen-Image 2.1's modulation of all texts does.
    """
    if strengths is None:
        return low
    times, rest = divmod(shape[0], len(strengths))
    if rest or not times:
        what = "a trained layer has inputs that all samples share, which cannot be at two strengths"
        raise UserError(f"train_on: slider: {what}; leave mod_dim and *_mod_dim out of network_args")
    strengths = strengths.to(low.dtype)
    of_rows = strengths.repeat(times) if len(shape) == 2 else strengths.repeat_interleave(times)
    return low * of_rows.repeat_interleave(len(low) // shape[0])[:, None]


def _parts(tensors: Sequence[Tensor], count: int, layers: int) -> tuple[Sequence[Tensor], ...]:
    """Return inputs, downs and ups."""
    return tensors[:count], tensors[count : len(tensors) - layers], tensors[len(tensors) - layers :]


def _stacked(downs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([down.to(dtype) for down in downs])


def _made(ctx: Any, inputs: Sequence[Tensor]) -> Tensor:
    """Return x in the compute dtype, under the autocast that forward ran under."""
    enabled, dtype = ctx.autocast
    with torch.autocast(ctx.device, dtype, enabled=enabled):
        x = ctx.prologue(*inputs) if ctx.prologue else inputs[0]
    return x.to(dtype) if enabled else x


class LoraInit(nn.Module):
    """What a LoRA was begun from; not among the layer's own tensors, so that swapped blocks leave it on the device."""

    A: Tensor
    B: Tensor

    def __init__(self, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.register_buffer("A", down)
        self.register_buffer("B", up)


@torch.no_grad()
def init_pissa(layer: LoRALinear, name: str, generator: torch.Generator) -> None:
    """Set A and B of ``layer`` from its base's weight and let the layer take them off again.

    Args:
        layer: freshly made.
        name: of the layer, for messages.
        generator: on the CPU, for the approximate decomposition of large weights.

    Raises:
        UserError: the weight has fewer directions than the rank.
    """
    weight = base_weight(layer.base)
    if layer.rank > min(weight.shape):
        raise UserError(
            f"init_lora_weights = pissa: {name} is {weight.shape[0]}x{weight.shape[1]} and has no "
            f"{layer.rank} directions; lower network_dim or leave the layer out"
        )
    spectrum = decompose(weight, layer.rank, generator)
    root = (spectrum.values / layer.scale).sqrt()
    layer.lora_A.weight.copy_(root[:, None] * spectrum.right)
    layer.lora_B.weight.copy_(spectrum.left * root)
    layer.start = LoraInit(layer.lora_A.weight.detach().clone(), layer.lora_B.weight.detach().clone())


class DoRALinear(LoRALinear):
    """A LoRA layer whose merged weight has trained row norms.

    Attributes:
        magnitude: m, [out].
    """

    kind = "dora"
    squared_norms: Tensor

    def __init__(self, base: nn.Module, rank: int, alpha: float, **options: Any) -> None:
        super().__init__(base, rank, alpha, **options)
        self.register_buffer("squared_norms", _squared_norms(base), persistent=False)
        # fp32 always: rounded to bf16, the layer would not begin as its base, and small steps would be lost
        self.magnitude = new_parameter(base, self.out_features, dtype=torch.float32)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw A as a LoRA does, set B to zero and m to the row norms of the base."""
        super().initialise(generator)
        with torch.no_grad():
            self.magnitude.copy_(self.squared_norms.sqrt())

    def trained(self) -> dict[str, nn.Parameter]:
        """Return A, B and m."""
        return super().trained() | {"magnitude": self.magnitude}

    @torch.no_grad()
    def weights(self, comfy: bool = True) -> AdapterWeights:
        """Return A, B and m as peft keeps it, and with ``comfy`` as ComfyUI does.

        These take the base's weight, which some layouts shard: nothing else in a file does.
        """
        lora, magnitude = super().weights(), self.magnitude.detach().float()
        tensors = {**lora.tensors, "magnitude": magnitude}
        if comfy:
            tensors["dora_scale"] = (magnitude * self.squared_norms.sqrt() / self.row_norms())[:, None]
        return DoraWeights(tensors, lora.alpha)

    def misfit(self, weights: AdapterWeights) -> tuple[str, str] | None:
        """Return why a file's ``weights`` are none for this layer."""
        if problem := super().misfit(weights):
            return problem
        scales = weights.tensors.get("dora_scale")
        if "magnitude" not in weights.tensors and scales is not None and scales.shape != (self.out_features, 1):
            return "has magnitudes of columns", "training can continue only from a DoRA with magnitudes of rows"
        return None

    @torch.no_grad()
    def load_weights(self, weights: AdapterWeights) -> bool:
        """Copy A, B and m; another alpha / rank goes into B, as a LoRA's does: V is the file's."""
        rescaled = super().load_weights(weights)
        magnitude = weights.tensors.get("magnitude")
        if magnitude is None:
            scales = weights.tensors["dora_scale"].to(self.squared_norms)
            magnitude = scales[:, 0] * self.row_norms() / self.squared_norms.sqrt()
        fill(self.magnitude, magnitude)
        return rescaled

    @torch.no_grad()
    def measure_base(self) -> None:
        """Take the base's row norms."""
        self.squared_norms.copy_(_squared_norms(self.base))

    @torch.no_grad()
    def row_norms(self) -> Tensor:
        """Return |V|, [out] fp32."""
        down, up = self.lora_A.weight.float(), self.lora_B.weight.float()
        with torch.autocast(down.device.type, enabled=False):
            crossed = (up * (base_weight(self.base) @ down.t())).sum(dim=1)
            update = ((up @ (down @ down.t())) * up).sum(dim=1)
        scale = self.scale
        return (self.squared_norms + 2 * scale * crossed + scale**2 * update).clamp_min(0).sqrt()

    @staticmethod
    def forward_together(  # type: ignore[override]
        layers: Sequence[DoRALinear], x: Tensor, *more: Tensor, prologue: Prologue | None = None
    ) -> list[Tensor]:
        """Return ``[layer(x) for layer in layers]``; see :meth:`networks.adapters.lora.LoRALinear.forward_together`."""
        outputs = LoRALinear.forward_together(layers, x, *more, prologue=prologue)
        if layers[0].bypassed:
            return outputs
        return [layer._with_magnitude(z) for layer, z in zip(layers, outputs, strict=True)]

    def _with_magnitude(self, z: Tensor) -> Tensor:
        """Return c z + (1 - c) b."""
        ratio = self.magnitude.float() / self.row_norms()
        out = z * ratio.to(z.dtype)
        return out if self.bias is None else out + ((1 - ratio) * self.bias.float()).to(z.dtype)


def _squared_norms(base: nn.Module) -> Tensor:
    return base_weight(base).square().sum(dim=1)
