"""The adapter layers of a model and of its text encoders, held by their original names.

Whatever wraps the model later (DDP, compile, checkpointing), the names here stay the ones diffusers has, so
that saving, loading and reporting need to know nothing about wrappers. Layers of text encoders, where they are
trained, stand in the same table; their names begin with the component's (``text_encoder.``).

:class:`AdapterNetwork` is what training knows, whatever the kind of adapter; :class:`LoraNetwork` has what is LoRA's
alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from library.errors import UserError
from library.models.layer_names import LoraTargets
from networks.adapters.base import AdapterLinear
from networks.adapters.lora import LoRALinear
from networks.files.adapters import layer_tensors, load_adapter, save_adapter, take_tensors
from networks.files.lora import load_lora, save_lora
from networks.files.weights import TITLES, LoraWeights, names_in_short
from networks.options import NetworkOptions
from networks.partial_fit import PartialFit

Layer = TypeVar("Layer", bound=AdapterLinear)


class AdapterNetwork(Generic[Layer]):
    """The adapter layers of one run.

    Attributes:
        modules: module name -> layer, in the model's order.
        targets: the family's row.
        options: what it was made from.
    """

    def __init__(
        self,
        modules: Mapping[str, Layer],
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
        fast: list[nn.Parameter] = []
        slow: list[nn.Parameter] = []
        for layer in self.modules.values():
            for part, parameter in layer.trained().items():
                (fast if part == "lora_B.weight" else slow).append(parameter)
        return [
            {"params": slow, "lr": lr, "name": f"{name}_A"},
            {"params": fast, "lr": lr * loraplus_ratio, "name": f"{name}_B"},
        ]

    def state_dict(self) -> dict[str, Tensor]:
        """Return ``<module>.<parameter>`` (``.lora_A.weight``), detached, where they lie."""
        return {f"{name}.{part}": t for name, layer in self.modules.items() for part, t in layer.kept().items()}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy what :meth:`state_dict` gave back into the layers, bit for bit.

        Raises:
            UserError: names or shapes differ: the state belongs to another network.
        """
        own = self.state_dict()
        if wrong := sorted(own.keys() ^ tensors.keys()):
            names = names_in_short(wrong)
            raise UserError(f"LoRA state: tensors differ from this network's ({names}); use the config it had")
        for name, tensor in own.items():
            if tensor.shape != tensors[name].shape:
                shapes = f"{tuple(tensors[name].shape)}, here {tuple(tensor.shape)}"
                raise UserError(f"LoRA state: {name} has shape {shapes}; use the config it was saved with")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    def save(self, path: str | Path, save_format: str, precision: str, metadata: Mapping[str, str]) -> None:
        """Write the present weights as a file; see :func:`networks.files.adapters.save_adapter`."""
        adapters = {name: layer_tensors(layer, save_format) for name, layer in self.modules.items()}
        save_adapter(path, adapters, self.targets, save_format, precision, metadata)

    def load_file(self, path: str | Path, allow_partial: bool = False) -> str:
        """Copy the weights of a file of the same kind into the layers (``network_weights``); say what was loaded.

        With ``allow_partial``, what does not fit is named in the result and left as it was initialised.

        Raises:
            UserError: the file is of another kind, or has other layers, shapes or alphas; or nothing of it fits.
        """
        left_out: list[str] = []
        adapters = load_adapter(path, self.targets, left_out if allow_partial else None)
        if allow_partial:
            fit = PartialFit(str(path), left_out, sorted(adapters.keys() - self.modules.keys()))
            for name, layer in self.modules.items():
                if name in adapters:
                    with fit.trying(name):
                        take_tensors(layer, adapters[name], name)
            return fit.line(self.modules)
        if alone := sorted(adapters.keys() ^ self.modules.keys()):
            raise UserError(f"{path}: layers differ from those trained here ({names_in_short(alone)}); choose the same")
        for name, layer in self.modules.items():
            take_tensors(layer, adapters[name], f"{path}: {name}")
        return f"{path}: {len(adapters)} modules loaded"

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Make the model its base inside the block: for samples without the LoRA."""
        before = {name: layer.enabled for name, layer in self.modules.items()}
        try:
            for layer in self.modules.values():
                layer.enabled = False
            yield
        finally:
            for name, layer in self.modules.items():
                layer.enabled = before[name]

    def describe(self) -> str:
        """Return a table of what is trained: kinds, ranks, parameters, and what each pattern matched."""
        rows: dict[tuple[str, int, float], list[Layer]] = {}
        for name, layer in self.modules.items():
            kind = self.targets.kind_of(name)
            rows.setdefault((kind.name if kind else "other", layer.rank, layer.alpha), []).append(layer)
        dtype = str(self.parameters()[0].dtype).removeprefix("torch.")
        total = sum(p.numel() for p in self.parameters())
        title = f"{TITLES[self.options.kind]} on {self.targets.family}"
        lines = [f"{title}: {len(self.modules)} modules, {total:,} parameters, {dtype}"]
        for (kind_name, rank, alpha), layers in rows.items():
            count = sum(p.numel() for layer in layers for p in layer.trained().values())
            lines.append(f"  {kind_name:<12}{len(layers):>4} modules  rank {rank:<4} alpha {alpha:<6g}{count:>13,}")
        lines += [f"  {pattern}: {count} modules" for pattern, count in self._pattern_counts.items()]
        return "\n".join(lines)


class LoraNetwork(AdapterNetwork[LoRALinear]):
    """The LoRA layers of one run; see :class:`AdapterNetwork`."""

    @torch.no_grad()
    def weights(self) -> dict[str, LoraWeights]:
        """Return module name -> weights, as :func:`networks.files.lora.save_lora` takes them.

        A layer that takes its start off again is a LoRA of twice the rank. alpha is what makes alpha / rank the scale.
        """
        return {name: _weights_of(layer) for name, layer in self.modules.items()}

    def save(self, path: str | Path, save_format: str, precision: str, metadata: Mapping[str, str]) -> None:
        """Write the present weights as a LoRA file; see :func:`networks.files.lora.save_lora`."""
        save_lora(path, self.weights(), self.targets, save_format, precision, metadata)

    def load_file(self, path: str | Path, allow_partial: bool = False) -> str:
        """Copy the weights of a LoRA file into the layers; see :meth:`load` and the base class."""
        if not allow_partial:
            return self.load(load_lora(path, self.targets).weights, str(path))
        left_out: list[str] = []
        weights = load_lora(path, self.targets, left_out).weights
        fit = PartialFit(str(path), left_out, sorted(weights.keys() - self.modules.keys()))
        for name in self.modules:
            if name in weights:
                with fit.trying(name):
                    if problem := self._shape_problem(name, weights[name]):
                        raise UserError(problem)
                    self._take(name, weights[name])
        return fit.line(self.modules)

    @torch.no_grad()
    def load(self, weights: Mapping[str, LoraWeights], source: str) -> str:
        """Copy the weights of a LoRA file into the layers (``network_weights``).

        Where the file's alpha / rank is not this network's, the difference goes into lora_B: the update stays
        what the file says, and alpha stays what the config says. A component of which the file has nothing (a text
        encoder that is trained from now on) stays as it was initialised.

        Args:
            weights: module name -> weights, from :func:`networks.files.lora.load_lora`. Modules whose update is
                zero need not be in this network.
            source: the file's name, for messages.

        Returns:
            A line that says what was loaded.

        Raises:
            UserError: nothing or only a part of the names matches, or a shape differs; the names are given.
        """
        if not weights.keys() & self.modules.keys():
            names = names_in_short(sorted(weights))
            raise UserError(f"{source}: none of its {len(weights)} modules ({names}) is trained here; wrong model?")
        in_file = {self.targets.component_of(name) for name in weights}
        fresh = {self.targets.component_of(name) for name in self.modules} - in_file
        modules = {n: layer for n, layer in self.modules.items() if self.targets.component_of(n) not in fresh}
        extra = sorted(n for n in weights.keys() - modules.keys() if bool(weights[n].up.any()))
        missing = sorted(modules.keys() - weights.keys())
        if extra or missing:
            parts = [f"not trained here: {names_in_short(extra)}"] if extra else []
            parts += [f"not in the file: {names_in_short(missing)}"] if missing else []
            in_text = not missing and all(self.targets.text_encoder_of(name) for name in extra)
            remedy = "set text_encoder_lr to train them too" if in_text else "choose the same layers with network_args"
            raise UserError(f"{source}: {'; '.join(parts)}; {remedy}")
        problems = [p for name in modules if (p := self._shape_problem(name, weights[name]))]
        if problems:
            raise UserError(f"{source}: {names_in_short(problems)}; set network_dim and *_dim as in the file")
        rescaled = 0
        for name in modules:
            rescaled += self._take(name, weights[name])
        note = f", {rescaled} of them rescaled to this run's alpha / rank" if rescaled else ""
        note += f"; nothing of {' and '.join(sorted(fresh))} in it, trained from the start" if fresh else ""
        return f"{source}: {len(modules)} modules loaded{note}"

    @torch.no_grad()
    def _take(self, name: str, read: LoraWeights) -> bool:
        """Copy one module's weights, and return whether they were rescaled."""
        layer = self.modules[name]
        ratio = read.scale / layer.scale
        layer.lora_A.weight.copy_(read.down)
        layer.lora_B.weight.copy_(read.up if ratio == 1 else read.up.float() * ratio)
        return ratio != 1

    def _shape_problem(self, name: str, read: LoraWeights) -> str | None:
        layer = self.modules[name]
        if read.rank != layer.rank:
            return f"{name} has rank {read.rank}, this network {layer.rank}"
        theirs, ours = (read.up.shape[0], read.down.shape[1]), (layer.out_features, layer.in_features)
        if theirs != ours:
            return f"{name} is for a layer of {theirs[0]}x{theirs[1]}, the model's has {ours[0]}x{ours[1]}"
        return None

    def set_multiplier(self, multiplier: float) -> None:
        """Set the strength of all updates; 1.0 is as trained."""
        for layer in self.modules.values():
            layer.multiplier = multiplier


def _weights_of(layer: LoRALinear) -> LoraWeights:
    """Return one layer's weights; the alpha it was given, where that is the scale's numerator as it stands."""
    plain = layer.width == layer.rank and not layer.rank_stabilised
    return LoraWeights(layer.down().detach(), layer.up().detach(), layer.alpha if plain else layer.scale * layer.width)
