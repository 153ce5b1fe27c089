"""Deployed weights, behind one interface: a file or folder in fp8 or in high precision, or a recipe that makes them.

The report asks this module what the weights are called, which model they are to be loaded as, for the loaded module,
which of its layers a server multiplies in low precision, and for what the file says of their inputs. What a
deployment's weights are stored as is known here alone: a format that is new is a :class:`DeployedWeights` with another
:meth:`~DeployedWeights.load`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from library.config.schema import ModelConfig
from library.errors import UserError
from library.models.family import Family
from library.models.family_by_name import family_class, with_transformer
from library.precision.checkpoint import ServedInput, WeightFiles
from library.precision.files.base import QuantizedWeight
from library.precision.files.fp8 import Fp8Scheme
from library.precision.fp8_numbers import E4M3FN, format_named
from library.precision.linear import QuantizedLinear
from library.precision.names import GRANULARITIES, SCHEME_NAMES, USUAL_LAYOUTS, LayoutKind
from library.precision.recipe import Recipe, WeightLoader, describe_base, scheme_named

_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class LoadedWeights:
    """A deployed transformer.

    Attributes:
        module: without a LoRA beside it.
        quantised: its layers that a server may multiply in low precision, and their weights without numbers; None of
            one that is in high precision here.
        precision: the whole in words, for people and for a LoRA's metadata.
    """

    module: nn.Module
    quantised: Mapping[str, QuantizedWeight | None]
    precision: str


@dataclass(frozen=True)
class DeployedWeights:
    """The weights of a file or folder, or those a recipe makes of the reference's.

    Attributes:
        name: for people. merged: the LoRA is in the file already.
        path, recipe: one of the two.
    """

    name: str
    path: Path | None
    recipe: Recipe | None
    merged: bool = False

    def describe(self) -> str:
        """Return what it is in words."""
        inside = ", LoRA merged in" if self.merged else ""
        return f"{self.path.name if self.path else self.recipe.describe() if self.recipe else ''}{inside}"

    def config(self, reference: ModelConfig) -> ModelConfig:
        """Return the config to load it by: a pipeline has its own parts, else those of ``reference`` stay."""
        if self.path is None:
            return reference
        layout = family_class(reference.model_type).layout
        inside = [part.option for part in (layout.vae, *layout.text_encoders) if (self.path / part.folder).is_dir()]
        return with_transformer(reference, self.path).model_copy(update=dict.fromkeys(inside))

    def load(self, family: Family, dtype: torch.dtype, device: torch.device) -> LoadedWeights:
        """Load the transformer of ``family``, which :meth:`config` describes.

        Where nothing says which layers are multiplied in low precision, as in a dequantised file, all are but
        embedders and the last.
        """
        fp8 = WeightLoader(self.recipe, "dequant")
        module = family.load_transformer(dtype, device, fp8=fp8)
        made = {name: layer for name, layer in module.named_modules() if isinstance(layer, QuantizedLinear)}
        linears = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
        high = [layer for layer in linears if Recipe().excluded_as(layer) is None]
        quantised = {name: each.outline for name, each in made.items()} or dict.fromkeys(high)
        return LoadedWeights(module, quantised, describe_base(family.quantized_file(), fp8, dtype))

    @property
    def _weights(self) -> Path | None:
        """The transformer's file or folder; of a pipeline its part."""
        inside = self.path / "transformer" if self.path else None
        return inside if inside and inside.is_dir() else self.path

    @cached_property
    def stored(self) -> torch.dtype | None:
        """The 16-bit dtype that most of the file's numbers in high precision have, which a merge rounds to; or None."""
        if (root := self._weights) is None:
            return None
        dtypes: Counter[str] = Counter()
        for entry in WeightFiles(root).entries.values():
            dtypes[entry.dtype] += 1 if entry.dtype in (*_HALVES, "F32") else 0
        return _HALVES.get(dtypes.most_common(1)[0][0]) if dtypes else None

    def layout(self, family: Family) -> LayoutKind | None:
        """Return the convention that most of its quantised weights are stored by, or a file of the recipe would be."""
        if self.recipe is None:
            file = family.quantized_file()
            return file.layout if file else None
        return USUAL_LAYOUTS[self.recipe.scheme.name]

    def served_inputs(self, family: Family, layers: Mapping[str, QuantizedWeight | None]) -> dict[str, ServedInput]:
        """Return layer -> what its file says of its inputs.

        A recipe stands for the file that ``tools/quantize_model.py`` makes by it: one in fp8 forbids products in fp8.

        Args:
            family: that :meth:`config` describes.
            layers: those of a recipe, see :class:`LoadedWeights`.
        """
        if self.recipe is None:
            return family.served_inputs()
        if isinstance(self.recipe.scheme, Fp8Scheme):
            return {}
        found = {}
        for name, weight in layers.items():
            if weight is not None:
                stored = weight.scheme.store("comfy_quant", f"{name}.weight", weight.shape, torch.bfloat16)
                found[name] = ServedInput(cast(Any, stored.served_rounding), None, "comfy_quant")
        return found


def parse_deployment(text: str, merged: bool = False) -> DeployedWeights:
    """Return what ``--deploy`` names: a path, or a recipe, which is one of ``SCHEME_NAMES``.

    ``:e5m2`` after a recipe names the format; ``+all`` at the end rounds embedders and the final layer too, as most
    published plain casts do.

    Raises:
        UserError: there is no such file and no such recipe.
    """
    path = Path(text).expanduser()
    if path.exists():
        return DeployedWeights(path.name, path, None, merged)
    plain = text.removesuffix("+all")
    name, _, fp8 = plain.partition(":")
    if name not in SCHEME_NAMES:
        known = ", ".join(SCHEME_NAMES)
        raise UserError(f"--deploy {text}: no such file or folder, and none of {known}; check the path")
    if fp8 and name not in GRANULARITIES:
        raise UserError(f"--deploy {text}: {name} has one number format; leave out :{fp8}")
    if merged:
        raise UserError(f"--deploy_merged: {text} is a recipe for the base; name the merged file, or use --deploy_lora")
    keep = Recipe().exclude if plain == text else ()
    return DeployedWeights(text, None, Recipe(scheme_named(name, format_named(fp8) if fp8 else E4M3FN), keep), merged)
