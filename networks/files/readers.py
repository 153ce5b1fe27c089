"""What each program that loads LoRAs makes of a file, as data, and a file read as one of them reads it.

The keys that a program knows are rows of :class:`Keys`: what stands before a module's name, whose name it is
(diffusers' or the original checkpoint's), dots or underscores, and which tensors may follow. A key that no row knows is
passed over: none of these programs stops because of one, at best it prints a line in a log. That is how a LoRA gets
lost, so nothing here is derived from what we write (``networks.files.writing``), but from the programs' sources:

==============  =======================================  ============================================================
diffusers       huggingface/diffusers 0.42.1             ``loaders/lora_pipeline.py``, ``loaders/peft.py``,
                                                         ``loaders/lora_conversion_utils.py``, ``utils/peft_utils.py``
ComfyUI         Comfy-Org/ComfyUI 17358c8, 09708ea       ``comfy/lora.py`` (``model_lora_keys_unet`` and ``_clip``),
                                                         ``comfy/utils.py`` (``flux_to_diffusers``, ``z_image_to_``,
                                                         ``krea2_to_``)
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
file as a plain LoRA, which is another update.

To add a program: a row of :data:`READERS`. ``tests/networks/files/test_readers.py`` holds the rows to the programs that
can be installed, and to keys written out by hand.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from library.errors import UserError, names_in_short
from library.models.layer_names import KeyNames, KeyPlace, LoraTargets
from networks.files.joined import split_rows
from networks.files.layouts import SAVE_FORMATS, key_stem, layout_of, stem_of
from networks.files.metadata import AlphaTable
from networks.files.weights import KINDS, TITLES, AdapterWeights, LoraWeights, rank_of

_AB = {"lora_A.weight": "down", "lora_B.weight": "up"}
_DOWN_UP = {"lora_down.weight": "down", "lora_up.weight": "up", "alpha": "alpha"}
_MAGNITUDE = {"lora_magnitude_vector": "magnitude"}
_LOHA = {name: name for name in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")}
_LOKR = {name: name for name in ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")}
_OF_MUSUBI = _DOWN_UP | _LOHA | {name: name for name in ("lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b")}
_OLD = {"lora.down.weight": "down", "lora.up.weight": "up"}
_DEFAULT = {"lora_A.default.weight": "down", "lora_B.default.weight": "up"}
_CONVERTED = _AB | _DEFAULT | _DOWN_UP  # diffusers, of Qwen-Image and Z-Image
_RARE = {"lora_linear_layer.down.weight": "down", "lora_linear_layer.up.weight": "up", "lora_A": "down", "lora_B": "up"}
_PAIRS = _AB | _OLD | _DEFAULT | _RARE | _DOWN_UP  # comfy/weight_adapter/lora.py
_OF_COMFYUI = _PAIRS | _LOHA | _LOKR | {"dora_scale": "dora_scale", "oft_blocks": "oft_blocks"}


@dataclass(frozen=True)
class Keys:
    """A form of keys: ``<prefix><module's name>.<tensor's name>``.

    Attributes:
        prefix: before the module's name, in which dots are underscores after a prefix that ends in one.
        naming: whose module names: diffusers' (of language models transformers'), or the original checkpoint's.
        tensors: what may follow -> the tensor in memory.
        only: regular expression of the modules (diffusers' names) that are known in this form.
        needs_alpha: without ``.alpha`` it fails, or does not recognise the form.
    """

    prefix: str
    naming: Literal["diffusers", "original"]
    tensors: Mapping[str, str]
    only: str = ".*"
    needs_alpha: bool = False

    def place(self, name: str, keys: KeyNames) -> KeyPlace | None:
        """Return the place of a module's name as it stands in a key."""
        place = keys.find(name)
        if place is None:
            return None
        if self.naming == "original":
            meant = place.original if place.part is None or place.row.original in place.row.parts else None
        else:
            meant = place.modules[place.part] if place.part is not None else None
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


def _by_family(rows: Mapping[str, tuple[Keys, ...]]) -> dict[str, tuple[Keys, ...]]:
    """Return family -> forms, of rows whose key may name several families."""
    return {name: forms for names, forms in rows.items() for name in names.split()}


def _alike(
    naming: Literal["diffusers", "original"], tensors: Mapping[str, str], *prefixes: str, only: str = ".*"
) -> tuple[Keys, ...]:
    """Return forms that differ in what stands before the module's name alone."""
    return tuple(Keys(prefix, naming, tensors, only) for prefix in prefixes)


_FLUX = "flux flux_fill flux_kontext"
_FLUX2 = "flux2_klein flux2_klein_edit flux2_dev flux2_dev_edit"
_FLUX3 = "flux3_klein flux3_klein_edit"
_QWEN = "qwen_image qwen_image_edit qwen_image_edit_plus"
_QWEN_21 = "qwen_image_21 qwen_image_21_edit"

# Layers, by diffusers' names, that a form does not go beyond.
_BLOCKS = r"(single_)?transformer_blocks\..*"
_OF_FLUX2 = rf"{_BLOCKS}|(x|context)_embedder|proj_out|norm_out.*"
_FLUX3_BLOCKS = r"(single_transformer_blocks|txt_mode_blocks|mode_blocks\.\w+)\..*"
_Z_BLOCKS = r"(layers|(noise|context)_refiner)\..*"
# Of underscored names diffusers puts dots where it knows no better: gate.layer; outside of the blocks it knows some.
_Q_UNDERSCORED = r".*\.(attn\..*|img_mlp\.(proj|out))|img_in|proj_out|norm_out.*|time_text_embed.*"

_ALONE = _AB | _OLD | _MAGNITUDE | {"alpha": "takes the file for another trainer's and finds no layer, or refuses it"}
_STOPS = {"alpha": "fails on the whole file"}
_PEFT_KEYS = Keys("transformer.", "diffusers", _ALONE)
_OF_ALL_IN_COMFYUI = _alike("diffusers", _OF_COMFYUI, "transformer.", "lycoris_", "")
_ORIGINALS_IN_COMFYUI = _alike("original", _OF_COMFYUI, "lora_unet_", "diffusion_model.")

READERS = (
    Reader(
        "diffusers",
        _by_family(
            {
                _FLUX: (
                    Keys("transformer.", "diffusers", _AB | _OLD | _MAGNITUDE | {"alpha": "alpha"}),
                    Keys("lora_unet_", "original", _DOWN_UP, _BLOCKS),
                    Keys("diffusion_model.", "original", _DOWN_UP, _BLOCKS),
                    Keys("lora_transformer_", "diffusers", _DOWN_UP, r".*(\.attn\.|embed).*|proj_out|norm_out.*", True),
                ),
                _FLUX2: (
                    Keys("transformer.", "diffusers", _AB | _OLD | _MAGNITUDE),
                    Keys("diffusion_model.", "original", _AB),
                    Keys("diffusion_model.", "diffusers", _AB | _OLD, _BLOCKS),
                    Keys("lora_unet_", "original", _DOWN_UP, r"(?!.*(modulation|guidance_embedder|norm_out)).*"),
                    Keys("lycoris_", "diffusers", _LOKR | {"alpha": "alpha"}, _BLOCKS),
                ),
                _FLUX3: (
                    _PEFT_KEYS,
                    Keys("diffusion_model.", "original", _ALONE, _FLUX3_BLOCKS),
                    Keys("diffusion_model.", "diffusers", _ALONE),
                ),
                _QWEN: (
                    _PEFT_KEYS,
                    *_alike("diffusers", _CONVERTED, "lora_unet_", "diffusion_model."),
                    Keys("", "diffusers", _DEFAULT),
                    Keys("", "diffusers", _CONVERTED, needs_alpha=True),
                ),
                _QWEN_21: (
                    _PEFT_KEYS,
                    Keys("lora_unet_", "diffusers", _CONVERTED, _Q_UNDERSCORED),
                    Keys("diffusion_model.", "diffusers", _CONVERTED),
                    Keys("", "diffusers", _DEFAULT),
                    Keys("", "diffusers", _CONVERTED, needs_alpha=True),
                ),
                "z_image": (
                    _PEFT_KEYS,
                    Keys("lora_unet_", "diffusers", _DOWN_UP | _OLD),
                    Keys("lora_unet_", "original", _DOWN_UP, r".*attention.*"),
                    Keys("diffusion_model.", "diffusers", _CONVERTED | _OLD),
                    Keys("", "diffusers", _DEFAULT),
                    Keys("", "diffusers", _CONVERTED | _OLD, needs_alpha=True),
                ),
                "krea2": (
                    _PEFT_KEYS,
                    *_alike("original", _AB | _STOPS, "diffusion_model.", "base_model.model."),
                ),
            }
        ),
        text={
            "text_encoder": (
                Keys("text_encoder.", "original", _AB),
                *_alike("original", _DOWN_UP, "lora_te1_", "lora_te_"),
            )
        },
        header=True,
        stops=dict.fromkeys(_QWEN_21.split(), r"lora_unet_(modulation|txt_in)_\w+"),
    ),
    Reader(
        "ComfyUI",
        _by_family(
            {
                _FLUX: (
                    *_OF_ALL_IN_COMFYUI,
                    *_alike("diffusers", _OF_COMFYUI, "lora_transformer_"),
                    *_ORIGINALS_IN_COMFYUI,
                ),
                _FLUX2: (
                    *_alike(
                        "diffusers", _OF_COMFYUI, "transformer.", "lycoris_", "", "lora_transformer_", only=_OF_FLUX2
                    ),
                    *_ORIGINALS_IN_COMFYUI,
                ),
                _FLUX3: _ORIGINALS_IN_COMFYUI,
                _QWEN: (
                    *_OF_ALL_IN_COMFYUI,
                    *_alike("diffusers", _OF_COMFYUI, "lora_unet_", "diffusion_model."),
                ),
                _QWEN_21: (  # its feed-forward is fused: below the first two, as a whole; elsewhere by its halves
                    *_ORIGINALS_IN_COMFYUI,
                    *_OF_ALL_IN_COMFYUI,
                ),
                "z_image": (
                    *_OF_ALL_IN_COMFYUI,
                    Keys("lora_unet_", "original", _OF_COMFYUI),
                    Keys("diffusion_model.", "diffusers", _OF_COMFYUI),
                    Keys("diffusion_model.", "original", _OF_COMFYUI),
                ),
                "krea2": (
                    *_OF_ALL_IN_COMFYUI,
                    Keys("diffusion_model.", "diffusers", _OF_COMFYUI),
                    *_ORIGINALS_IN_COMFYUI,
                ),
            }
        ),
        text={
            "text_encoder": _alike(
                "original", _OF_COMFYUI, "lora_te1_", "lora_te_", "text_encoder.", "text_encoders.clip_l.transformer."
            ),
            "text_encoder_2": _alike(
                "original", _OF_COMFYUI, "lora_te3_", "lora_te2_", "text_encoders.t5xxl.transformer."
            ),
        },
    ),
    Reader(
        "sd-scripts",
        _by_family({_FLUX: (Keys("lora_unet_", "original", _DOWN_UP, needs_alpha=True),)}),
        text={
            "text_encoder": (Keys("lora_te1_", "original", _DOWN_UP, needs_alpha=True),),
            "text_encoder_2": (Keys("lora_te3_", "original", _DOWN_UP, needs_alpha=True),),
        },
    ),
    Reader(
        "musubi-tuner",
        _by_family(
            {
                f"flux_kontext {_FLUX2}": (Keys("lora_unet_", "original", _OF_MUSUBI, _BLOCKS, True),),
                f"{_QWEN} {_QWEN_21}": (Keys("lora_unet_", "diffusers", _OF_MUSUBI, _BLOCKS, True),),
                "z_image": (Keys("lora_unet_", "diffusers", _OF_MUSUBI, _Z_BLOCKS, True),),
                "krea2": (Keys("lora_unet_", "original", _OF_MUSUBI, needs_alpha=True),),
            }
        ),
    ),
    Reader(
        "peft",
        _by_family({"llama gpt2": (Keys("base_model.model.", "diffusers", _AB | _MAGNITUDE),)}),
        header=True,
    ),
)


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
            for form, _, _ in reader.place(stem, targets)
        )
    }


def formats_for(reader: Reader, names: Collection[str], targets: LoraTargets, kind: str) -> list[str]:
    """Return the layouts from which a program reads every one of ``names``."""
    return [
        save_format
        for save_format in (("peft",) if targets.own_names else SAVE_FORMATS)
        if kind in layout_of(kind, save_format).kinds
        and len(readable(reader, names, targets, save_format, kind)) == len(names)
    ]


def check_readers(
    save_for: Sequence[str], names: Collection[str], targets: LoraTargets, save_format: str, kind: str
) -> None:
    """Refuse a layout from which a program that was named would read less than is trained, or something else.

    Args:
        save_for: names of :data:`READERS` in lower case.
        names: the modules that are trained, as :meth:`networks.options.NetworkOptions.trained_layers` has them.
        targets, save_format, kind: what is written.

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
                f"{save_format}; {remedy(reader, names, targets, kind)}"
            )


def read_by_none(names: Collection[str], targets: LoraTargets, save_format: str, kind: str) -> str | None:
    """Return a line about layers that no program would read from a layout, if another layout has a program for all."""
    having = [reader for reader in READERS if targets.family in reader.families]
    read = [readable(reader, names, targets, save_format, kind) for reader in having]
    if not having or any(len(found) == len(names) for found in read):
        return None
    suiting = {found for reader in having for found in formats_for(reader, names, targets, kind)}
    if not suiting:
        return None
    lost = sorted(set(names).difference(*read)) or sorted(names)
    return (
        f"save_format: no program reads {names_in_short(lost, 2)} from {save_format}; "
        f"set save_format = {' or '.join(sorted(suiting))}"
    )


def remedy(reader: Reader, names: Collection[str], targets: LoraTargets, kind: str) -> str:
    """Return what to do for a program to read every one of ``names``."""
    if found := formats_for(reader, names, targets, kind):
        return f"set save_format = {' or '.join(found)}"
    if kind != "lora" and formats_for(reader, names, targets, "lora"):
        return f"it takes no {TITLES[kind]} of ours; set network_type = lora, or merge it into the model"
    return "it takes them from no format; leave these layers out, or merge the LoRA into the model"


# ---- a file


@dataclass(frozen=True)
class Reading:
    """What a program takes of a file.

    Attributes:
        weights: diffusers module name -> weights. source: the same -> what they were made of: keys and scale.
    """

    weights: dict[str, AdapterWeights]
    source: dict[str, tuple[object, ...]]


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
        for name, weights in _read_module(form, place, module).items():
            stated = alphas.get(component.removesuffix(".") or targets.file_prefix) if reader.header else None
            if stated is not None and "down" in weights.tensors:
                factor = stated.alpha_of(name, weights.rank) / weights.rank
                weights = type(weights).of(weights.tensors, weights.alpha * factor)
            reading.weights[component + name] = weights
            reading.source[component + name] = (*sorted(keys.values()), weights.scale)
    return reading


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
    kind = next((each for each in KINDS.values() if set(tensors) in each.complete), None)
    if kind is None or (form.needs_alpha and alpha is None):
        return {}
    if kind.kind == "oft" and tensors["oft_blocks"].ndim == 4:
        kind = KINDS["boft"]
    rank = rank_of(tensors)
    weights = kind.of(tensors, float(rank if alpha is None else alpha))
    if place.part is not None:
        return {place.modules[place.part]: weights}
    try:
        if not isinstance(weights, LoraWeights):
            return {place.modules[part]: of_rows for part, of_rows in split_rows(place.row, weights).items()}
        rows = place.row.part_rows(weights.up.shape[0], weights.down.shape[1])
    except ValueError:
        return {}
    ups = place.row.swap(weights.up).split(rows)
    return {name: _without_zeros(weights, up) for name, up in zip(place.modules, ups, strict=True)}


def _without_zeros(weights: LoraWeights, up: Tensor) -> LoraWeights:
    """Return the LoRA with some of its rows of B, less the ranks that do nothing in them: the other blocks' of qkv."""
    kept = up.ne(0).any(dim=0)
    if not bool(kept.any()) or bool(kept.all()):
        return LoraWeights(weights.down, up, weights.alpha)
    return LoraWeights(weights.down[kept], up[:, kept], weights.scale * int(kept.sum()))
