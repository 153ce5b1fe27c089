"""Writing files so that nothing already on disk is lost (see :mod:`library.atomic`), and recognising them again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from library.atomic import atomic_path
from library.errors import UserError
from library.safetensors_header import read_safetensors_header as read_safetensors_header
from library.safetensors_stream import stream_safetensors

_FINGERPRINT_SLICES = 256  # evenly spaced slices hashed from a weight file ...
_FINGERPRINT_SLICE_BYTES = 16384  # ... of this many bytes each: 4 MiB read from a file of any size


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` (UTF-8) to ``path`` in one step."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_safetensors(
    path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write ``tensors`` and string ``metadata`` as a safetensors file in one step; tensors may lie on any device.

    ``safetensors``' own writer takes a temporary name that nobody can recognise after a crash, and leaves files that
    only their owner may read.

    Raises:
        WriteError: see :func:`library.atomic.atomic_path`.
    """
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    stream_safetensors(path, layout, lambda name: tensors[name], metadata)


def written_path(text: str, where: str) -> Path:
    """Return the path that a person wrote, with ``~`` resolved; it need not exist. ``where`` begins the message.

    Raises:
        UserError: it can be no path here: too long, of somebody without a home, with characters no name may have.
    """
    try:
        path = Path(text).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Path(text).expanduser()
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{where} {text[:80]!r} is no path that can be looked at ({reason}); correct it") from None
    return path


def shard_names(index: Path) -> list[str]:
    """Return the names of the weight files that a ``*.safetensors.index.json`` lists, sorted.

    Raises:
        UserError: it is no such list, or names a file elsewhere than beside itself.
    """
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(f"{index}: not a list of weight files; download it again") from None
    for name in names:
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            raise UserError(f"{index}: lists {name!r}, which is no file beside it; download the model again")
    return names


def fingerprint(path: str | Path) -> str:
    """Return 16 hex digits that change when the weights or configs under ``path`` change.

    A file's size and 256 evenly spaced slices of it are hashed, so a 24 GB checkpoint takes milliseconds. Any
    retrained or requantised file differs in every slice; a file edited by hand in a few bytes may be missed.
    A folder is the hash of its ``*.json``, ``*.safetensors`` and tokenizer files by relative name; where there are no
    safetensors, of PyTorch's and TensorFlow's weight files.

    Raises:
        UserError: ``path`` does not exist.
    """
    root = Path(path)
    if not root.exists():
        raise UserError(f"{path}: no such file or folder; check the path")
    wanted = {".json", ".safetensors", ".txt", ".model"}
    files = [root] if root.is_file() else sorted(f for f in root.rglob("*") if f.is_file())
    if root.is_dir():
        if not any(file.suffix == ".safetensors" for file in files):
            wanted |= {".bin", ".pth", *(file.suffix for file in files if file.suffix.startswith(".data-"))}
        files = [file for file in files if file.suffix in wanted]
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{'' if file == root else file.relative_to(root)}|{size}|".encode())
        with open(file, "rb") as data:
            if size <= _FINGERPRINT_SLICES * _FINGERPRINT_SLICE_BYTES:
                digest.update(data.read())
                continue
            for i in range(_FINGERPRINT_SLICES):
                data.seek(i * (size - _FINGERPRINT_SLICE_BYTES) // (_FINGERPRINT_SLICES - 1))
                digest.update(data.read(_FINGERPRINT_SLICE_BYTES))
    return digest.hexdigest()[:16]


def weights_fingerprint(path: str | Path) -> str:
    """Return the fingerprint of a network's weights, the same for a folder and for the only weight file in it.

    So a LoRA knows its base again, whether the folder is named or its file.

    Raises:
        UserError: ``path`` does not exist.
    """
    files = list(Path(path).glob("*.safetensors"))  # of a file: nothing
    return fingerprint(files[0] if len(files) == 1 else path)
