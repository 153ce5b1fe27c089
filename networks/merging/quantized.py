"""Merging adapters into a model that is served quantised, so that they still act afterwards.

    into bf16 weights      Q(W + D) with fresh scales, by the recipe that is asked for; every layer of the recipe
    into a quantised file  dequantised, D added, each layer in its own format; scales stay where they suffice, and
                           layers without an update, markers and scales of activations keep their bits

Q rounds to nearest, stochastically, or compensated on calibration data (``library.precision.parity.compensated``). What
rounding to nearest would leave of each update is known before anything is written (:func:`rounding_retention`). Into
bf16 weights nearly all of it is left, since W is spread over the steps of the grid; into a quantised file, whose
weights are on the grid, an update that is smaller than half a step is not. Compensated weights are made one layer at a
time and wait in small files beside the target until it is written, since the file's order wants all scales first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from library.models.layer_names import LoraTargets
from library.precision.checkpoint import QuantizedFile
from library.precision.files.base import QuantizedWeight, Scheme
from library.precision.names import LayoutKind
from library.precision.parity.activations import LayerInputs
from library.precision.parity.compensated import merge_into, quantize_compensated
from library.precision.parity.layer_errors import UpdateRetention, update_retention
from library.precision.recipe import Recipe
from library.precision.writing import linear_weights
from library.safetensors_io import RowRange
from networks.files.base import Base, BaseModule, find_modules
from networks.merging.merge import Update, merge_tensor


@dataclass
class QuantizedMerge:
    """A merge that is being made: where each tensor comes from and what has been rounded already.

    Attributes:
        base: the model.
        updates: base tensor -> its updates.
        kind, recipe: what is written; those of the base where it is quantised.
        spool: folder for weights that are rounded before the file is written.
        metadata: strings that are added to the file's.
    """

    base: Base
    updates: Mapping[str, Sequence[Update]]
    kind: LayoutKind
    recipe: Recipe
    targets: LoraTargets
    spool: Path
    metadata: dict[str, str] = field(default_factory=dict, init=False)
    _made: dict[str, tuple[QuantizedWeight, Path]] = field(default_factory=dict, init=False)

    @property
    def layout(self) -> QuantizedFile | None:
        """What of the base is quantised."""
        return self.base.weights.quantized

    def quantized(self) -> list[str]:
        """Return the tensors that will be quantised."""
        if self.layout is None:
            linears = linear_weights(self.base.weights)
            shape = self.base.weights.shape
            return [f"{name}.weight" for name in linears if self.recipe.scheme_of(name, shape(f"{name}.weight"))]
        return [name for name in self.layout.weights if len(self.base.weights.shape(name)) == 2]

    def modules(self) -> dict[str, list[str]]:
        """Return quantised tensor -> the modules stacked in it; those of unknown modules are left out."""
        stacked: dict[str, list[str]] = {name: [] for name in self.quantized()}
        for name, place in self.places.items():
            if place.tensor in stacked:
                stacked[place.tensor].append(name)
        return {tensor: names for tensor, names in stacked.items() if names}

    @cached_property
    def places(self) -> dict[str, BaseModule]:
        """Module -> its place in the base; a third of a second for FLUX, and asked for layer by layer."""
        return find_modules(self.base.weights, self.targets.keys, self.targets.family)

    def stored(self, name: str) -> QuantizedWeight:
        """Return a weight of a quantised base."""
        quantized = self.base.weights.read_quantized([RowRange(name)])
        assert quantized is not None
        return quantized

    def weight(self, name: str) -> Tensor:
        """Return a weight of the base, fp32."""
        return self.base.weights.read_float(RowRange(name))

    def merged(self, name: str) -> Tensor:
        """Return a weight with its updates, fp32, before rounding."""
        return merge_tensor(f"{self.base.path}: {name}", self.weight(name), self.updates.get(name, ()), torch.float32)

    def scheme_of(self, name: str) -> Scheme:
        """Return how one tensor is made, with scales as the file will have them; each of a quantised base its own."""
        if self.layout is not None:
            return self.layout.weights[name].scheme
        dtype, shape = self.base.weights.entries[name].spec
        return self.recipe.scheme.store(self.kind, name, shape, dtype).scheme

    def steps(self, name: str) -> Tensor | None:
        """Return the steps of a weight of a quantised base, which a merge keeps where they suffice."""
        return self.stored(name).steps() if self.layout is not None else None

    def compensate(self, name: str, inputs: LayerInputs) -> UpdateRetention | None:
        """Round a tensor by its inputs and keep it for the file; return what is left of its update, if it has one."""
        scheme, moment = self.scheme_of(name), inputs.moment
        weight, merged = self.weight(name).to(moment.device), self.merged(name).to(moment.device)
        update = merged - weight
        if self.layout is None:
            made = quantize_compensated(merged, moment, scheme)
        elif name not in self.updates:
            return None
        else:
            made = merge_into(self.stored(name), update, moment, scheme)
        self._keep(name, made)
        if name not in self.updates:
            return None
        return update_retention(made.dequantize(torch.float32), weight, update, moment)

    def rounded(self, name: str) -> QuantizedWeight | None:
        """Return a weight as it goes into the file; see ``writing.WeightChanges``."""
        if name in self._made:
            outline, path = self._made[name]
            return outline.with_tensors(load_file(path))
        if name not in self.updates:
            return None
        layer = name.removesuffix(".weight")
        return self.recipe.quantize(layer, self.merged(name), self.scheme_of(name), self.steps(name))

    def high(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that stays as it is, with its updates; see ``writing.WeightChanges``."""
        tensor = read()
        if name not in self.updates:
            return tensor
        return merge_tensor(f"{self.base.path}: {name}", tensor, self.updates[name], tensor.dtype)

    def _keep(self, name: str, made: QuantizedWeight) -> None:
        path = self.spool / f"{len(self._made)}.safetensors"
        save_file({field: tensor.cpu().contiguous() for field, tensor in made.tensors().items()}, path)
        self._made[name] = made.to("meta"), path


def rounding_retention(merge: QuantizedMerge) -> Iterator[tuple[str, UpdateRetention]]:
    """Yield for each tensor with updates that is quantised what rounding as the recipe does leaves of them."""
    served = set(merge.quantized())
    for name in merge.updates:
        if name not in served:
            continue
        scheme, layer = merge.scheme_of(name), name.removesuffix(".weight")
        weight, wanted = merge.weight(name), merge.merged(name)
        base = weight
        if merge.layout is None:
            base = merge.recipe.quantize(layer, weight, scheme).dequantize(torch.float32)
        rounded = merge.recipe.quantize(layer, wanted, scheme, merge.steps(name)).dequantize(torch.float32)
        yield name, update_retention(rounded, base, wanted - weight)
