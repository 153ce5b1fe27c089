"""The kinds of adapters by name, and the layer that each puts around a frozen one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from networks.adapter import AdapterLinear
from networks.dora import DoRALinear
from networks.lora import LoRALinear
from networks.lycoris import LoHaLinear, LoKrLinear
from networks.options import NetworkOptions
from networks.orthogonal import BOFTLinear, OFTLinear

_Make = Callable[[nn.Module, int, NetworkOptions, torch.dtype, torch.device], AdapterLinear]


def make_layer(
    base: nn.Module, rank: int, options: NetworkOptions, dtype: torch.dtype, device: torch.device
) -> AdapterLinear:
    """Return the layer of ``options.kind`` around ``base``, not yet initialised.

    Raises:
        UserError: the kind does not fit the layer's size.
    """
    return _MAKERS[options.kind](base, rank, options, dtype, device)


def _lora(
    base: nn.Module, rank: int, options: NetworkOptions, dtype: torch.dtype, device: torch.device
) -> AdapterLinear:
    return LoRALinear(
        base,
        rank,
        options.alpha,
        dropout=options.dropout,
        rank_dropout=options.rank_dropout,
        module_dropout=options.module_dropout,
        rank_stabilised=options.rank_stabilised,
        dtype=dtype,
        device=device,
    )


def _dora(
    base: nn.Module, rank: int, options: NetworkOptions, dtype: torch.dtype, device: torch.device
) -> AdapterLinear:
    return DoRALinear(
        base,
        rank,
        options.alpha,
        dropout=options.dropout,
        rank_dropout=options.rank_dropout,
        rank_stabilised=options.rank_stabilised,
        dtype=dtype,
        device=device,
    )


def _lokr(
    base: nn.Module, rank: int, options: NetworkOptions, dtype: torch.dtype, device: torch.device
) -> AdapterLinear:
    return LoKrLinear(
        base,
        rank,
        options.alpha,
        factor=options.factor,
        decompose_both=options.decompose_both,
        dtype=dtype,
        device=device,
    )


_MAKERS: dict[str, _Make] = {
    "lora": _lora,
    "dora": _dora,
    "lokr": _lokr,
    "loha": lambda base, rank, options, dtype, device: LoHaLinear(
        base, rank, options.alpha, dtype=dtype, device=device
    ),
    "oft": lambda base, rank, options, dtype, device: OFTLinear(base, rank, dtype=dtype, device=device),
    "boft": lambda base, rank, options, dtype, device: BOFTLinear(base, rank, dtype=dtype, device=device),
}
