"""Reading safetensors into a model that exists only in outline, at the memory cost of one model.

A module is built on PyTorch's meta device, where tensors have shapes but no storage. Its parameters are then
read one after the other, each from its place in the file straight into memory of its own, cast to the wanted
dtype, moved to the wanted device and put into the module. Nothing is read twice; nothing unneeded is read.
The peak is the finished model plus one tensor. Mapping the file (``mmap``) costs the same only as long as no
cast is needed; with one, the mapped pages stay resident beside the copies (`bench/loading.py`: 1.7 times the
model). A mapped q, k or v would also stay a view of the fused tensor it is published in, and a file that is
overwritten during training would take the weights with it.

Which tensor goes where is data, a *key map*: for each parameter of the module a list of pieces, each a range
of rows of a tensor in the file. Renaming, splitting a fused qkv and swapping the halves of a modulation are
all row ranges.

The file format is https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

import torch
from torch import Tensor, nn

from library.errors import UserError, did_you_mean
from library.files import read_safetensors_header, shard_names
from library.precision.checkpoint_layouts import detect_layout
from library.precision.loading import Fp8Loader

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U8": torch.uint8,  # ComfyUI may keep fp8 codes in it
}


@dataclass(frozen=True)
class Piece:
    """Rows ``start:stop`` of a tensor in a file; all of it when ``stop`` is None."""

    source: str
    start: int = 0
    stop: int | None = None


KeyMap = Mapping[str, Sequence[Piece]]


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file


class WeightFiles:
    """The tensors of one safetensors file or of a model's shards, known by name and read on request."""

    def __init__(self, path: str | Path) -> None:
        """Read the headers of ``path``: a ``.safetensors`` file, or a folder with one or with shards.

        Attributes:
            fp8: what of it is in fp8, or None. Its scales and markers are not among ``names``.

        Raises:
            UserError: ``path`` is missing, is no safetensors file, lacks a shard, or is quantised in a way that
                is not known.
        """
        self.path = Path(path)
        self._tensors: dict[str, Stored] = {}
        files = weight_files(self.path)
        for file in files:
            header = read_safetensors_header(file)
            with open(file, "rb") as raw:
                data_start = 8 + int.from_bytes(raw.read(8), "little")
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                begin = data_start + entry["data_offsets"][0]
                self._tensors[name] = Stored(file, entry["dtype"], tuple(entry["shape"]), begin)
        self.fp8 = detect_layout(self.path, files)
        for name in self.fp8.bookkeeping if self.fp8 is not None else ():
            del self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> list[str]:
        """Every tensor's name, in file order."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor ``name``, from the header.

        Raises:
            UserError: there is no such tensor.
        """
        if name not in self._tensors:
            hint = did_you_mean(name, self._tensors) or "; is this the right file?"
            raise UserError(f"{self.path}: tensor {name!r} is missing{hint}")
        return self._tensors[name].shape

    def rows(self, piece: Piece) -> tuple[int, ...]:
        """Return the shape of ``piece``."""
        shape = self.shape(piece.source)
        stop = piece.stop if piece.stop is not None else (shape[0] if shape else 1)
        return (stop - piece.start, *shape[1:])

    def read(self, pieces: Sequence[Piece]) -> Tensor:
        """Return the rows of ``pieces`` one below the other, in memory of their own, in the file's dtype.

        Raises:
            UserError: its dtype is none that can be read.
        """
        first = self._tensors[pieces[0].source]
        if first.dtype not in _DTYPES:
            raise UserError(
                f"{self.path}: tensor {pieces[0].source!r} has dtype {first.dtype}; use the bf16 or fp16 file"
            )
        dtype = _DTYPES[first.dtype]
        shapes = [self.rows(piece) for piece in pieces]
        total = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if first.shape else ()
        tensor = torch.empty(total, dtype=dtype)
        buffer = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # it is one
        filled = 0
        for piece, shape in zip(pieces, shapes, strict=True):
            stored = self._tensors[piece.source]
            row_bytes = torch.Size(stored.shape[1:]).numel() * dtype.itemsize
            count = shape[0] * row_bytes
            with open(stored.file, "rb", buffering=0) as file:
                file.seek(stored.offset + piece.start * row_bytes)
                _read_exactly(file, buffer[filled : filled + count])
            filled += count
        return tensor


def _read_exactly(file: RawIOBase, view: memoryview) -> None:
    """Fill ``view`` from ``file``; a single read gives at most 2 GiB on Linux."""
    done = 0
    while done < len(view):
        got = file.readinto(view[done:])
        if not got:
            raise OSError(f"{getattr(file, 'name', 'file')} became shorter while it was read")
        done += got


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files behind ``path``: itself, or those of a diffusers or transformers folder.

    Raises:
        UserError: nothing there, another file format, or a shard that its index names is missing.
    """
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UserError(f"{path}: weights are read from .safetensors files only; convert it or download that file")
        return [path]
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; check the path")
    for index in sorted(path.glob("*.safetensors.index.json")):
        shards = [path / name for name in shard_names(index)]
        for shard in shards:
            if not shard.is_file():
                raise UserError(f"{shard}: missing, but {index.name} lists it; download it again")
        return shards
    for name in ("diffusion_pytorch_model.safetensors", "model.safetensors"):
        if (path / name).is_file():
            return [path / name]
    raise UserError(f"{path}: no .safetensors weights in this folder; download the model with its safetensors files")


def read_config(folder: Path, name: str = "config.json") -> dict:
    """Return ``config.json`` (or the JSON file ``name``) of a model folder.

    Raises:
        UserError: it is missing or no JSON.
    """
    path = folder / name
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the folder is not a complete model, download it again") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); download it again") from error


def identity_map(names: Iterable[str]) -> dict[str, list[Piece]]:
    """Return the key map of a file whose tensors have the module's own names."""
    return {name: [Piece(name)] for name in names}


def load_into(
    build: Callable[[], nn.Module],
    weights: WeightFiles,
    key_map: KeyMap,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    keep_fp32: Callable[[str], bool] = lambda name: False,
    fp8: Fp8Loader | None = None,
) -> nn.Module:
    """Build a module on the meta device and fill it from ``weights``; the result is frozen and in eval mode.

    Args:
        build: makes the module; called under ``torch.device("meta")``.
        key_map: for each parameter of the module the pieces it is made of.
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
    expected = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
    _check(expected, weights, key_map)
    placing = fp8 if fp8 is not None else Fp8Loader(compute="dequant")
    placing.check(module)
    for name, shape in expected.items():
        tensor = weights.read(key_map[name])
        left = placing.place(module, name, tensor, key_map[name], weights.fp8, device)
        if left is None:
            continue
        tensor = left
        wanted = torch.float32 if keep_fp32(name) else dtype
        tensor = tensor.to(device=device, dtype=wanted).reshape(shape)
        _assign(module, name, nn.Parameter(tensor, requires_grad=False))
    _materialise_buffers(module, torch.device(device))
    return module.eval()


def _check(expected: Mapping[str, tuple[int, ...]], weights: WeightFiles, key_map: KeyMap) -> None:
    """Compare names and shapes; 1x1 convolutions may stand for linears (BFL's VAE attention)."""
    missing = [name for name in expected if name not in key_map]
    missing += [piece.source for pieces in key_map.values() for piece in pieces if piece.source not in weights]
    if missing:
        raise UserError(f"{weights.path}: {_some(missing)} missing; the file is incomplete or of another architecture")
    if extra := [key_map[name][0].source for name in key_map if name not in expected]:
        raise UserError(f"{weights.path}: {_some(extra)} unknown to this architecture; use the plain model file")
    for name, shape in expected.items():
        pieces = [weights.rows(piece) for piece in key_map[name]]
        found = (sum(rows[0] for rows in pieces), *pieces[0][1:])
        squeezed = found[: len(shape)] if all(side == 1 for side in found[len(shape) :]) else found
        if squeezed != shape:
            raise UserError(
                f"{weights.path}: tensor {key_map[name][0].source!r} has shape {found}, the architecture "
                f"wants {shape}; use a file of the right model"
            )


def _some(names: Sequence[str]) -> str:
    """Return up to three names as text, and how many more."""
    shown = ", ".join(repr(name) for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more} {'are' if len(names) > 1 else 'is'}"


def _assign(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put ``parameter`` in place of every parameter tied to ``name``."""
    owner_name, _, leaf = name.rpartition(".")
    old = getattr(module.get_submodule(owner_name), leaf)
    for child in module.modules():
        for key, value in child._parameters.items():
            if value is old:
                child._parameters[key] = parameter


def _materialise_buffers(module: nn.Module, device: torch.device) -> None:
    """Give buffers that no file holds their values; in these models that is CLIP's ``position_ids`` only."""
    for name, buffer in list(module.named_buffers()):
        owner_name, _, leaf = name.rpartition(".")
        if not buffer.is_meta:
            continue  # an fp8 layer's scale
        if leaf != "position_ids":
            raise NotImplementedError(f"buffer {name} of {type(module).__name__} has no known value")
        positions = torch.arange(buffer.shape[-1], device=device).expand(buffer.shape)
        module.get_submodule(owner_name).register_buffer(leaf, positions, persistent=False)
