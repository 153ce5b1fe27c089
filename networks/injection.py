"""Putting adapter layers into a model.

:func:`inject_adapter` reads the model's linear layers, sorts them into the family's kinds, lets ranks, block
choices and patterns decide, and swaps each chosen layer for an :class:`~networks.adapters.base.AdapterLinear` around
it. An option that decides nothing is an error: a typing mistake in a pattern otherwise costs a day of training.

A layer's initial weights depend on (seed, module name) alone, so that a pattern changes no other layer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from library.errors import UserError, names_in_short
from library.models.layer_names import LoraTargets
from library.randomness import generator
from networks.adapters.base import AdapterLinear
from networks.adapters.lora import DoRALinear, LoRALinear, init_from_weights, join
from networks.adapters.lycoris import LoHaLinear, LoKrLinear
from networks.adapters.orthogonal import BOFTLinear, OFTLinear
from networks.files.metadata import AlphaTable
from networks.files.weights import AdapterWeights, same_down
from networks.network import AdapterNetwork
from networks.options import NetworkOptions


def inject_adapter(
    model: nn.Module,
    options: NetworkOptions,
    targets: LoraTargets,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> AdapterNetwork:
    """Wrap the chosen linear layers of ``model`` in place and freeze everything else.

    Args:
        model: a loaded model of the family, not yet compiled or wrapped.
        options: from :func:`networks.options.parse_network_args`.
        targets: the family's row.
        seed: initial weights follow from it and the module's name.
        dtype: of the trained weights; float32 under autocast, bfloat16 for pure bf16 training.

    Raises:
        UserError: an option or pattern matches nothing, a block does not exist, nothing is left to train.
    """
    ranks, counts = select_modules(model, options, targets)
    model.requires_grad_(False)
    layers: dict[str, AdapterLinear] = {}
    for name, rank in ranks.items():
        layers[name] = make_layer(model.get_submodule(targets.path_in_model(name)), rank, options, dtype)
    if not options.split_qkv:
        _join(layers, targets)
    for name, layer in layers.items():
        draws = generator(seed, "lora", name)
        layer.initialise(draws)
        if options.start != "default":
            assert isinstance(layer, LoRALinear)
            init_from_weights(layer, name, options.start, draws)
    _swap_in(model, layers, targets)
    return AdapterNetwork(layers, targets, options, counts)


def attach_lora(
    model: nn.Module,
    weights: Mapping[str, AdapterWeights],
    targets: LoraTargets,
    source: str,
    dtype: torch.dtype = torch.float32,
    alphas: AlphaTable | None = None,
) -> AdapterNetwork:
    """Wrap exactly the layers a LoRA or DoRA file speaks of, with its ranks and alphas, and load it.

    Layers for which the file has one A (a LoRA that was trained on the original ``qkv``) stay joined. ``alphas`` are
    those to go on with where the file's are others: the update stays the file's.
    """
    linears = dict(_linears(model, targets))
    if absent := sorted(weights.keys() - linears.keys()):
        raise UserError(f"{source}: the model has no {names_in_short(absent)}; it was trained on another model")
    layers: dict[str, AdapterLinear] = {}
    for name, w in weights.items():
        if w.kind not in ("lora", "dora"):
            raise UserError(f"{source}: is a {w.title}, which only a merge puts into a model; give a LoRA or DoRA")
        options = NetworkOptions(dim=w.rank, alpha=alphas.alpha_of(name, w.rank) if alphas else w.alpha, kind=w.kind)
        layers[name] = make_layer(linears[name], w.rank, options, dtype)
    _join(layers, targets, weights)
    kind = next((w.kind for w in weights.values()), "lora")
    network = AdapterNetwork(layers, targets, NetworkOptions(dim=0, alpha=0, kind=kind))
    network.load(weights, source)
    model.requires_grad_(False)
    _swap_in(model, layers, targets)
    return network


def _join(
    layers: Mapping[str, AdapterLinear], targets: LoraTargets, weights: Mapping[str, AdapterWeights] | None = None
) -> None:
    """Join fresh layers that are one in the original checkpoint, where all are there; with ``weights`` of one A."""
    found = [targets.keys.find(name) for name in layers] if not targets.own_names else []
    for names in dict.fromkeys(tuple(place.modules) for place in found if place and len(place.row.parts) > 1):
        parts = [layer for name in names if isinstance(layer := layers.get(name), LoRALinear) and layer.kind == "lora"]
        if len(parts) < len(names) or len({(layer.rank, layer.scale) for layer in parts}) > 1:
            continue
        if weights is None or all(same_down(weights[names[0]], weights[name]) for name in names):
            join(parts)


def select_modules(
    model: nn.Module, options: NetworkOptions, targets: LoraTargets
) -> tuple[dict[str, int], dict[str, int]]:
    """Return module name -> rank, and pattern -> how many modules it matched.

    Raises:
        UserError: as of :func:`inject_adapter`.
    """
    linears = dict(_linears(model, targets))
    kinds = {name: kind for name in linears if (kind := targets.group_of(name))}
    for name in _unused_modules(kinds, targets):
        del kinds[name]
    in_blocks = _in_chosen_blocks(list(kinds), options, targets)
    present = {kinds[name].name for name in in_blocks}
    for kind_name, option in options.dim_sources.items():
        unasked = option in targets.dim_lists and options.dims[kind_name] == 0
        if kind_name not in present and not unasked:
            raise UserError(f"network_args: {option}: this model has no {kind_name} layers in the chosen blocks")
    ranks = {name: options.dims.get(kinds[name].name, options.dim if kinds[name].default else 0) for name in in_blocks}
    ranks = {name: rank for name, rank in ranks.items() if rank}
    counts: dict[str, int] = {}
    if options.include_patterns:
        hits = _matching("include_patterns", options.include_patterns, list(ranks), counts)
        ranks = {name: rank for name, rank in ranks.items() if name in hits}
    if options.exclude_patterns:
        hits = _matching("exclude_patterns", options.exclude_patterns, list(ranks), counts)
        ranks = {name: rank for name, rank in ranks.items() if name not in hits}
    if not ranks:
        raise UserError("network_args: nothing is left to train; relax the *_dim, block or pattern options")
    asked: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for name, rank in ranks.items():
        source = options.dim_sources.get(kinds[name].name)
        shape: Any = linears[name].out_features, linears[name].in_features
        asked.setdefault((f"network_args: {source}" if source else "network_dim", rank), []).append(shape)
    for (said, rank), shapes in asked.items():
        refuse_large_rank(said, rank, shapes, options.kind)
    if options.factor > (largest := max(size for shapes in asked.values() for shape in shapes for size in shape)):
        raise UserError(f"network_args: factor={options.factor}: no layer has more than {largest} rows or columns")
    return ranks, counts


def refuse_large_rank(option: str, rank: int, shapes: Iterable[Sequence[int]], kind: str) -> None:
    """Refuse a rank above that of any matrix it is for; ``shapes``: [out, in] of them.

    LoKr, OFT and BOFT take the largest that fits, so that a large number means just that.
    """
    most = max((min(shape) for shape in shapes), default=rank)
    if kind in ("lora", "dora", "loha") and rank > most:
        raise UserError(f"{option}: a rank of {rank}, where no layer can have more than {most}; lower it")


def _unused_modules(names: Iterable[str], targets: LoraTargets) -> list[str]:
    """Return the layers of the last block that nothing is computed from."""
    index = {name: int(match[1]) for name in names if (match := re.fullmatch(targets.unused_modules, name))}
    return [name for name, block in index.items() if block == max(index.values())]


def _in_chosen_blocks(names: list[str], options: NetworkOptions, targets: LoraTargets) -> list[str]:
    """Return the names that lie in no deselected block."""
    for option, ranges in options.blocks.items():
        if ranges is None:
            continue
        pattern = targets.block_options[option]
        index = {name: int(match[1]) for name in names if (match := re.fullmatch(pattern, name))}
        count = max(index.values(), default=-1) + 1
        if (last := max((span.stop for span in ranges), default=0) - 1) >= count:
            raise UserError(f"network_args: {option}: no block {last}; this model's are 0 to {count - 1}")
        wanted = set(itertools.chain.from_iterable(ranges))
        names = [name for name in names if name not in index or index[name] in wanted]
    return names


def _matching(option: str, patterns: tuple[str, ...], names: list[str], counts: dict[str, int]) -> set[str]:
    """Return the names that some pattern matches; note each pattern's count in ``counts``."""
    matched: set[str] = set()
    for pattern in patterns:
        hits = [name for name in names if re.fullmatch(pattern, name)]
        if not hits:
            partly = next((name for name in names if re.search(pattern, name)), None)
            hint = f"a name looks like {names[0]!r}" if names else "none is left"
            if partly:
                hint = f"patterns match whole names, write '.*{pattern}.*' to match {partly!r}"
            raise UserError(f"network_args: {option}: {pattern!r} matches no trained module; {hint}")
        counts[f"{option} {pattern!r}"] = len(hits)
        matched.update(hits)
    return matched


def _swap_in(model: nn.Module, layers: Mapping[str, AdapterLinear], targets: LoraTargets) -> None:
    for name, layer in layers.items():
        layer.train(layer.base.training)
        model.set_submodule(targets.path_in_model(name), layer)


def _linears(model: nn.Module, targets: LoraTargets) -> Iterator[tuple[str, nn.Module]]:
    """Yield every layer with ``in_features`` and ``out_features`` by the name that files have for it.

    These are nn.Linear and its fp8 relatives.
    """
    for name, module in model.named_modules():
        if isinstance(module, AdapterLinear):
            raise ValueError(f"{name} has an adapter already")
        if hasattr(module, "in_features") and hasattr(module, "out_features"):
            yield targets.name_of(name), module


_LAYERS: dict[str, tuple[Callable[..., AdapterLinear], tuple[str, ...]]] = {
    "lora": (LoRALinear, ("alpha", "dropout", "rank_dropout", "module_dropout", "rank_stabilised")),
    "dora": (DoRALinear, ("alpha", "dropout", "rank_dropout", "rank_stabilised")),
    "lokr": (LoKrLinear, ("alpha", "factor", "decompose_both")),
    "loha": (LoHaLinear, ("alpha",)),
    "oft": (OFTLinear, ()),
    "boft": (BOFTLinear, ()),
}


def make_layer(base: nn.Module, rank: int, options: NetworkOptions, dtype: torch.dtype) -> AdapterLinear:
    """Return the layer of ``options.kind`` around ``base``, not yet initialised."""
    layer, names = _LAYERS[options.kind]
    return layer(base, rank, dtype=dtype, **{name: getattr(options, name) for name in names})
