"""Checksums and fingerprints: whether a file is as it was written, and whether it is the one that is meant.

A checksum (CRC-32) covers every byte of what Tandem wrote itself: of a JSON file it stands in front of the content, of
a folder's files in ``checksums.json``. A fingerprint recognises a model's files, which may have 24 GB, by slices.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from library.errors import UserError
from library.files import atomic_path, broken_link, make_way, open_own, read_own

_FINGERPRINT_SLICES = 256  # evenly spaced slices hashed from a weight file ...
_FINGERPRINT_SLICE_BYTES = 16384  # ... of this many bytes each: 4 MiB read from a file of any size
_CHECKED_HEAD = len('{"crc32":"01234567","content":')


def _checked_head(body: bytes) -> bytes:
    return b'{"crc32":"%08x","content":' % zlib.crc32(body)


def write_checked_json(path: str | Path, content: Any) -> None:
    """Write ``content`` as JSON behind a checksum of itself, for :func:`read_checked_json`."""
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass") + b"}\n"
    make_way(path)
    with atomic_path(path) as temporary:
        temporary.write_bytes(_checked_head(body) + body)


def read_checked_json(path: str | Path) -> Any:
    """Return what :func:`write_checked_json` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: not a byte of it can be relied on.
    """
    data = read_own(path)
    head, body = data[:_CHECKED_HEAD], data[_CHECKED_HEAD:]
    if head != _checked_head(body):
        raise ValueError("its checksum does not fit")
    return json.loads(body[:-2].decode("utf-8", "surrogatepass"))


def checksum(path: str | Path) -> str:
    """Return the CRC-32 of a file's content, eight hex digits."""
    crc = 0
    with open_own(path) as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


MANIFEST = "checksums.json"


def write_manifest(folder: Path) -> None:
    """Note in ``checksums.json`` what the files of ``folder`` hold; the last to be written into it."""
    write_checked_json(folder / MANIFEST, {path.name: checksum(path) for path in sorted(folder.iterdir())})


def find_change(folder: Path, files: Collection[str] | None = None) -> str | None:
    """Return in words which file of ``folder`` is missing or not as :func:`write_manifest` saw it; None for none.

    ``files``: look at these only.
    """
    try:
        known = read_checked_json(folder / MANIFEST)
    except FileNotFoundError:
        return f"{folder} has no {MANIFEST}"
    except (OSError, ValueError) as error:
        return f"{folder / MANIFEST} cannot be read ({error})"
    for name, stored in known.items():
        if files is not None and name not in files:
            continue
        try:
            if checksum(folder / name) != stored:
                return f"{folder / name} is damaged (its checksum does not fit)"
        except OSError as error:
            return f"{folder / name} cannot be read ({error.strerror or error})"
    return None


def shards_of(file: Path) -> list[Path]:
    """Return all files of the model that ``file`` is one of, ``<name>00001-of-00004.safetensors``; else itself."""
    if (match := re.fullmatch(r"(.*?)\d{5}-of-(\d{5})\.safetensors", file.name)) is None:
        return [file]
    count = int(match[2])
    return [file.with_name(f"{match[1]}{i + 1:05d}-of-{count:05d}.safetensors") for i in range(count)]


def fingerprint(path: str | Path) -> str:
    """Return 16 hex digits that change when the weights or configs under ``path`` change.

    A file's size and 256 evenly spaced slices of it are hashed, so a 24 GB checkpoint takes milliseconds. Any
    retrained or requantised file differs in every slice; a file edited by hand in a few bytes may be missed.
    A file that is one of several is the hash of all. A folder is that of its ``*.json``, ``*.safetensors`` and
    tokenizer files by relative name; where there are no safetensors, of PyTorch's and TensorFlow's weight files.
    """
    root = Path(path)
    if not root.exists():
        raise UserError(f"{path}: no such file or folder{broken_link(path)}; check the path")
    wanted = {".json", ".safetensors", ".txt", ".model"}
    files = (
        [f for f in shards_of(root) if f.is_file()]
        if root.is_file()
        else sorted(f for f in root.rglob("*") if f.is_file())
    )
    if root.is_dir():
        if not any(file.suffix == ".safetensors" for file in files):
            wanted |= {".bin", ".pth", *(file.suffix for file in files if file.suffix.startswith(".data-"))}
        files = [file for file in files if file.suffix in wanted]
    digest, folder = hashlib.sha256(), root if root.is_dir() else root.parent
    for file in files:
        size = file.stat().st_size
        digest.update(os.fsencode(f"{'' if file == root else file.relative_to(folder)}|{size}|"))
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
    """
    files = list(Path(path).glob("*.safetensors")) or list(Path(path).glob("*.gguf"))  # of a file: nothing
    return fingerprint(files[0] if len(files) == 1 else path)
