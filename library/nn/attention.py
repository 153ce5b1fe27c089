"""Scaled dot-product attention, once for diffusion transformers and language models.

Tensors come and go as [B, S, H, D], the layout that projections produce. PyTorch's ``scaled_dot_product_attention``
wants [B, H, S, D]; the transposes are views and its kernels read strides, so nothing is copied. Grouped-query attention
(fewer key and value heads) goes to the kernel as such.

    attend             the one call; PyTorch picks the kernel (flash, memory-efficient, cuDNN, plain math) from device,
                       dtype and shapes; ``backend`` forces one, or chooses by timing (``attention_timing``)
    attend_recomputed  the same of queries and keys that are made of others, normed and turned: those are saved for
                       backward, and what is made of them is recomputed
    attend_jointly     text and image tokens among one another, with rotary positions (MM-DiT, arXiv 2403.03206)
    attend_in_order    one sequence of texts and images: a token of a text sees what is before it, one of an image all
                       of its image too; no mask is made
    document_mask      causal attention within each of several documents packed into one window: block diagonal
    window_mask        attention to so many tokens before one, and to none before those

There is no process-wide setting: whoever builds a model says which backend its attention uses.

Two faults of cuDNN's backward, which PyTorch prefers on Hopper and Blackwell, are kept away from training. It takes the
gradient of the output to lie in memory as the output does: of a gradient that is a part of a wider tensor, as
concatenation hands it back, it makes gradients unrelated to the right ones (relative error 1.4 on an H100, torch 2.11)
or reads memory that is not there; so gradients are packed first. And where there is a mask and the keys end in half a
tile of 128, it makes NaN of rows with very negative scores (torch 2.11 to 2.13,
https://github.com/pytorch/pytorch/issues/196678); there it is not chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from library.errors import UserError
from library.nn.rope import Table, rotate_interleaved

KernelName = Literal["auto", "flash", "flash3", "flash4", "efficient", "cudnn", "math"]


class Chooser(Protocol):
    """``library.nn.attention_timing.FastestKernel``."""

    def choose(self, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> KernelName: ...


Backend = KernelName | Chooser

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,  # as the process has activated it
    "flash4": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Return softmax(query key^T / sqrt(D) + mask) value as [B, Sq, H, D], in the dtype of ``query``.

    Args:
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D], H a multiple of Hkv.
        value: [B, Sk, Hkv, D].
        mask: boolean (true = attended to) or additive; [B, Sk] for padding, or broadcastable to [B, H, Sq, Sk].
        causal: a token sees itself and what is before it. With Sq < Sk the queries are the *last* Sq positions, as in
            decoding with a cache (PyTorch's ``is_causal`` would take them for the first).
        backend: kernel to force; "auto" lets PyTorch choose; or what chooses for these shapes.

    Raises:
        UserError: ``backend`` cannot run these tensors on this device.
    """
    heads, kv_heads = query.shape[2], key.shape[2]
    if query.shape[1] == 1 and heads != kv_heads and (mask is None or mask.shape[1] == 1 or mask.ndim == 2):
        # One token: the heads of a group are as many queries to one head of keys, which needs no copy of them.
        grouped = query.reshape(query.shape[0], kv_heads, heads // kv_heads, -1).transpose(1, 2)
        mixed = attend(grouped, key, value, mask=mask, backend=backend)
        return mixed.transpose(1, 2).reshape(query.shape)
    if mask is not None and heads != kv_heads and query.is_cuda:
        # No fused kernel takes both a mask and groups; the fallback would make the scores of all heads.
        key, value = (tensor.repeat_interleave(heads // kv_heads, dim=2) for tensor in (key, value))
    arguments = _kernel_arguments(query, key, value, mask, causal)
    kernel_mask = arguments[1]["attn_mask"]
    if not isinstance(backend, str):
        backend = backend.choose(*arguments[0][:2], kernel_mask, arguments[1]["is_causal"])
    if backend == "auto":
        with _sound_kernels(query, key, kernel_mask):
            output = F.scaled_dot_product_attention(*arguments[0], **arguments[1])
    else:
        with sdpa_kernel(_KERNELS[backend]):
            try:
                output = F.scaled_dot_product_attention(*arguments[0], **arguments[1])
            except RuntimeError as error:
                if not any(words in str(error) for words in ("No available kernel", "No viable backend")):
                    raise
                raise UserError(
                    f"attention: {backend!r} cannot run {query.dtype} on {query.device.type} for "
                    f"query {tuple(query.shape)}; choose 'auto'"
                ) from error
    output = output.transpose(1, 2).to(query.dtype)
    return PackedGradient.apply(output) if query.is_cuda and output.requires_grad else output


class PackedGradient(torch.autograd.Function):
    """Its input; the gradient is handed on without gaps between its numbers (see the module)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


Segment = tuple[int, int, bool]  # first token, the one behind the last, whether it is causal


def attend_in_order(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    segments: Sequence[Segment],
    mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return attention of a sequence whose segments see themselves and what is before them, [B, S, H, D].

    Args:
        query, key, value: [B, S, H, D].
        segments: neighbours from 0 to S. Within a causal one a token sees no later ones.
        mask: boolean [B, S], which keys the last segment sees; None: all. The others see theirs whatever it says.
        backend: as for :func:`attend`.
    """
    parts = []
    for start, end, causal in segments:
        keys = mask if end == key.shape[1] else None
        q, k, v = query[:, start:end], key[:, :end], value[:, :end]
        parts.append(attend(q, k, v, mask=keys, causal=causal, backend=backend))
    return _joined(parts)


Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
Prologue = Callable[..., tuple[Tensor, Tensor]]


def attend_recomputed(prologue: Prologue, inputs: Sequence[Tensor], value: Tensor, kernel: Kernel = attend) -> Tensor:
    """Return ``kernel`` of the query and key that ``prologue(*inputs)`` gives, and ``value``.

    A kernel of attention saves query, key and value for backward, norms save what they norm: queries and keys would be
    saved twice. Here ``inputs`` are, and backward runs the prologue again. Of FLUX's single block that is a sixth of
    what it saves, for two passes over queries and keys.

    Args:
        prologue: cheap and differentiable, drawing no random numbers, with nothing to be trained.
        inputs: its arguments, [B, S, H, D].
        value: [B, S, H, D].
        kernel: :func:`attend`, or several calls of it on parts of these.
    """
    everything = (*inputs, value)
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and all(t.requires_grad for t in everything)):
        return kernel(*prologue(*inputs), value)
    output = _Recomputed.apply(prologue, kernel, value, *inputs)
    # Here too: a gradient that is a part of a wider tensor would keep all of that through the kernel's backward.
    return PackedGradient.apply(output)


class _Recomputed(torch.autograd.Function):
    """``kernel(*prologue(*inputs), value)``.

    The kernel's own graph is kept from forward to backward with places in the stead of the tensors it saves: of query,
    key and value; what else it saves (its output, sums of exponentials) is saved here.
    """

    @staticmethod
    def forward(ctx: Any, prologue: Prologue, kernel: Kernel, value: Tensor, *inputs: Tensor) -> Tensor:
        made = (*prologue(*inputs), value)
        owners, count = {tensor.untyped_storage()._cdata: i for i, tensor in enumerate(made)}, len(made)
        others, again = list[Tensor](), list[Tensor]()

        def pack(tensor: Tensor) -> Any:
            if (owner := owners.get(tensor.untyped_storage()._cdata)) is None:
                others.append(tensor.detach())
                return count + len(others) - 1
            return owner, tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(place: Any) -> Tensor:
            return again[place] if isinstance(place, int) else again[place[0]].as_strided(*place[1:])

        anchor = torch.empty(0, requires_grad=True)
        with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
            ends = [_Entry.apply(tensor, anchor) for tensor in made]
            output = kernel(*ends)
        ctx.prologue, ctx.again, ctx.count = prologue, again, len(inputs)
        ctx.output, ctx.ends = get_gradient_edge(output), [get_gradient_edge(end) for end in ends]
        ctx.autocast = torch.is_autocast_enabled(value.device.type), torch.get_autocast_dtype(value.device.type)
        ctx.save_for_backward(*inputs, value, *others)
        others.clear()  # the kernel's graph keeps the hooks, and what they know
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved, (enabled, dtype) = ctx.saved_tensors, ctx.autocast
        inputs = [tensor.detach().requires_grad_() for tensor in saved[: ctx.count]]
        with torch.enable_grad(), torch.autocast(saved[0].device.type, dtype, enabled=enabled):
            made = ctx.prologue(*inputs)
        ctx.again[:] = (*(tensor.detach() for tensor in made), *saved[ctx.count :])
        *made_gradients, value_gradient = torch.autograd.grad(ctx.output, ctx.ends, gradients, retain_graph=True)
        ctx.again.clear()
        return None, None, value_gradient, *torch.autograd.grad(made, inputs, made_gradients)


class _Entry(torch.autograd.Function):
    """``x``, as a place in a graph that does not hold it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


ProjectedStream = tuple[Sequence[Tensor], Sequence[nn.Module]]  # query, key, value [B, S, H, D]; norms


def attend_jointly(
    streams: Sequence[ProjectedStream],
    rope: Table | None,
    *,
    mask: Tensor | None = None,
    segments: Sequence[Segment] = (),
    backend: Backend = "auto",
    rounding: Callable[[Tensor], Tensor] | None = None,
    turn: Callable[[Tensor, Table], Tensor] = rotate_interleaved,
) -> Tensor:
    """Return attention of all streams' tokens among one another, [B, sum of S, H, D].

    Args:
        streams: of the text, of the image, ..., S differing between them; norms of queries and of keys. What norms give
            in more precision is turned so, and then rounded to the values' dtype.
        rope: cos and sin [sum of S, D/2] that ``turn`` takes, by default for neighbouring pairs; or None.
        mask, backend: as for :func:`attend`; with ``segments`` as for :func:`attend_in_order`, which these ask for.
        rounding: what becomes of query, key and value [B, S, H, D] before their products, where they are rounded.
        turn: gives queries and keys [B, S, H, D] their positions.
    """
    # The dtype, not the values: what the prologue refers to is held until backward.
    norms, dtype = [norm for _, pair in streams for norm in pair], streams[0][0][2].dtype
    ordered = functools.partial(attend_in_order, segments=segments) if segments else attend
    kernel = functools.partial(ordered, mask=mask, backend=backend)

    def prologue(*projected: Tensor) -> tuple[Tensor, Tensor]:
        normed = [norm(tensor) for norm, tensor in zip(norms, projected, strict=True)]
        query, key = _joined(normed[::2]), _joined(normed[1::2])
        if rope is not None:
            query, key = turn(query, rope), turn(key, rope)
        query, key = query.to(dtype), key.to(dtype)
        return (query, key) if rounding is None else (rounding(query), rounding(key))

    inputs, value = [t for tensors, _ in streams for t in tensors[:2]], _joined([t[2] for t, _ in streams])
    value = value if rounding is None else rounding(value)
    if any(parameter.requires_grad for norm in norms for parameter in norm.parameters()):
        return kernel(*prologue(*inputs), value)
    return attend_recomputed(prologue, inputs, value, kernel)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def cudnn_is_sound(keys: int, masked: bool) -> bool:
    """Return whether cuDNN's backward is right for so many keys (see the module)."""
    return not masked or keys % 128 != 64


def _sound_kernels(query: Tensor, key: Tensor, mask: Tensor | None) -> AbstractContextManager[None]:
    """Return the context in which PyTorch chooses among all kernels, or all but cuDNN's (see the module)."""
    if not query.is_cuda or not query.requires_grad or cudnn_is_sound(key.shape[1], mask is not None):
        return nullcontext()
    return sdpa_kernel([kernel for name, kernel in _KERNELS.items() if name != "cudnn"])


def _kernel_arguments(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], dict]:
    """Translate to the kernel's layout and options."""
    length, keys = query.shape[1], key.shape[1]
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None, :]
    kernel_causal = causal and mask is None and length == keys and length > 1
    if causal and not kernel_causal and length > 1:
        # Bottom right aligned: query i sits at position keys - length + i.
        earlier = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
        if mask is None:
            mask = earlier
        elif mask.dtype == torch.bool:
            mask = mask & earlier
        else:
            mask = mask.masked_fill(~earlier, float("-inf"))
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return (q, k, v), {
        "attn_mask": mask,
        "dropout_p": 0.0,
        "is_causal": kernel_causal,
        "enable_gqa": query.shape[2] != key.shape[2],
    }


def document_positions(documents: Tensor) -> Tensor:
    """Return each token's position in its document, [B, S] int64 from 0."""
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return place - place.where(begins, 0).cummax(dim=1).values


def document_mask(documents: Tensor) -> Tensor:
    """Return who sees whom, [B, 1, S, S] bool: a token itself and those before it in its document."""
    length = documents.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & earlier)[:, None]


def window_mask(mask: Tensor | None, queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return who sees whom if a token sees itself and ``window`` - 1 before it (arXiv 2310.06825), bool [.., Sq, Sk].

    Args:
        mask: who sees whom otherwise, bool [B, 1, Sq, Sk]; None where causality says all.
        queries, keys: Sq and Sk; the queries are the last of the keys.
    """
    place = torch.arange(keys, device=device)
    behind = place[keys - queries :, None] - place
    near = (behind >= 0) & (behind < window)
    return near[None, None] if mask is None else mask & near
