"""What files and LoRAs call a family's layers: the classes of the tables in its ``names.toml``, and what reads them.

*Names.* A :class:`KeyRow` pairs a module of the original checkpoint (``double_blocks.{i}.img_attn.qkv``) with the
diffusers modules whose weights are stacked in it (``to_q``, ``to_k``, ``to_v``), ``{i}`` being the block's index.
Stacking is by output rows, counted in multiples of the module's input columns: (1, 1, 1) for q, k, v.
``halves_swapped`` marks modulations whose two halves (shift, scale) come in the other order. All rows of a family are
its :class:`KeyNames`; the base model's loader (:func:`original_key_map`), LoRA files and merging read the same table.
File formats write names with dots or, like kohya, with underscores; both are found by :meth:`KeyNames.find`.

*Architectures.* An :class:`Architecture` says how a network is recognised by its tensors' names
(``library.models.inspection``).

*LoRA targets.* A :class:`LoraTargets` says which linear layers get a LoRA: the groups they fall into (each with the
``*_dim`` option that sets its rank), the options that choose blocks, and the names. Code that injects, saves or merges
takes such a row and knows nothing else about the family. A family's text encoders are rows of their own in it. Where
LoRAs of several networks are together, in a file or in :class:`~networks.network.AdapterNetwork`, the
transformer's modules have their plain names and a text encoder's begin with the component's:
``text_encoder.encoder.layers.0.mlp.fc1``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from library.config.model_types import MODEL_TYPES
from library.files import read_toml
from library.models.weights import KeyMap
from library.precision.checkpoint import WeightFiles
from library.safetensors_io import RowRange

Weights = TypeVar("Weights")
MOST_BLOCKS = 100  # of any model here


@dataclass(frozen=True)
class KeyRow:
    """One original module and the diffusers modules stacked in it: templates with ``{i}`` for the block.

    Attributes:
        original: the original module's name. parts: the diffusers modules, in the order of their rows.
        rows: each part's output rows as a multiple of the input columns; empty where there is one part. 0: parts that
            share what the others leave (keys and values of fewer heads than queries).
        halves_swapped: the part's two row halves come in the other order.
        transposed: published files keep the weight as [in, out] (transformers' Conv1D).
        gains_columns: a published variant has more input columns, behind those that all variants have.
        naming: whose name ``original`` is, as ``readers.toml`` calls it.
    """

    original: str
    parts: tuple[str, ...]
    rows: tuple[int, ...] = ()
    halves_swapped: bool = False
    transposed: bool = False
    gains_columns: bool = False
    naming: str = "original"

    def part_rows(self, out_features: int, in_features: int) -> list[int]:
        """Return how many output rows of the original module belong to each part.

        Raises:
            ValueError: the parts do not add up to ``out_features``.
        """
        rows = [multiple * in_features for multiple in self.rows] or [out_features]
        if 0 in self.rows and out_features > sum(rows):
            shared = (out_features - sum(rows)) // self.rows.count(0)
            rows = [each or shared for each in rows]
        if sum(rows) != out_features:
            raise ValueError(f"{out_features} output rows, {sum(rows)} expected for {in_features} input columns")
        return rows

    def swap(self, up: Tensor) -> Tensor:
        """Return ``up`` with its row halves exchanged if the row asks for it; twice is nothing."""
        return torch.cat(up.chunk(2)[::-1]) if self.halves_swapped else up


@dataclass(frozen=True)
class KeyPlace:
    """A name found in a :class:`KeyNames`: its row, its block, and the part (None: the original module)."""

    row: KeyRow
    block: str
    part: int | None

    @property
    def original(self) -> str:
        """Full name of the original module."""
        return self.row.original.replace("{i}", self.block)

    @property
    def modules(self) -> list[str]:
        """Full diffusers names of all parts of the original module."""
        return [part.replace("{i}", self.block) for part in self.row.parts]


@dataclass(frozen=True)
class KeyNames:
    """All linear layers of a family in both namings.

    Attributes:
        rows: of the layers.
        lora_rows: further names that layers have in LoRA files of some programs; none of them is written.
    """

    rows: tuple[KeyRow, ...]
    lora_rows: tuple[KeyRow, ...] = ()

    def find(self, name: str) -> KeyPlace | None:
        """Return the place of a module name in either naming, with dots or underscores, or None."""
        normal = name.replace(".", "_")
        for pattern, row, part in self._patterns:
            if match := pattern.fullmatch(normal):
                return KeyPlace(row, match[1] if pattern.groups else "", part)
        return None

    def gains_columns(self, name: str) -> bool:
        """Return whether the module ``name`` has more input columns in a published variant."""
        place = self.find(name)
        return place is not None and place.row.gains_columns

    def find_in_lora(self, name: str) -> KeyPlace | None:
        """Return the place of a module name in a LoRA file, in any known naming, or None."""
        return self.find(name) or self._of_loras.find(name)

    @cached_property
    def modules(self) -> list[list[str]]:
        """Of each diffusers module the names in all blocks that there may be."""
        parts = (part for row in self.rows for part in row.parts)
        return [[part.replace("{i}", str(i)) for i in range(MOST_BLOCKS if "{i}" in part else 1)] for part in parts]

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], KeyRow, int | None]]:
        renamed = [row for row in self.rows if row.original not in row.parts]  # the others' names say the part
        templates: list[tuple[str, KeyRow, int | None]] = [(row.original, row, None) for row in renamed]
        templates += [(part, row, index) for row in self.rows for index, part in enumerate(row.parts)]
        return [
            (re.compile(re.escape(t.replace(".", "_")).replace(r"\{i\}", r"(\d+)")), row, part)
            for t, row, part in templates
        ]

    @cached_property
    def _of_loras(self) -> KeyNames:
        """Those of ``lora_rows``, and what diffusers' ``fuse_qkv_projections`` calls q, k and v together."""
        known, rows = {part for row in self.rows for part in row.parts}, list(self.lora_rows)
        for fused, (query, *others) in _FUSED.items():
            for stem in (part.removesuffix(query) for part in sorted(known) if part.endswith(f".{query}")):
                if known.issuperset(names := (stem + query, *(stem + other for other in others))):
                    rows.append(KeyRow(stem + fused, names, (1, 0, 0), naming="fused"))
        return KeyNames(tuple(rows))


_ADDED_QKV = ("add_q_proj", "add_k_proj", "add_v_proj")
_FUSED = {"to_qkv": ("to_q", "to_k", "to_v"), "to_added_qkv": _ADDED_QKV, "add_qkv_proj": _ADDED_QKV}  # SimpleTuner's


@dataclass(frozen=True)
class LayerGroup:
    """Linear layers that share a rank option.

    Attributes:
        name: ``"img_attn"``; counts are reported under it, its rank option is ``"img_attn_dim"``.
        pattern: regular expression that matches the whole of each module's name.
        default: trained with ``network_dim`` unless an option says otherwise; others only where an option names them.
    """

    name: str
    pattern: str
    default: bool = True


@dataclass(frozen=True)
class TextEncoderTargets:
    """A text encoder as LoRA sees it.

    Attributes:
        name: the component as diffusers calls it, the first part of its modules' names.
        group: its optimizer group; the metrics have ``lr/<group>``.
        layer_groups: the linear layers that are trained.
        keys: names without the component: files' against transformers'.
        prefixes: layout -> what files put before such a name; the first is written, all are read.
    """

    name: str
    group: str
    layer_groups: tuple[LayerGroup, ...]
    keys: KeyNames
    prefixes: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class LoraTargets:
    """A model family as LoRA sees it.

    Attributes:
        family: its name, for messages.
        layer_groups: every linear layer that can be trained; a module belongs to the first group that matches it.
        block_options: option name -> regular expression whose first group is the block's index.
        keys: modules in diffusers' naming against the original checkpoint's.
        kohya_base: what kohya's metadata call the base (``ss_base_model_version``).
        architecture: what ModelSpec calls the base, where the model itself does not say it more closely.
        implementation: where the base's own code is, for ModelSpec.
        dim_lists: option name -> groups whose ranks it lists, in order (kohya's ``in_dims``).
        file_prefix: what diffusers' files put before a module's name; the transformer's component.
        unused_modules: regular expression whose first group is the block's index; in the last block nothing that is
            computed from these layers is used, so they get no gradient and no LoRA.
        kohya_facts: other keys of kohya's metadata that are the same for every run of the family.
        text_encoders: those that can be trained, in the order of ``text_encoder_lr``.
        plain_layouts: layouts whose files have diffusers' module names although the original checkpoint has others.
        folded_layouts: layouts whose tensors are lora_A and lora_B with the scale in B, where not every program that
            knows the modules' names reads lora_down and alpha.
        own_names: modules of the model have the key map's original names; those in files are transformers'.
    """

    family: str
    layer_groups: tuple[LayerGroup, ...]
    block_options: Mapping[str, str]
    keys: KeyNames
    kohya_base: str
    architecture: str
    implementation: str
    dim_lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    file_prefix: str = "transformer"
    text_encoders: tuple[TextEncoderTargets, ...] = ()
    unused_modules: str = ""
    kohya_facts: Mapping[str, object] = field(default_factory=dict)
    plain_layouts: tuple[str, ...] = ()
    folded_layouts: tuple[str, ...] = ()
    own_names: bool = False

    @property
    def kohya_module(self) -> str:
        """What kohya's metadata call the network module; PEFT where kohya trains no such model."""
        return MODEL_TYPES[self.family].kohya_module or "peft"

    @property
    def fan_in_fan_out(self) -> bool:
        """Whether transformers keeps these layers' weights as [in, out], which PEFT has to know."""
        return any(row.transposed for row in self.keys.rows)

    def path_in_model(self, module_name: str) -> str:
        """Return where the module that files call ``module_name`` is in the model."""
        place = self.keys.find(module_name) if self.own_names else None
        return place.original if place else module_name

    def name_of(self, path: str) -> str:
        """Return what files call the module at ``path`` of the model."""
        place = self.keys.find(path) if self.own_names else None
        return place.modules[0] if place else path

    def group_of(self, module_name: str) -> LayerGroup | None:
        """Return the group that ``module_name`` belongs to, or None if it is no target."""
        groups = (self.text_encoder_of(module_name) or self).layer_groups
        return next((group for group in groups if re.fullmatch(group.pattern, module_name)), None)

    def matches(self, pattern: str, module_name: str) -> bool:
        """Return whether the regular expression is of ``module_name``.

        Of its original name (``blocks.0.mlp.up``, as kohya's trainers have it) where the expression is of no module's
        name in diffusers.
        """
        if re.fullmatch(pattern, module_name):
            return True
        place = None if self.own_names or self.text_encoder_of(module_name) else self.keys.find(module_name)
        return place is not None and bool(re.fullmatch(pattern, place.original)) and not _is_of_any(self.keys, pattern)

    def text_encoder_of(self, module_name: str) -> TextEncoderTargets | None:
        """Return the text encoder that ``module_name`` lies in, None for the transformer."""
        component = module_name.split(".", 1)[0]
        return next((encoder for encoder in self.text_encoders if encoder.name == component), None)

    def component_of(self, module_name: str) -> str:
        """Return "transformer", or the name of the text encoder that ``module_name`` lies in."""
        encoder = self.text_encoder_of(module_name)
        return encoder.name if encoder else self.file_prefix

    def by_component(self, weights: Mapping[str, Weights]) -> dict[str, dict[str, Weights]]:
        """Return component -> its modules' weights, under the names they had."""
        parts: dict[str, dict[str, Weights]] = {}
        for name, module in weights.items():
            parts.setdefault(self.component_of(name), {})[name] = module
        return parts

    def dim_options(self) -> dict[str, str]:
        """Return option name -> group for every ``*_dim`` option."""
        listed = {name for names in self.dim_lists.values() for name in names}
        return {f"{group.name}_dim": group.name for group in self.layer_groups if group.name not in listed}


class NameTables(NamedTuple):
    """What a family's ``names.toml`` says; see :func:`read_names`."""

    keys: KeyNames
    norms: tuple[tuple[str, str], ...]
    vae: tuple[tuple[str, str], ...]
    targets: tuple[LoraTargets, ...]


def read_names(folder: Path) -> NameTables:
    """Return the tables in ``names.toml`` of a family's ``folder``.

    * ``[[keys]]``, ``[[lora_keys]]``: rows of :class:`KeyNames`. ``modules`` has the original names, each with
      diffusers' or the fields of its :class:`KeyRow`; ``same`` names that are equal, which come after them. ``stacks``
      are the lists of blocks that have all of these modules: what stands before the names, the original's = diffusers'.
    * ``[norms]``: regular expressions of other tensors' original names = what diffusers calls them; ``[vae]``:
      expressions in an autoencoder's names = what takes their place.
    * ``[lora]``: fields of :class:`LoraTargets`; ``families`` are its rows, with the fields that are others there. A
      layer group has a name and a pattern, or ``default`` too; those of a row come after the common ones.
    * ``[[text_encoders]]``: fields of :class:`TextEncoderTargets`. ``[[architectures]]``: see
      ``library.config.model_layouts``.
    """
    tables = _frozen(read_toml(folder / "names.toml")[0])
    keys = KeyNames(_rows(tables["keys"]), _rows(tables.get("lora_keys", ())))
    encoders = tuple(
        TextEncoderTargets(**row | {"keys": KeyNames(_rows(row["keys"])), "layer_groups": _groups(row["layer_groups"])})
        for row in tables.get("text_encoders", ())
    )
    shared = tables["lora"] | {"keys": keys, "text_encoders": encoders}
    families, groups = shared.pop("families"), shared.pop("layer_groups")
    targets = tuple(
        LoraTargets(**shared | row | {"family": name, "layer_groups": _groups(groups | row.get("layer_groups", {}))})
        for name, row in families.items()
    )
    norms, vae = (tuple(tables.get(name, {}).items()) for name in ("norms", "vae"))
    return NameTables(keys, norms, vae, targets)


def _frozen(value: Any) -> Any:
    """Return a TOML value with tuples for lists."""
    if isinstance(value, dict):
        return {key: _frozen(each) for key, each in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _rows(tables: Iterable[Mapping[str, Any]]) -> tuple[KeyRow, ...]:
    rows = []
    for table in tables:
        modules = table.get("modules", {}) | {name: name for name in table.get("same", ())}
        for theirs, ours in table.get("stacks", {"": ""}).items():
            for name, value in modules.items():
                row = {"parts": (value,)} if isinstance(value, str) else value
                rows.append(KeyRow(theirs + name, **row | {"parts": tuple(ours + part for part in row["parts"])}))
    return tuple(rows)


def _groups(table: Mapping[str, Any]) -> tuple[LayerGroup, ...]:
    return tuple(LayerGroup(n, **({"pattern": row} if isinstance(row, str) else row)) for n, row in table.items())


@lru_cache
def _is_of_any(keys: KeyNames, pattern: str) -> bool:
    return any(re.fullmatch(pattern, name) for names in keys.modules for name in names)


def count_blocks(names: Iterable[str], stack: str) -> int:
    """Return 1 + the highest number that follows ``stack`` in a tensor's name; a gap shows up as missing tensors."""
    numbers = [int(name[len(stack) :].split(".", 1)[0]) for name in names if name.startswith(stack)]
    return 1 + max(numbers, default=-1)


def original_key_map(
    weights: WeightFiles, prefix: str, keys: KeyNames, norms: Sequence[tuple[str, str]] = ()
) -> KeyMap:
    """Return where each parameter of a diffusers model lies in a file that has the original names, or diffusers' own.

    Tensors that no row knows appear under their own names, so that the loader reports those it has no use for; a
    module that a block lacks appears under the name the file would have.

    Args:
        weights: the file.
        prefix: before the transformer's names; tensors without it are other parts of a whole checkpoint.
        keys: the linear layers.
        norms: regular expressions of other tensors' original names, and what diffusers calls them.
    """
    found: dict[str, list[RowRange]] = {}
    for name in weights.names:
        if not name.startswith(prefix):
            continue
        module, _, leaf = name.removeprefix(prefix).rpartition(".")
        place = keys.find(module)
        if place is not None and place.part is None:
            found |= _pieces(weights, prefix + module, leaf, place)
        else:
            found[_renamed(name.removeprefix(prefix), norms)] = [RowRange(name)]
    for row in keys.rows:
        stack, several, _ = (prefix + row.original).partition("{i}")
        for i in range(count_blocks(weights.names, stack)) if several and row.original not in row.parts else ():
            lacking = f"{prefix}{row.original}.weight".replace("{i}", str(i))
            if lacking not in weights:
                found.setdefault(f"{row.parts[0]}.weight".replace("{i}", str(i)), [RowRange(lacking)])
    return found


def _pieces(weights: WeightFiles, source: str, leaf: str, place: KeyPlace) -> dict[str, list[RowRange]]:
    """Return the diffusers parameters stacked in tensor ``leaf`` of original module ``source``, as pieces of rows."""
    name, multiples = f"{source}.{leaf}", place.row.rows
    if place.row.halves_swapped:
        half = weights.shape(name)[0] // 2
        return {f"{place.modules[0]}.{leaf}": [RowRange(name, half, 2 * half), RowRange(name, 0, half)]}
    if not multiples:
        return {f"{place.modules[0]}.{leaf}": [RowRange(name)]}
    start, found = 0, {}
    for module, multiple in zip(place.modules, multiples, strict=True):
        end = start + multiple * (weights.shape(name)[0] // sum(multiples))
        found[f"{module}.{leaf}"] = [RowRange(name, start, None if module == place.modules[-1] else end)]
        start = end
    return found


def _renamed(name: str, norms: Sequence[tuple[str, str]]) -> str:
    for theirs, ours in norms:
        if match := re.fullmatch(theirs, name):
            return match.expand(ours)
    return name
