"""The adapter layers of a model and of its text encoders: put into it, and held by their original names.

:func:`inject_adapter` reads the model's linear layers, sorts them into the family's kinds, lets ranks, block
choices and patterns decide, and swaps each chosen layer for an :class:`~networks.adapters.base.AdapterLinear` around
it. An option that decides nothing is an error: a typing mistake in a pattern otherwise costs a day of training.

A layer's initial weights depend on (seed, module name) alone, so that a pattern changes no other layer.

Whatever wraps the model later (DDP, compile, checkpointing), the names here stay the ones diffusers has, so
that saving, loading and reporting need to know nothing about wrappers. Layers of text encoders, where they are
trained, stand in the same table; their names begin with the component's (``text_encoder.``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from library.errors import UserError, counted, names_in_short, undone
from library.models.layer_names import LoraTargets
from library.randomness import generator
from networks.adapters.base import AdapterLinear
from networks.adapters.combined import CombinedLinear
from networks.adapters.lora import DoRALinear, LoRALinear, init_pissa, join
from networks.adapters.lycoris import LoHaLinear, LoKrLinear, other_factors, refuse_large_factor
from networks.adapters.tokens import TiedHead, TokenRows
from networks.files.adapters import load_trainable
from networks.files.layouts import LAYOUTS
from networks.files.metadata import AlphaTable
from networks.files.weights import (
    ADDED_INPUTS,
    TITLES,
    AdapterWeights,
    TokenRowWeights,
    check_strength,
    fitted,
    same_down,
)
from networks.files.writing import save_adapter
from networks.options import NetworkOptions


class AdapterNetwork:
    """The adapter layers of one run.

    Attributes:
        modules: module name -> layer, in the model's order.
        targets: the family's row.
        options: what it was made from.
    """

    def __init__(
        self,
        modules: Mapping[str, AdapterLinear],
        targets: LoraTargets,
        options: NetworkOptions,
        pattern_counts: Mapping[str, int] | None = None,
    ) -> None:
        self.modules = dict(modules)
        self.targets = targets
        self.options = options
        self._pattern_counts = dict(pattern_counts or {})

    def parameters(self) -> list[nn.Parameter]:
        """All trained parameters, a layer's together (A before B), in the model's order."""
        return [p for layer in self.modules.values() for p in layer.trained().values()]

    def joined(self, other: Self) -> Self:
        """Return this network and ``other``, a network of further components, as one."""
        counts = self._pattern_counts | other._pattern_counts
        return type(self)(self.modules | other.modules, self.targets, self.options, counts)

    def component(self, name: str) -> Self:
        """Return the part that lies in one component: "transformer", "text_encoder"."""
        modules = {key: layer for key, layer in self.modules.items() if self.targets.component_of(key) == name}
        return type(self)(modules, self.targets, self.options, self._pattern_counts)

    def parameter_groups(self, lr: float, loraplus_ratio: float | None = None, name: str = "lora") -> list[dict]:
        """Return optimizer groups with ``params``, ``lr`` and ``name``.

        One group, called ``name``. With a LoRA+ ratio (Hayou et al. 2024) two, ``<name>_A`` and ``<name>_B``, the
        second, of all ``lora_B``, at ``lr * loraplus_ratio``.
        """
        if loraplus_ratio is None:
            return [{"params": self.parameters(), "lr": lr, "name": name}]
        trained = [parts for layer in self.modules.values() if (parts := layer.trained())]
        fast = [parts["lora_B.weight"] for parts in trained if "lora_B.weight" in parts]
        slow = [parameter for parts in trained for part, parameter in parts.items() if part != "lora_B.weight"]
        return [
            {"params": slow, "lr": lr, "name": f"{name}_A"},
            {"params": fast, "lr": lr * loraplus_ratio, "name": f"{name}_B"},
        ]

    def state_dict(self) -> dict[str, Tensor]:
        """Return ``<module>.<parameter>`` (``.lora_A.weight``), detached, where they lie."""
        return {f"{name}.{part}": t for name, layer in self.modules.items() for part, t in layer.state().items()}

    @torch.no_grad()
    def weights(self, save_format: str | None = None) -> dict[str, AdapterWeights]:
        """Return module name -> weights, as :func:`networks.files.writing.save_adapter` takes them for a format."""
        comfy = save_format is None or LAYOUTS[save_format].names.get("dora_scale", "dora_scale") is not None
        return {name: layer.weights(comfy) for name, layer in self.modules.items()}

    def save(self, path: str | Path, save_format: str, precision: str, metadata: Mapping[str, str]) -> None:
        """Write the present weights as a file; see :func:`networks.files.writing.save_adapter`."""
        save_adapter(path, self.weights(save_format), self.targets, save_format, precision, metadata)

    def load_file(self, path: str | Path) -> str:
        """Copy the weights of a file into the layers (``network_weights``); say what was loaded."""
        file = load_trainable(path, self.targets)
        return self.load(file.weights, str(path)) + "".join(f"\nnote: {note}" for note in file.notes)

    @torch.no_grad()
    def load(self, weights: Mapping[str, AdapterWeights], source: str) -> str:
        """Copy the weights of a file into the layers (``network_weights``); say what was loaded.

        Where a LoRA's alpha / rank is not this network's, the difference goes into lora_B: the update stays what the
        file says, and alpha stays what the config says. A component of which the file has nothing (a text encoder that
        is trained from now on) stays as it was initialised.

        Args:
            weights: module name -> weights. LoRAs whose update is zero need not be in this network.
            source: the file's name, for messages.

        Raises:
            UserError: nothing or only a part of the names matches, or a kind or shape differs; the names are given.
        """
        if not weights.keys() & self.modules.keys():
            names = names_in_short(sorted(weights))
            raise UserError(f"{source}: none of its {len(weights)} modules ({names}) is trained here; wrong model?")
        in_file = {self.targets.component_of(name) for name in weights}
        fresh = {self.targets.component_of(name) for name in self.modules} - in_file
        modules = {n: layer for n, layer in self.modules.items() if self.targets.component_of(n) not in fresh}
        self._refuse_other_layers(modules, weights, source)
        keys, given = self.targets.keys, weights
        weights = {name: fitted(name, given[name], keys, layer.in_features) for name, layer in modules.items()}
        problems = {n: problem for n in modules if (problem := self._misfit(n, weights))}
        if problems:
            (name, (what, remedy)), *others = problems.items()
            more = f", and {counted(len(others), 'other layer')} likewise" if others else ""
            raise UserError(f"{source}: {name} {what}{more}; {remedy}")
        rescaled = sum(layer.load_weights(weights[name]) for name, layer in modules.items())
        note = f", {rescaled} of them rescaled to this run's alpha / rank" if rescaled else ""
        note += f"; nothing of {' and '.join(sorted(fresh))} in it, trained from the start" if fresh else ""
        note += "".join(f"; {name}: {ADDED_INPUTS}" for name in weights if weights[name] is not given[name])
        return f"{source}: {len(modules)} modules loaded{note}"

    def _misfit(self, name: str, weights: Mapping[str, AdapterWeights]) -> tuple[str, str] | None:
        """Return why a file's weights are none for the layer ``name``, and what to do about it."""
        layer = self.modules[name]
        problem = layer.misfit(weights[name])
        if problem is None and isinstance(layer, LoRALinear) and layer.joined is not None:
            holder = next(other for other in self.modules if self.modules[other] is layer.joined.holder)
            if holder not in weights or not same_down(weights[holder], weights[name]):
                problem = f"has a LoRA of its own, here it has one with {holder}", "set split_qkv=True in network_args"
        return problem

    def _refuse_other_layers(
        self, modules: Mapping[str, AdapterLinear], weights: Mapping[str, AdapterWeights], source: str
    ) -> None:
        def acts(name: str) -> bool:
            return weights[name].kind != "lora" or bool(weights[name].tensors["up"].any())

        extra = sorted(name for name in weights.keys() - modules.keys() if acts(name))
        missing = sorted(modules.keys() - weights.keys())
        if not extra and not missing:
            return
        parts = [f"not trained here: {names_in_short(extra)}"] if extra else []
        parts += [f"not in the file: {names_in_short(missing)}"] if missing else []
        in_text = not missing and all(self.targets.text_encoder_of(name) for name in extra)
        remedy = "set text_encoder_lr to train them too" if in_text else "choose the same layers with network_args"
        raise UserError(f"{source}: {'; '.join(parts)}; {remedy}")

    def set_multiplier(self, multiplier: float) -> None:
        """Set the strength of all updates; 1.0 is as trained, and all that kinds other than LoRA have."""
        check_strength("LoRA", multiplier)
        for layer in self.modules.values():
            if isinstance(layer, (TokenRows, CombinedLinear)) or layer.kind == "lora":
                layer.multiplier = multiplier  # type: ignore[assignment]
            elif multiplier != 1.0:
                raise UserError(f"a {TITLES[layer.kind]} changes weights as a whole and has no strength; leave it at 1")

    @contextmanager
    def at_strength(self, strength: float) -> Iterator[None]:
        """Inside the block all updates have this strength; then they are as trained."""
        with undone("the adapter's strength", lambda: self.set_multiplier(1.0)):
            self.set_multiplier(strength)
            yield

    def set_row_strengths(self, strengths: Tensor | None) -> None:
        """Let each sample of the batches to come be trained at a strength of its own: the i-th at ``strengths[i]``.

        They hold in training mode alone, and until others are set: blocks recomputed in backward ask for them again.
        """
        for layer in self.modules.values():
            assert isinstance(layer, LoRALinear)
            layer.row_strengths = strengths

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """Inside the block every layer is its base: the model answers as if it had never been trained."""
        before = [(layer, layer.bypassed) for layer in self.modules.values()]

        def put_back() -> None:
            for layer, was_bypassed in before:
                layer.bypassed = was_bypassed

        with undone("bypassing the adapter", put_back):
            for layer, _ in before:
                layer.bypassed = True
            yield

    def describe(self) -> str:
        """Return a table of what is trained: kinds, ranks, parameters, and what each pattern matched."""
        rows: dict[tuple[str, str], list[AdapterLinear]] = {}
        for name, layer in self.modules.items():
            kind = self.targets.group_of(name)
            rows.setdefault((kind.name if kind else layer.kind, layer.size), []).append(layer)
        dtype = str(self.parameters()[0].dtype).removeprefix("torch.")
        total = sum(p.numel() for p in self.parameters())
        title = f"{TITLES[self.options.kind]} on {self.targets.family}"
        lines = [f"{title}: {len(self.modules)} modules, {total:,} parameters, {dtype}"]
        for (kind_name, size), layers in rows.items():
            count = sum(p.numel() for layer in layers for p in layer.trained().values())
            lines.append(f"  {kind_name:<12}{len(layers):>4} modules  {size:<22}{count:>13,}")
        if self.options.kind == "lokr":
            sides = sum(layer.in_features + layer.out_features for layer in self.modules.values())
            lines.append(f"  as many parameters as a LoRA of rank {total / sides:.1f} has")
            shapes: dict[int, list[tuple[int, int]]] = {}
            for each in (layer for layer in self.modules.values() if isinstance(layer, LoKrLinear)):
                shapes.setdefault(each.factor, []).append(each.w1_shape)
            found = (other_factors(factor, each) for factor, each in shapes.items() if factor > 0)
            lines += [f"  {words}" for words in found if words]
            if full := sum(isinstance(layer, LoKrLinear) and layer.is_full for layer in self.modules.values()):
                which = "all" if full == len(self.modules) else f"{full} of the"
                lines.append(f"  rank and alpha have no effect on {which} modules: their matrices are full")
        joined = [n for n, layer in self.modules.items() if isinstance(layer, LoRALinear) and layer.joined]
        if joined:
            places = [place for name in joined if (place := self.targets.keys.find(name))]
            originals = ", ".join(dict.fromkeys(place.row.original.replace("{i}", "*") for place in places))
            lines.append(
                f"  {len(joined)} of them share one LoRA on each {originals} (split_qkv=False), as in sd-scripts"
            )
        lines += [f"  {pattern}: {count} modules" for pattern, count in self._pattern_counts.items()]
        return "\n".join(lines)


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
        group = targets.group_of(name)
        own = replace(options, factor=options.factors.get(group.name, options.factor)) if group else options
        layers[name] = make_layer(model.get_submodule(targets.path_in_model(name)), rank, own, dtype)
    if not options.split_qkv:
        _join(layers, targets)
    for name, layer in layers.items():
        draws = generator(seed, "lora", name)
        layer.initialise(draws)
        if options.pissa:
            assert isinstance(layer, LoRALinear)
            init_pissa(layer, name, draws)
    if tokens := options.trainable_token_indices:
        names = ["embedding"] if model.config.tied else ["embedding", "lm_head"]  # type: ignore[union-attr]
        layers |= {targets.name_of(name): TokenRows(model.get_submodule(name), tokens, dtype) for name in names}
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
    tokens = {n: w.tensors["token_indices"].tolist() for n, w in weights.items() if isinstance(w, TokenRowWeights)}
    linears = dict(_linears(model, targets))
    if absent := sorted(weights.keys() - linears.keys() - tokens.keys()):
        raise UserError(f"{source}: the model has no {names_in_short(absent)}; it was trained on another model")
    layers: dict[str, AdapterLinear] = {}
    for name, w in weights.items():
        if name in tokens:
            layers[name] = TokenRows(model.get_submodule(targets.path_in_model(name)), tokens[name], dtype)
            continue
        if w.kind not in ("lora", "dora"):
            layers[name] = CombinedLinear(linears[name])
            continue
        options = NetworkOptions(dim=w.rank, alpha=alphas.alpha_of(name, w.rank) if alphas else w.alpha, kind=w.kind)
        layers[name] = make_layer(linears[name], w.rank, options, dtype)
    _join(layers, targets, weights)
    kind = next((w.kind for name, w in weights.items() if name not in tokens), "lora")
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
        is_left_out = option in targets.dim_lists and options.dims[kind_name] == 0
        if kind_name not in present and not is_left_out:
            raise UserError(f"network_args: {option}: this model has no {kind_name} layers in the chosen blocks")
    ranks = {name: options.dims.get(kinds[name].name, options.dim if kinds[name].default else 0) for name in in_blocks}
    ranks = {name: rank for name, rank in ranks.items() if rank}
    counts: dict[str, int] = {}
    if options.include_patterns:
        hits = _matching("include_patterns", options.include_patterns, list(ranks), counts, targets)
        ranks = {name: rank for name, rank in ranks.items() if name in hits}
    if options.exclude_patterns:
        hits = _matching("exclude_patterns", options.exclude_patterns, list(ranks), counts, targets)
        ranks = {name: rank for name, rank in ranks.items() if name not in hits}
    if not ranks:
        raise UserError("network_args: nothing is left to train; relax the *_dim, block or pattern options")
    shapes_by_rank: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for name, rank in ranks.items():
        source = options.dim_sources.get(kinds[name].name)
        shape: Any = linears[name].out_features, linears[name].in_features
        shapes_by_rank.setdefault((f"network_args: {source}" if source else "network_dim", rank), []).append(shape)
    for (option_name, rank), shapes in shapes_by_rank.items():
        refuse_large_rank(option_name, rank, shapes, options.kind)
    _refuse_factors({name: kinds[name].name for name in ranks}, linears, options)
    return ranks, counts


def _refuse_factors(kinds: Mapping[str, str], linears: Mapping[str, Any], options: NetworkOptions) -> None:
    """Refuse a factor of LoKr for layers that are not trained, or that are smaller; ``kinds``: module -> kind."""
    for kind, factor in [(None, options.factor), *options.factors.items()]:
        option, names = f"{kind}_factor" if kind else "factor", [n for n in kinds if kind in (None, kinds[n])]
        if not names:
            raise UserError(f"network_args: {option}: no {kind} layers are trained; set {kind}_dim too, or remove it")
        shapes = [(linears[name].out_features, linears[name].in_features) for name in names]
        refuse_large_factor(f"network_args: {option}", factor, shapes)


def refuse_large_rank(option: str, rank: int, shapes: Iterable[Sequence[int]], kind: str) -> None:
    """Refuse a rank above that of any matrix it is for; ``shapes``: [out, in] of them.

    LoKr takes the largest that fits, so that a large number means just that.
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


def _matching(
    option: str, patterns: tuple[str, ...], names: list[str], counts: dict[str, int], targets: LoraTargets
) -> set[str]:
    """Return the names that some pattern matches; note each pattern's count in ``counts``."""
    matched: set[str] = set()
    for pattern in patterns:
        hits = [name for name in names if targets.matches(pattern, name)]
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
        if isinstance(layer, TokenRows) and isinstance(layer.base, nn.Embedding) and model.config.tied:  # type: ignore[union-attr]
            model.set_submodule("lm_head", TiedHead(model.get_submodule("lm_head"), layer))


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
    "lora": (LoRALinear, ("alpha", "dropouts", "rank_stabilised")),
    "dora": (DoRALinear, ("alpha", "dropouts", "rank_stabilised")),
    "lokr": (LoKrLinear, ("alpha", "factor", "decompose_both", "full_matrix")),
    "loha": (LoHaLinear, ("alpha",)),
}


def make_layer(base: nn.Module, rank: int, options: NetworkOptions, dtype: torch.dtype) -> AdapterLinear:
    """Return the layer of ``options.kind`` around ``base``, not yet initialised."""
    layer, names = _LAYERS[options.kind]
    return layer(base, rank, dtype=dtype, **{name: getattr(options, name) for name in names})
