"""Deployed weights, behind one interface: a file or folder in fp8 or in high precision, or a recipe that makes them.

The report asks this module what the weights are called, which model they are to be loaded as, for the loaded module,
which of its layers a server multiplies in low precision, and for the scales of their inputs. What a deployment's
weights are stored as is known here alone: a format that is new is a :class:`DeployedWeights` with another
:meth:`~DeployedWeights.load`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from library.config.schema import ModelConfig
from library.errors import UserError
from library.models.family import Family, with_transformer
from library.models.layer_names import LoraTargets
from library.models.registry import family_class
from library.precision.checkpoint import WeightFiles
from library.precision.files.fp8 import Fp8Scheme
from library.precision.fp8_numbers import E4M3FN, format_named
from library.precision.linear import QuantizedLinear
from library.precision.names import GRANULARITIES
from library.precision.recipe import Recipe, WeightLoader
from library.safetensors_io import weight_files
from library.training.tasks.lora_plan import describe_base

_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class LoadedWeights:
    """A deployed transformer.

    Attributes:
        module: without a LoRA beside it.
        quantised: its layers that a server multiplies in low precision.
        main_format: what most of their weights are stored as, in words.
        precision: the whole in words, for people and for a LoRA's metadata.
    """

    module: nn.Module
    quantised: tuple[str, ...]
    main_format: str
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
        own = [part.option for part in (layout.vae, *layout.text_encoders) if (self.path / part.folder).is_dir()]
        return with_transformer(reference, self.path).model_copy(update=dict.fromkeys(own))

    def load(self, family: Family, dtype: torch.dtype, device: torch.device) -> LoadedWeights:
        """Load the transformer of ``family``, which :meth:`config` describes.

        Where nothing says which layers are multiplied in low precision, as in a dequantised file, all are but
        embedders and the last.
        """
        fp8 = WeightLoader(self.recipe, "dequant")
        module = family.load_transformer(dtype, device, fp8=fp8)
        made = {name: layer for name, layer in module.named_modules() if isinstance(layer, QuantizedLinear)}
        linears = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
        kinds = Counter(each.quantized().scheme.describe() for each in made.values())
        main = kinds.most_common(1)[0][0] if kinds else str(self.stored or dtype).removeprefix("torch.")
        quantised = tuple(made) or tuple(layer for layer in linears if Recipe().excluded_as(layer) is None)
        return LoadedWeights(module, quantised, main, describe_base(family.quantized_file(), fp8, dtype))

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

    def input_scales(self, targets: LoraTargets) -> dict[str, Tensor]:
        """Return module -> calibrated scale of its input, fp32; empty where the file has none."""
        scales: dict[str, Tensor] = {}
        for path in weight_files(self._weights) if self._weights else ():
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    layer, _, leaf = key.removeprefix("model.diffusion_model.").rpartition(".")
                    if leaf not in ("input_scale", "scale_input"):
                        continue
                    place = targets.keys.find(layer)
                    scales |= dict.fromkeys(place.modules if place else [layer], file.get_tensor(key).float())
        return scales


def parse_deployment(text: str, merged: bool = False) -> DeployedWeights:
    """Return what ``--deploy`` names: a path, or a recipe, which is one of ``GRANULARITIES``.

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
    granularity = next((each for each in GRANULARITIES if each == name), None)
    if granularity is None:
        known = ", ".join(GRANULARITIES)
        raise UserError(f"--deploy {text}: no such file or folder, and none of {known}; check the path")
    if merged:
        raise UserError(f"--deploy_merged: {text} is a recipe for the base; name the merged file, or use --deploy_lora")
    keep = Recipe().exclude if plain == text else ()
    return DeployedWeights(
        text, None, Recipe(Fp8Scheme(granularity, format_named(fp8) if fp8 else E4M3FN), keep), merged
    )
