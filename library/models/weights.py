"""Filling a model that exists only in outline from its checkpoint, at the memory cost of one model.

A module is built on PyTorch's meta device, where tensors have shapes but no storage. Its parameters are then
read one after the other, each from its place in the file straight into memory of its own
(``library.safetensors_io``), cast to the wanted dtype, moved to the wanted device and put into the module.
Nothing is read twice; nothing unneeded is read. The peak is the finished model plus one tensor.

Which tensor goes where is data, a *key map*: for each parameter of the module a list of row ranges of tensors
in the file. Renaming, splitting a fused qkv and swapping the halves of a modulation are all row ranges.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from library.errors import UserError, names_in_short
from library.files import read_json
from library.precision.checkpoint import WeightFiles
from library.precision.recipe import WeightLoader
from library.safetensors_io import RowRange

KeyMap = Mapping[str, Sequence[RowRange]]
_COUNTER = "num_batches_tracked"  # of a batch norm: how often it was trained
Built = TypeVar("Built", bound=nn.Module)


def read_config(folder: Path, name: str = "config.json") -> dict:
    """Return ``config.json`` (or the JSON file ``name``) of a model folder."""
    return read_json(folder / name, "the folder is no complete model, download it again")


def read_config_of(kind: str, folder: Path, remedy: str) -> dict:
    """Return ``config.json`` of a folder that holds a ``kind``: diffusers' class or transformers' ``model_type``."""
    config = read_config(folder)
    found = config.get("_class_name", config.get("model_type"))
    if found != kind:
        raise UserError(f"{folder / 'config.json'}: {found!r}, not {kind}; {remedy}")
    return config


def identity_map(names: Iterable[str]) -> dict[str, list[RowRange]]:
    """Return the key map of a file whose tensors have the module's own names."""
    return {name: [RowRange(name)] for name in names}


def load_into(
    build: Callable[[], Built],
    weights: WeightFiles,
    key_map: KeyMap,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    keep_fp32: Callable[[str], bool] = lambda name: False,
    fp8: WeightLoader | None = None,
) -> Built:
    """Build a module on the meta device and fill it from ``weights``; the result is frozen and in eval mode.

    Args:
        build: makes the module; called under ``torch.device("meta")``.
        key_map: for each parameter of the module the rows it is made of.
        dtype, device: of the finished parameters.
        keep_fp32: parameters that stay fp32 whatever ``dtype`` is.
        fp8: what becomes fp8, and how it computes. Linear weights that the file has in fp8 stay so in any case; if
            None they are dequantised, so that what encoders put into caches does not depend on the GPU.

    Raises:
        UserError: tensors are missing, left over or of another shape; all names are checked before anything
        is read.
    """
    with torch.device("meta"):
        module = build()
    buffers = statistics(module)
    expected = {name: tuple(tensor.shape) for name, tensor in (*module.named_parameters(), *buffers.items())}
    tied = _names_by_first(module)
    key_map = {name: pieces for name, pieces in key_map.items() if not name.endswith(_COUNTER)}
    check_map(expected, weights, key_map)
    loader = fp8 if fp8 is not None else WeightLoader(compute="dequant")
    loader.check(module)
    if loader.activations is not None:
        loader.served = weights.served_inputs(key_map)
    for name, shape in expected.items():
        stored = weights.read_quantized(key_map[name]) or weights.read(key_map[name])
        if (tensor := loader.load(module, name, stored, device)) is None:
            continue
        wanted = torch.float32 if keep_fp32(name) else dtype
        tensor = tensor.to(device=device, dtype=wanted).reshape(shape)
        if name in buffers:
            module.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = tensor
        else:
            parameter = nn.Parameter(tensor, requires_grad=False)
            for each in tied[name]:
                module.get_submodule(each.rpartition(".")[0])._parameters[each.rpartition(".")[2]] = parameter
    _compute_buffers(module, device)
    return module.eval()


def statistics(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a file holds: mean and variance of batch norms."""
    return {name: each for name, each in module.named_buffers() if name.endswith((".running_mean", ".running_var"))}


def check_map(expected: Mapping[str, tuple[int, ...]], weights: WeightFiles, key_map: KeyMap) -> None:
    """Raise a UserError if ``weights`` hold by ``key_map`` other names or shapes than ``expected``."""
    missing = [name for name in expected if name not in key_map]
    missing += [rows.source for ranges in key_map.values() for rows in ranges if rows.source not in weights]
    if missing:
        raise UserError(f"{weights.path}: {_some(missing)} missing; the file is incomplete or of another architecture")
    if extra := [key_map[name][0].source for name in key_map if name not in expected]:
        raise UserError(f"{weights.path}: {_some(extra)} unknown to this architecture; use the plain model file")
    for name, shape in expected.items():
        found = weights.shape_of(key_map[name])
        if not stands_for(found, shape):
            source = key_map[name][0].source
            raise UserError(
                f"{weights.entries[source].file}: tensor {source!r} has shape {found}, the architecture wants {shape}; "
                "use a file of the right model, or download or convert this one again if it is"
            )


def stands_for(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether a file's tensor may have the shape ``found`` where the architecture has ``wanted``.

    Sides of 1 do not count: 1x1 convolutions may stand for linears (BFL's VAE attention), convolutions over one frame
    for those over images (Qwen-Image-2.1's VAE in ComfyUI's file). A vector may stand for a table of as many numbers,
    row by row: Krea 2's modulation; GGUF keeps no single row apart from a vector (Z-Image's ``x_pad_token``).
    """
    wide = [[side for side in shape if side != 1] for shape in (found, wanted)]
    return wide[0] == wide[1] or found == (math.prod(wanted),)


def _some(names: Sequence[str]) -> str:
    """Return up to three names as text, and how many more."""
    shown = names_in_short([repr(name) for name in names], 3)
    return f"tensor{'s' if len(names) > 1 else ''} {shown} {'are' if len(names) > 1 else 'is'}"


def _names_by_first(module: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter by its first one: tied weights have several."""
    names = defaultdict[Tensor, list[str]](list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return {each[0]: each for each in names.values()}


def _compute_buffers(module: nn.Module, device: torch.device | str) -> None:
    """Give buffers that no file holds their values: CLIP's ``position_ids``, frequencies of RoPE and of timesteps."""
    unknown = [(name, buffer) for name, buffer in module.named_buffers() if buffer.is_meta]  # not an fp8 layer's scale
    for name, buffer in unknown:
        owner_name, _, leaf = name.rpartition(".")
        owner: Any = module.get_submodule(owner_name)
        if leaf == "position_ids":
            values = torch.arange(buffer.shape[-1]).expand(buffer.shape)
        elif leaf.endswith(("inv_freq", "freqs")):
            values = _made_again(owner).get_buffer(leaf)  # on the CPU
        elif leaf == _COUNTER:
            values = torch.zeros_like(buffer, device="cpu")
        else:
            raise NotImplementedError(f"buffer {name} of {type(module).__name__} has no known value")
        owner._buffers[leaf] = values.to(device)


def _made_again(module: Any) -> Any:
    """Return a module made with the arguments that ``module`` remembers by their names."""
    names = [*inspect.signature(type(module).__init__).parameters][1:]
    return type(module)(**{name: getattr(module, name) for name in names if hasattr(module, name)})
