"""The adapter layers of a model and of its text encoders, held by their original names.

Whatever wraps the model later (DDP, compile, checkpointing), the names here stay the ones diffusers has, so
that saving, loading and reporting need to know nothing about wrappers. Layers of text encoders, where they are
trained, stand in the same table; their names begin with the component's (``text_encoder.``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from library.errors import UserError, names_in_short
from library.models.layer_names import LoraTargets
from networks.adapters.base import AdapterLinear
from networks.adapters.lora import LoRALinear
from networks.files.adapters import LAYOUTS, PartialFit, load_adapter, save_adapter
from networks.files.weights import TITLES, AdapterWeights, check_strength, same_down
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
        fast = [parts["lora_B.weight"] for parts in trained]
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
        """Return module name -> weights, as :func:`networks.files.adapters.save_adapter` takes them for a format."""
        comfy = save_format is None or LAYOUTS[save_format].names.get("dora_scale", "dora_scale") is not None
        return {name: layer.weights(comfy) for name, layer in self.modules.items()}

    def save(self, path: str | Path, save_format: str, precision: str, metadata: Mapping[str, str]) -> None:
        """Write the present weights as a file; see :func:`networks.files.adapters.save_adapter`."""
        save_adapter(path, self.weights(save_format), self.targets, save_format, precision, metadata)

    def load_file(self, path: str | Path, allow_partial: bool = False) -> str:
        """Copy the weights of a file into the layers (``network_weights``); say what was loaded.

        With ``allow_partial``, what does not fit is named in the result and left as it was initialised.
        """
        left_out: list[str] = []
        file = load_adapter(path, self.targets, left_out if allow_partial else None, self.options.dora_norm)
        weights, notes = file.weights, "".join(f"\nnote: {note}" for note in file.notes)
        if not allow_partial:
            return self.load(weights, str(path)) + notes
        fit = PartialFit(str(path), left_out, sorted(weights.keys() - self.modules.keys()))
        for name, layer in self.modules.items():
            if name not in weights:
                continue
            if problem := self._misfit(name, weights):
                fit.misfits.append(f"{name} {problem[0]}")
            else:
                layer.load_weights(weights[name])
                fit.matched.add(name)
        return fit.line(self.modules) + notes

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
        problems = {n: problem for n in modules if (problem := self._misfit(n, weights))}
        if problems:
            named = names_in_short([f"{name} {what}" for name, (what, _) in problems.items()], shown=1)
            raise UserError(f"{source}: {named}; {next(iter(problems.values()))[1]}")
        rescaled = sum(layer.load_weights(weights[name]) for name, layer in modules.items())
        note = f", {rescaled} of them rescaled to this run's alpha / rank" if rescaled else ""
        note += f"; nothing of {' and '.join(sorted(fresh))} in it, trained from the start" if fresh else ""
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
            if isinstance(layer, LoRALinear) and layer.kind == "lora":
                layer.multiplier = multiplier
            elif multiplier != 1.0:
                raise UserError(f"a {TITLES[layer.kind]} changes weights as a whole and has no strength; leave it at 1")

    def describe(self) -> str:
        """Return a table of what is trained: kinds, ranks, parameters, and what each pattern matched."""
        rows: dict[tuple[str, int, float], list[AdapterLinear]] = {}
        for name, layer in self.modules.items():
            kind = self.targets.group_of(name)
            rows.setdefault((kind.name if kind else "other", layer.rank, layer.alpha), []).append(layer)
        dtype = str(self.parameters()[0].dtype).removeprefix("torch.")
        total = sum(p.numel() for p in self.parameters())
        title = f"{TITLES[self.options.kind]} on {self.targets.family}"
        lines = [f"{title}: {len(self.modules)} modules, {total:,} parameters, {dtype}"]
        for (kind_name, rank, alpha), layers in rows.items():
            count = sum(p.numel() for layer in layers for p in layer.trained().values())
            lines.append(f"  {kind_name:<12}{len(layers):>4} modules  rank {rank:<4} alpha {alpha:<6g}{count:>13,}")
        joined = [n for n, layer in self.modules.items() if isinstance(layer, LoRALinear) and layer.joined]
        if joined:
            places = [place for name in joined if (place := self.targets.keys.find(name))]
            originals = ", ".join(dict.fromkeys(place.row.original.replace("{i}", "*") for place in places))
            lines.append(
                f"  {len(joined)} of them share one LoRA on each {originals} (split_qkv=False), as in sd-scripts"
            )
        lines += [f"  {pattern}: {count} modules" for pattern, count in self._pattern_counts.items()]
        return "\n".join(lines)
