"""Files of DoRA, LoKr, LoHa, OFT and BOFT.

    comfy       lycoris_transformer_blocks_0_attn_to_q.lokr_w1        LyCORIS's tensor names and ``.alpha``
                lora_te1_text_model_encoder_layers_0_mlp_fc1.lokr_w1
    diffusers   transformer.transformer_blocks.0.attn.to_q.lora_A.weight, .lora_B.weight, .lora_magnitude_vector
    peft        base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, ...   a folder, of a language model

Module names are diffusers' in both: products and rotations of q, k and v cannot be joined to one of the original qkv.
ComfyUI reads ``lycoris_`` and diffusers' names (SimpleTuner's layout) for FLUX and Qwen-Image and applies each to
its rows. diffusers itself loads DoRA, as peft's, and none of the others.

What is read back, for merging and going on with training, are these layouts under any prefix that
``networks.files.lora`` knows, as long as each key speaks of one of diffusers' modules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from library.errors import UserError
from library.models.layer_names import LoraTargets
from library.safetensors_io import read_safetensors_header, stream_safetensors
from networks.adapters.base import AdapterLinear, fill
from networks.adapters.lora import DoRALinear
from networks.files.lora import LoraFile, find_place, for_file, load_lora, refuse_other_family, text_key
from networks.files.metadata import ADAPTER_METADATA_KEY, adapter_metadata, hash_metadata, read_alphas
from networks.files.peft import PEFT_PREFIX, check_layout, save_peft_config, weight_file
from networks.files.weights import TITLES, AdapterWeights, LoraWeights, names_in_short, non_lora_kind

SAVE_FORMATS = {"dora": ("diffusers", "comfy", "peft"), **dict.fromkeys(("lokr", "loha", "oft", "boft"), ("comfy",))}

_SUFFIXES = {  # in files -> in memory
    "lora_down.weight": "down",
    "lora_A.weight": "down",
    "lora_up.weight": "up",
    "lora_B.weight": "up",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    **{name: name for name in ("alpha", "dora_scale", "oft_blocks", "lokr_w1", "lokr_w2")},
    **{f"{name}_{part}": f"{name}_{part}" for name in ("lokr_w1", "lokr_w2", "hada_w1", "hada_w2") for part in "ab"},
}
_PEFT_NAMES = {"down": "lora_A.weight", "up": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_WRITTEN = {
    "comfy": {"down": "lora_down.weight", "up": "lora_up.weight"},
    "diffusers": _PEFT_NAMES,
    "peft": _PEFT_NAMES,
}


def check_save_format(kind: str, save_format: str) -> None:
    """Refuse a layout that no program would load the kind from.

    Raises:
        UserError: with the layouts there are.
    """
    allowed = SAVE_FORMATS.get(kind)
    if allowed and save_format not in allowed:
        raise UserError(
            f"save_format: no program loads network_type {kind} from the layout {save_format}; "
            f"set save_format = {' or '.join(allowed)}"
        )


def layer_tensors(layer: AdapterLinear, save_format: str) -> AdapterWeights:
    """Return what a file of ``save_format`` holds of ``layer``."""
    tensors = {name: parameter.detach() for name, parameter in layer.trained().items()}
    if not isinstance(layer, DoRALinear):
        return AdapterWeights(layer.kind, tensors, layer.alpha)
    down, up, magnitude = layer.lora_A.weight.detach(), layer.lora_B.weight.detach(), tensors["magnitude"].float()
    alpha = layer.scale * layer.rank if layer.rank_stabilised else layer.alpha
    if save_format in ("diffusers", "peft"):
        return AdapterWeights("dora", {"down": down, "up": up, "magnitude": magnitude}, alpha)
    scale = magnitude * layer.squares.sqrt() / layer.row_lengths()
    return AdapterWeights("dora", {"down": down, "up": up, "dora_scale": scale[:, None]}, alpha)


@torch.no_grad()
def take_tensors(layer: AdapterLinear, weights: AdapterWeights, where: str) -> None:
    """Copy what a file holds of ``layer`` into it.

    Raises:
        UserError: it is of another kind, or has another shape or scale; ``where`` begins the message.
    """
    if weights.kind != layer.kind:
        raise UserError(f"{where} is a {TITLES[weights.kind]}, here it is a {TITLES[layer.kind]}; set network_type")
    own, tensors = layer.trained(), dict(weights.tensors)
    if isinstance(layer, DoRALinear):
        tensors |= {"lora_A.weight": tensors.pop("down"), "lora_B.weight": tensors.pop("up")}
    for name, parameter in own.items():
        if name != "magnitude" and (name not in tensors or tensors[name].shape != parameter.shape):
            has = tuple(tensors[name].shape) if name in tensors else "nothing"
            raise UserError(f"{where}: {name} is {has}, here {tuple(parameter.shape)}; set network_dim as in the file")
    scale = getattr(layer, "scale", 1.0)
    if abs(weights.scale - scale) > 1e-6 * abs(scale):
        raise UserError(f"{where} has the scale {weights.scale:g}, here {scale:g}; set network_alpha as in the file")
    has_columns = "dora_scale" in tensors and tensors["dora_scale"].shape != (layer.out_features, 1)
    if isinstance(layer, DoRALinear) and "magnitude" not in tensors and has_columns:
        raise UserError(f"{where} has lengths of columns; only a DoRA with lengths of rows can be gone on with")
    for name, parameter in own.items():
        if name != "magnitude":
            fill(parameter, tensors[name])
    if isinstance(layer, DoRALinear):
        magnitude = tensors.get("magnitude")
        if magnitude is None:
            scales = tensors["dora_scale"].to(layer.squares)
            magnitude = scales[:, 0] * layer.row_lengths() / layer.squares.sqrt()
        fill(layer.magnitude, magnitude)


def save_adapter(
    path: str | Path,
    adapters: Mapping[str, AdapterWeights],
    targets: LoraTargets,
    save_format: str,
    precision: str,
    metadata: Mapping[str, str],
) -> None:
    """Write a file in one step.

    Args:
        path: file to write.
        adapters: diffusers module name -> weights, from :func:`layer_tensors` of the same ``save_format``.
        targets: the family's row.
        save_format: one of ``SAVE_FORMATS`` of the kind.
        precision: "fp32", "fp16" or "bf16"; alphas are always fp32.
        metadata: strings to add; hashes are added here.

    Raises:
        UserError: a tensor is not finite, or the folder is not writable.
    """
    check_layout(targets, save_format)
    tensors: dict[str, Tensor] = {}
    for name, weights in adapters.items():
        encoder = targets.text_encoder_of(name)
        if encoder:
            stem = text_key(name, encoder, save_format)
        else:
            prefix = {"diffusers": f"{targets.file_prefix}.", "peft": PEFT_PREFIX, "comfy": "lycoris_"}[save_format]
            stem = prefix + (name.replace(".", "_") if save_format == "comfy" else name)
        for part, tensor in weights.tensors.items():
            key = f"{stem}.{_WRITTEN[save_format].get(part, part)}"
            tensors[key] = for_file(path, key, tensor, precision)
        if save_format == "comfy":
            tensors[f"{stem}.alpha"] = torch.tensor(float(weights.alpha))
    strings = {"format": "pt", **metadata}
    if save_format != "comfy":
        strings[ADAPTER_METADATA_KEY] = _dora_metadata(adapters, targets)
    if save_format == "peft":
        path = save_peft_config(path, _as_loras(adapters), targets, strings, use_dora=True)
    strings |= hash_metadata(tensors, strings)
    stream_safetensors(path, {k: (t.dtype, tuple(t.shape)) for k, t in tensors.items()}, tensors.__getitem__, strings)


def read_updates(
    path: str | Path, targets: LoraTargets, left_out: list[str] | None = None
) -> tuple[Mapping[str, LoraWeights | AdapterWeights], LoraFile]:
    """Return module name -> what a file of any kind does to it, and the file (empty of weights for other kinds).

    ``left_out`` receives the keys that cannot be mapped, which are refused otherwise.

    Raises:
        UserError: see :func:`load_adapter` and :func:`networks.files.lora.load_lora`.
    """
    path = weight_file(Path(path))
    if not non_lora_kind(header := read_safetensors_header(path)):
        lora = load_lora(path, targets, left_out)
        return lora.weights, lora
    return load_adapter(path, targets, left_out), LoraFile({}, "", dict(header.get("__metadata__") or {}))


def load_adapter(
    path: str | Path, targets: LoraTargets, left_out: list[str] | None = None
) -> dict[str, AdapterWeights]:
    """Read a file of another kind than LoRA.

    ``left_out`` receives the keys that cannot be mapped, which are refused otherwise.

    Returns:
        diffusers module name -> weights, in the file's dtype, on the CPU.

    Raises:
        UserError: no such file, a plain LoRA, or keys that cannot be mapped or are incomplete.
    """
    path = weight_file(Path(path))
    header = read_safetensors_header(path)
    metadata = dict(header.pop("__metadata__", {}))
    kind = non_lora_kind(header)
    if kind is None:
        raise UserError(
            f"{path}: is a LoRA, or none of {', '.join(list(TITLES.values())[1:])}; set network_type = lora"
        )
    found: dict[str, dict[str, Tensor]] = {}
    unknown: list[str] = []
    try:
        with safe_open(path, framework="pt") as file:
            for key in header:
                suffix = next((s for s in _SUFFIXES if key.endswith(f".{s}")), "")
                name = _module_name(key.removesuffix(f".{suffix}"), targets) if suffix else None
                if name is None:
                    unknown.append(key)
                    continue
                found.setdefault(name, {})[_SUFFIXES[suffix]] = file.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error}); download it again") from error
    if unknown:
        refuse_other_family(path, targets)
    if unknown and found and left_out is not None:
        left_out.extend(sorted(unknown))
    elif unknown:
        names = names_in_short(sorted(unknown))
        raise UserError(f"{path}: {len(unknown)} keys are not known of a {TITLES[kind]} ({names}); it cannot be read")
    stated = read_alphas(path, metadata, targets.file_prefix, dora=True)
    adapters: dict[str, AdapterWeights] = {}
    for name, tensors in found.items():
        down = tensors.get("down")
        alpha = stated.alpha_of(name, down.shape[0]) if stated and down is not None else None
        adapters[name] = _checked(f"{path}: {name}", tensors, alpha)
    return adapters


def _checked(where: str, tensors: dict[str, Tensor], stated: float | None) -> AdapterWeights:
    """Return one module's tensors as an adapter, refusing one that is not whole."""
    alpha = tensors.pop("alpha", None)
    if alpha is not None and alpha.numel() != 1:
        raise UserError(f"{where} has {alpha.numel()} alphas; it takes one")
    names = set(tensors)
    kind = non_lora_kind(f".{name}" for name in names) or "dora"
    if "magnitude" in names:
        kind = "dora"
    if kind == "oft" and tensors["oft_blocks"].ndim == 4:
        kind = "boft"
    sides = {side: {side, f"{side}_a", f"{side}_b"} for side in ("lokr_w1", "lokr_w2")}
    whole = {
        "dora": {"down", "up"} < names and len(names) == 3,
        "lokr": all(names & side in ({name}, side - {name}) for name, side in sides.items()),
        "loha": len(names) == 4,
        "oft": names == {"oft_blocks"},
        "boft": names == {"oft_blocks"},
    }  # fmt: skip
    if not whole[kind]:
        raise UserError(f"{where} has {', '.join(sorted(names))}, which is no whole {TITLES[kind]}; it cannot be read")
    if not all(bool(torch.isfinite(tensor.float()).all()) for tensor in tensors.values()):
        raise UserError(f"{where} holds NaN or infinity; use an earlier save")
    if alpha is None:
        ranks = [tensors[name].shape[0] for name in ("down", "lokr_w2_b", "lokr_w1_b", "hada_w1_b") if name in tensors]
        value = stated if stated is not None else float(ranks[0]) if ranks else 0.0
    else:
        value = float(alpha)
    return AdapterWeights(kind, tensors, value)


def _module_name(stem: str, targets: LoraTargets) -> str | None:
    """Return the one diffusers module that a key stem means."""
    module = find_place(stem, targets)
    if module is None or (module.place.part is None and len(module.place.modules) > 1):
        return None
    component = f"{module.encoder.name}." if module.encoder else ""
    return component + module.place.modules[module.place.part or 0]


def _dora_metadata(adapters: Mapping[str, AdapterWeights], targets: LoraTargets) -> str:
    """Return the JSON by which diffusers gives every module its rank and alpha and makes it a DoRA."""
    components = {
        component: {name.removeprefix(f"{component}."): module for name, module in part.items()}
        for component, part in targets.by_component(_as_loras(adapters)).items()
    }
    fields = json.loads(adapter_metadata(components))
    fields |= {key: True for key in fields if key.endswith(".use_dora")}
    return json.dumps(fields, indent=2, sort_keys=True)


def _as_loras(adapters: Mapping[str, AdapterWeights]) -> dict[str, LoraWeights]:
    return {name: LoraWeights(w.tensors["down"], w.tensors["up"], w.alpha) for name, w in adapters.items()}
