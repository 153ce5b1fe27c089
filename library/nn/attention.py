"""Scaled dot-product attention, once: diffusion transformers and language models call :func:`attend`.

Tensors come and go as [B, S, H, D], the layout that projections produce. PyTorch's
``scaled_dot_product_attention`` wants [B, H, S, D]; the transposes are views and its kernels read strides, so
nothing is copied. Grouped-query attention (fewer key and value heads) goes to the kernel as such.

Which kernel runs (flash, memory-efficient, cuDNN, plain math) PyTorch decides from device, dtype and shapes; large
full attention on a CPU goes to ``library.nn.cpu_attention``.
``backend`` forces one for this call, :func:`chosen_backend` reports the decision. There is no process-wide
setting: whoever builds a model says which backend its attention uses.

Several documents in one window: positions that begin anew, and attention that stays within a document.

``documents`` [B, S] numbers the document of every token; equal numbers stand side by side. Attention is then causal in
blocks along the diagonal. The mask is one byte for each pair of tokens of a window, made once and used by all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import library.nn.cpu_attention as cpu_attention
from library.errors import UserError, did_you_mean
from library.nn.cpu_attention import Stream
from library.nn.rope import Table, rotate_interleaved

Backend = Literal["auto", "flash", "efficient", "cudnn", "math"]

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
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
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return softmax(query key^T * scale + mask) value as [B, Sq, H, D], in the dtype of ``query``.

    Args:
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D], H a multiple of Hkv.
        value: [B, Sk, Hkv, D].
        mask: boolean (true = attended to) or additive; [B, Sk] for padding, or broadcastable to [B, H, Sq,
        Sk].
        causal: a token sees itself and what is before it. With Sq < Sk the queries are the *last* Sq
        positions, as
            in decoding with a cache (PyTorch's ``is_causal`` would take them for the first).
        scale: factor on the scores; default 1/sqrt(D).
        backend: kernel to force; "auto" lets PyTorch choose.

    Raises:
        UserError: ``backend`` is unknown, or cannot run these tensors on this device.
    """
    alone = [Stream(query, key, value)]
    if backend == "auto" and mask is None and not causal and cpu_attention.fits(alone):
        return cpu_attention.attend_on_cpu(alone, scale=scale)
    heads, kv_heads = query.shape[2], key.shape[2]
    if query.shape[1] == 1 and heads != kv_heads and (mask is None or mask.shape[1] == 1 or mask.ndim == 2):
        # One token: the heads of a group are as many queries to one head of keys, which needs no copy of them.
        grouped = query.reshape(query.shape[0], kv_heads, heads // kv_heads, -1).transpose(1, 2)
        mixed = attend(grouped, key, value, mask=mask, scale=scale, backend=backend)
        return mixed.transpose(1, 2).reshape(query.shape)
    if mask is not None and heads != kv_heads and query.is_cuda:
        # No fused kernel takes both a mask and groups; the fallback would make the scores of all heads.
        key, value = (tensor.repeat_interleave(heads // kv_heads, dim=2) for tensor in (key, value))
    arguments = _kernel_arguments(query, key, value, mask, causal, scale)
    if backend == "auto":
        output = F.scaled_dot_product_attention(*arguments[0], **arguments[1])
    else:
        with sdpa_kernel(_kernel(backend)):
            try:
                output = F.scaled_dot_product_attention(*arguments[0], **arguments[1])
            except RuntimeError as error:
                if not any(words in str(error) for words in ("No available kernel", "No viable backend")):
                    raise
                raise UserError(
                    f"attention backend {backend!r} cannot run {query.dtype} on {query.device.type} for "
                    f"query {tuple(query.shape)}; choose 'auto'"
                ) from error
    return output.transpose(1, 2).to(query.dtype)


def attend_together(
    streams: Sequence[Stream], rope: Table | None, *, mask: Tensor | None = None, backend: Backend = "auto"
) -> Tensor:
    """Return attention of all streams' tokens among one another, [B, sum of S, H, D].

    Args:
        streams: queries and keys as projected; each is normalised by its stream's norms.
        rope: cos and sin [sum of S, D/2] that turn neighbouring pairs of normalised queries and keys; or None.
        mask, backend: as for :func:`attend`.
    """
    if backend == "auto" and mask is None and cpu_attention.fits(streams):
        return cpu_attention.attend_on_cpu(streams, rope)
    query = _joined([s.query_norm(s.query) if s.query_norm else s.query for s in streams])
    key = _joined([s.key_norm(s.key) if s.key_norm else s.key for s in streams])
    if rope is not None:
        query, key = rotate_interleaved(query, rope), rotate_interleaved(key, rope)
    return attend(query, key, _joined([s.value for s in streams]), mask=mask, backend=backend)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def chosen_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    compiled: bool = False,
) -> str:
    """Return the name of the kernel ``attend(..., backend="auto")`` runs for these tensors.

    "own" is ``library.nn.cpu_attention``; ``compiled`` tells of code that torch.compile has made, which has it not.
    """
    if mask is None and not causal and not compiled and cpu_attention.fits([Stream(query, key, value)]):
        return "own"
    (q, k, v), options = _kernel_arguments(query, key, value, mask, causal, None)
    choice = torch._fused_sdp_choice(
        q,
        k,
        v,
        attn_mask=options["attn_mask"],
        dropout_p=0.0,
        is_causal=options["is_causal"],
        scale=None,
        enable_gqa=options["enable_gqa"],
    )
    names = {int(kernel.value): name for name, kernel in _KERNELS.items()}
    return names.get(int(choice), "math")


def _kernel(backend: str) -> SDPBackend:
    if backend not in _KERNELS:
        known = [*get_args(Backend)]
        raise UserError(
            f"attention backend {backend!r} is not known{did_you_mean(backend, known)}; "
            f"choose one of {', '.join(known)}"
        )
    return _KERNELS[backend]


def _kernel_arguments(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None
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
        "scale": scale,
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
