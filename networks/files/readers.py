"""What each program that loads LoRAs makes of a file, as data, and a file read as one of them reads it.

The keys that a program knows are rows of ``readers.toml``: what stands before a module's name, whose name it is
(diffusers' or the original checkpoint's), dots or underscores, and which tensors may follow. A key that no row knows is
passed over: none of these programs stops because of one, at best it prints a line in a log. That is how a LoRA gets
lost, so nothing here is derived from what we write (``networks.files.writing``), but from the programs' sources:

==============  =======================================  ============================================================
diffusers       huggingface/diffusers 0.42.1             ``loaders/lora_pipeline.py``, ``loaders/peft.py``,
                                                         ``loaders/lora_conversion_utils.py``, ``utils/peft_utils.py``
ComfyUI         Comfy-Org/ComfyUI 17358c8, 09708ea       ``comfy/lora.py`` (``model_lora_keys_unet`` and ``_clip``),
                                                         ``comfy/utils.py`` (``flux_to_diffusers``, ``z_image_to_``,
                                                         ``krea2_to_``); its pull request 13640 for ERNIE-Image
                xmarre/ComfyUI 6d4f9e8, a fork           ``comfy/weight_adapter/``, as it was in April 2026
sd-scripts      kohya-ss/sd-scripts 48d368f              ``networks/lora_flux.py``, ``networks/flux_merge_lora.py``
musubi-tuner    kohya-ss/musubi-tuner 30c658c, a later   ``utils/lora_utils.py``, ``networks/lora*.py``, ``loha.py``,
                one of Qwen-Image-2.1                    ``lokr.py``
peft            huggingface/peft 0.21.2                  ``utils/save_and_load.py``, ``tuners/lora/``
==============  =======================================  ============================================================

*Scale.* alpha / rank, alpha being ``<module>.alpha`` in the file, without one the rank. sd-scripts and musubi-tuner's
network stop without one. diffusers takes a file with one for a converted one, and then finds no layer of Qwen-Image or
Z-Image below ``transformer.``; of FLUX.3 it refuses such a file. diffusers also multiplies by what the header says
(``lora_adapter_metadata``), peft by what its ``adapter_config.json`` says; nobody else reads those.

*Fused layers.* A LoRA on the original ``qkv`` is one of q, k and v with their rows of B. Where a program has the fused
layer itself, that is the same update.

*Layers.* A program that knows a form of keys may still not know every layer in it (``Keys.only``): diffusers puts
FLUX's input layers, converted from kohya's names, where its own loader does not look for them, and renames nothing but
FLUX.3's blocks; musubi-tuner's network (``--network_weights``, ``merge_lora.py``) has blocks alone, its
``*_generate_image.py`` every layer.

*Kinds.* A DoRA's norms have two names and meanings. diffusers and peft take ``lora_magnitude_vector`` (m, V's rows
become that long); ComfyUI takes ``dora_scale`` and divides it by the norms of the *base's* rows. Each reads the other's
file as a plain LoRA, which is another update. LoKrs of FLUX.2 and Z-Image, and no others, load in diffusers, all of
them or none: it finds one factor for peft to build the layers by. Where its model has q, k and v, a LoKr of ``qkv``
makes it join them.

To add a program: a row of ``readers.toml``. ``tests/networks/files/test_readers.py`` compares the rows with the
programs that can be installed, and with keys written out by hand.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from library.config.run_schema import KINDS_OF_LAYOUT, SAVE_FORMATS, layout_refusal
from library.errors import UserError, names_in_short
from library.files import read_toml
from library.models.layer_names import KeyNames, KeyPlace, LoraTargets
from networks.adapters.lycoris import factorization
from networks.files.joined import placed
from networks.files.layouts import key_stem, layout_of, stem_of
from networks.files.metadata import AlphaTable
from networks.files.weights import BIASES, KINDS, TITLES, AdapterWeights, FullWeights, LokrWeights, rank_of


@dataclass(frozen=True)
class Keys:
    """A form of keys: ``<prefix><module's name>.<tensor's name>``.

    Attributes:
        prefix: before the module's name, in which dots are underscores after a prefix that ends in one.
        naming: whose module names: diffusers' (of language models transformers'), or a ``KeyRow.naming``: "original" of
            the original checkpoint's.
        tensors: what may follow -> the tensor in memory.
        only: regular expression of the modules (diffusers' names) that are known in this form.
        needs_alpha: without ``.alpha`` it fails, or does not recognise the form.
        swaps: it exchanges the halves of modulations where the original checkpoint has them the other way round.
    """

    prefix: str
    naming: str
    tensors: Mapping[str, str]
    only: str = ".*"
    needs_alpha: bool = False
    swaps: bool = True

    def place(self, name: str, keys: KeyNames) -> KeyPlace | None:
        """Return the place of a module's name as it stands in a key."""
        place = keys.find_in_lora(name)
        if place is None:
            return None
        if self.naming == "diffusers":
            meant = place.modules[place.part] if place.part is not None else None
        else:
            is_whole = place.part is None or place.row.original in place.row.parts
            meant = place.original if is_whole and place.row.naming == self.naming else None
        if meant is None or self.prefix + name != stem_of(self.prefix, meant):
            return None
        modules = place.modules if place.part is None else [place.modules[place.part]]
        return place if all(re.fullmatch(self.only, module) for module in modules) else None


@dataclass(frozen=True)
class Reader:
    """A program.

    Attributes:
        name: as it calls itself; in lower case, as ``save_for`` calls it.
        families: model family -> the keys it knows for the transformer; a family that is missing it does not have.
        text: text encoder's component -> the keys it knows for it.
        header: it reads ranks and alphas from the header, or PEFT's config beside the file.
        stops: model family -> regular expression of a module's name in a file, with which it fails on the whole file.
    """

    name: str
    families: Mapping[str, tuple[Keys, ...]]
    text: Mapping[str, tuple[Keys, ...]] = field(default_factory=dict)
    header: bool = False
    stops: Mapping[str, str] = field(default_factory=dict)

    def fails(self, stems: Iterable[str], targets: LoraTargets) -> bool:
        """Return whether the program stops at a file that has modules called ``stems``."""
        expression = self.stops.get(targets.family)
        return expression is not None and any(re.fullmatch(expression, stem) for stem in stems)

    def place(self, stem: str, targets: LoraTargets) -> Iterable[tuple[Keys, str, KeyPlace]]:
        """Yield each form in which ``stem`` is a module, the component's prefix ("" or "text_encoder."), its place."""
        named = [("", targets.keys, self.families.get(targets.family, ()))]
        named += [(f"{each.name}.", each.keys, self.text.get(each.name, ())) for each in targets.text_encoders]
        for component, keys, forms in named:
            for form in forms:
                if stem.startswith(form.prefix) and (place := form.place(stem.removeprefix(form.prefix), keys)):
                    yield form, component, place


def _reader(row: Mapping[str, Any]) -> Reader:
    """Return a program of ``readers.toml``."""
    families: dict[str, tuple[Keys, ...]] = {}
    text: dict[str, tuple[Keys, ...]] = {}
    for form in row["forms"]:
        sets = [_TABLES["tensors"][name] for name in form.get("tensors", row.get("tensors"))]
        tensors = {key: name for each in sets for key, name in each.items()}
        only = _TABLES["layers"][form["only"]] if "only" in form else ".*"
        alpha = form.get("needs_alpha", False)
        swaps = form.get("swaps", True)
        forms = tuple(Keys(prefix, form["names"], tensors, only, alpha, swaps) for prefix in form["prefix"])
        for name in _families(form.get("for", ())):
            families[name] = families.get(name, ()) + forms
        for component in form.get("text", ()):
            text[component] = text.get(component, ()) + forms
    stopped = {family: each["module"] for each in row.get("stops", ()) for family in _families(each["for"])}
    return Reader(row["name"], families, text, row.get("header", False), stopped)


def _families(names: Iterable[str]) -> list[str]:
    """Return model families; ``names`` may be those of groups."""
    return [family for name in names for family in _TABLES["groups"].get(name, [name])]


_TABLES = read_toml(Path(__file__).with_name("readers.toml"))[0]
READERS = tuple(map(_reader, _TABLES["programs"]))


# ---- before anything is written


def readable(
    reader: Reader, names: Iterable[str], targets: LoraTargets, save_format: str, kind: str = "lora"
) -> set[str]:
    """Return which modules a program would read from a file that holds ``names`` in ``save_format``."""
    layout = layout_of(kind, save_format, targets)
    plain = save_format in targets.plain_layouts
    stems = {name: key_stem(name, targets, layout, plain) for name in names}
    if reader.fails(stems.values(), targets):
        return set()
    sets = [[layout.names.get(tensor, tensor) for tensor in complete] for complete in KINDS[kind].complete]
    written = [names for names in sets if None not in names]  # in one of these forms a module of the kind is written
    return {
        name
        for name, stem in stems.items()
        if any(
            all(set(tensors) <= form.tensors.keys() for tensors in written)
            and (form.swaps or not place.row.halves_swapped)
            for form, _, place in reader.place(stem, targets)
        )
    }


def formats_for(reader: Reader, names: Collection[str], targets: LoraTargets, kind: str) -> list[str]:
    """Return the layouts from which a program reads every one of ``names``."""
    return [
        save_format
        for save_format in (("peft",) if targets.own_names else SAVE_FORMATS)
        if kind in KINDS_OF_LAYOUT[save_format]
        and len(readable(reader, names, targets, save_format, kind)) == len(names)
    ]


def check_readers(
    save_for: Sequence[str],
    names: Collection[str],
    targets: LoraTargets,
    save_format: str,
    kind: str,
    factors: Collection[int] = (),
) -> None:
    """Refuse a layout from which a program that was named would read less than is trained, or something else.

    Args:
        save_for: names of :data:`READERS` in lower case.
        names: the modules that are trained, as :meth:`networks.options.NetworkOptions.trained_layers` has them.
        targets, save_format, kind: what is written.
        factors: of a LoKr's kinds of layers.

    Raises:
        UserError: with the layouts that suit, if there are any.
    """
    for option in save_for:
        reader = next(reader for reader in READERS if reader.name.lower() == option)
        if targets.family not in reader.families:
            raise UserError(f"save_for: {reader.name} has no model {targets.family}; remove it")
        if lost := sorted(set(names) - readable(reader, names, targets, save_format, kind)):
            raise UserError(
                f"save_for: {reader.name} reads no {TITLES[kind]} of {names_in_short(lost, 2)} from save_format "
                f"{save_format}; {remedy(reader, names, targets, kind, is_made=False)}"
            )
        if reader.header and len(set(factors)) > 1:
            raise UserError(f"save_for: {reader.name}: {ONE_FACTOR}")


def read_by_none(names: Collection[str], targets: LoraTargets, save_format: str, kind: str) -> str | None:
    """Return a line about layers that no program would read from a layout, if another layout has a program for all."""
    having = [reader for reader in READERS if targets.family in reader.families]
    read = [readable(reader, names, targets, save_format, kind) for reader in having]
    if not having or any(len(found) == len(names) for found in read):
        return None
    if not (suiting := suiting_formats(names, targets, kind)):
        return None
    lost = sorted(set(names).difference(*read)) or sorted(names)
    return (
        f"save_format: no program reads {names_in_short(lost, 2)} from {save_format}; "
        f"set save_format = {' or '.join(suiting)}"
    )


def check_save_format(kind: str, save_format: str, names: Collection[str], targets: LoraTargets) -> None:
    """Refuse a layout that no program would load the kind of adapter from; ``names``: the modules."""
    if kind not in KINDS_OF_LAYOUT[save_format]:
        allowed = [name for name in SAVE_FORMATS if kind in KINDS_OF_LAYOUT[name]]
        raise UserError(layout_refusal(kind, save_format, suiting_formats(names, targets, kind) or allowed))


def suiting_formats(names: Collection[str], targets: LoraTargets, kind: str) -> list[str]:
    """Return the layouts from which some program reads every one of ``names``."""
    having = [reader for reader in READERS if targets.family in reader.families]
    found = {each for reader in having for each in formats_for(reader, names, targets, kind)}
    return [each for each in SAVE_FORMATS if each in found]


def remedy(reader: Reader, names: Collection[str], targets: LoraTargets, kind: str, is_made: bool = True) -> str:
    """Return what to do for a program to read every one of ``names``; not ``is_made``: before the training."""
    if kind == FullWeights.kind:
        return "merge it into the model: no format that is written here has biases or full differences"
    if found := formats_for(reader, names, targets, kind):
        return f"set save_format = {' or '.join(found)}"
    if kind != "lora" and formats_for(reader, names, targets, "lora"):
        made = "make a LoRA of it (resize_lora.py --network_type lora), or " if kind in ("lokr", "loha") else ""
        instead = made if is_made else "set network_type = lora, or "
        return f"it takes no {TITLES[kind]} of ours; {instead}merge it into the model"
    return "it takes them from no format; leave these layers out, or merge the LoRA into the model"


# ---- a file


@dataclass(frozen=True)
class Reading:
    """What a program takes of a file.

    Attributes:
        weights: diffusers module name -> weights. source: the same -> what they were made of: keys and scale.
        refused: what to do about a file that the program refuses for its LoKrs' shapes; empty where it does not.
    """

    weights: dict[str, AdapterWeights]
    source: dict[str, tuple[object, ...]]
    refused: str = ""


def read_as(
    reader: Reader, tensors: Mapping[str, Tensor], alphas: Mapping[str, AlphaTable | None], targets: LoraTargets
) -> Reading:
    """Return what a program takes of a file.

    Args:
        reader: the program.
        tensors: the file's.
        alphas: component -> what the header, or PEFT's config, says.
        targets: the family's row.
    """
    if reader.fails((key.partition(".")[0] for key in tensors), targets):
        return Reading({}, {})
    modules: dict[tuple[str, str], tuple[Keys, KeyPlace, dict[str, str]]] = {}  # component, stem -> ..., name -> key
    for key in tensors:
        if found := _recognise(reader, key, targets):
            form, component, stem, place, name = found
            modules.setdefault((component, stem), (form, place, {}))[2][name] = key
    reading = Reading({}, {})
    for (component, _), (form, place, keys) in modules.items():
        module = {name: tensors[key] for name, key in keys.items()}
        stated = alphas.get(component.removesuffix(".") or targets.file_prefix) if reader.header else None
        read = _read_module(form, place, module)
        for name, weights in read.items():
            lora = read.get(owner := name.removesuffix(".bias"), weights)
            if stated is not None and "down" in lora.tensors:
                weights = weights.scaled(stated.alpha_of(owner, lora.rank) / lora.rank)
            reading.weights[component + name] = weights
            reading.source[component + name] = (*sorted(keys.values()), weights.scale)
    lokrs = [{name: tensors[key] for name, key in keys.items()} for _, _, keys in modules.values()]
    return reading if not reader.header or _peft_builds(lokrs) else Reading({}, {}, ONE_FACTOR)


ONE_FACTOR = "it takes LoKrs of one factor alone; train with one in network_args"


def _peft_builds(modules: Sequence[Mapping[str, Tensor]]) -> bool:
    """Return whether diffusers finds the one ``LoKrConfig`` by which peft makes layers of all LoKrs among ``modules``.

    As ``_create_lokr_config`` in diffusers' ``utils/peft_utils.py`` does: a factor is among w1's rows, or -1, and one
    rank tells what is a product.
    """
    lokrs = [LokrWeights(module, 1.0) for module in modules if any(name.startswith("lokr_w1") for name in module)]
    if not lokrs or not all(lokr.tensors.keys() - {"alpha"} in LokrWeights.complete for lokr in lokrs):
        return True  # nothing of it is read
    both = any("lokr_w1_a" in lokr.tensors for lokr in lokrs)
    for lokr in lokrs:
        rank, (w1, w2) = lokr.rank or max(lokr.w2().shape), (max(lokr.w1().shape), max(lokr.w2().shape))
        products = both and rank < w1 / 2, rank < w2 / 2
        if products != tuple(f"{name}_a" in lokr.tensors for name in ("lokr_w1", "lokr_w2")):
            return False
    sides = {pair for lokr in lokrs for pair in zip(lokr.w1().shape, lokr.w2().shape, strict=True)}
    factors = {-1, *(len(lokr.w1()) for lokr in lokrs)}
    return any(all(factorization(one * two, factor) == (one, two) for one, two in sides) for factor in factors)


def _recognise(reader: Reader, key: str, targets: LoraTargets) -> tuple[Keys, str, str, KeyPlace, str] | None:
    """Return the form, component, stem, place and the tensor's name in memory of a key that the program knows."""
    for dot in (match.start() for match in re.finditer(r"\.", key)):
        stem, tensor = key[:dot], key[dot + 1 :]
        if tensor not in _KNOWN:
            continue
        for form, component, place in reader.place(stem, targets):
            if tensor in form.tensors:
                return form, component, stem, place, form.tensors[tensor]
    return None


_KNOWN = {name for reader in READERS for forms in reader.families.values() for keys in forms for name in keys.tensors}


def _read_module(form: Keys, place: KeyPlace, tensors: dict[str, Tensor]) -> dict[str, AdapterWeights]:
    """Return a module's weights under diffusers' names, nothing if the program can do nothing with them."""
    alpha = tensors.pop("alpha", None)
    biases = {name: tensors.pop(name) for name in BIASES if name in tensors}
    kind = next((each for each in KINDS.values() if set(tensors) in each.complete), None)
    if (kind is None and (tensors or not biases)) or (form.needs_alpha and alpha is None):
        return {}
    value = float(rank_of(tensors) if alpha is None else alpha)
    try:
        place = place if form.swaps else replace(place, row=replace(place.row, halves_swapped=False))
        return placed(place, kind.of(tensors, value) if kind is not None else None, biases)
    except ValueError:
        return {}
