"""The images, captions and masks of one subset, found but not opened.

Two ways to say which images: a folder (kohya's DreamBooth form: each image with a caption file of the same
stem, else ``class_tokens``) or a metadata file (kohya's fine-tuning form): JSON ``{image: {"caption",
"tags"}}`` or JSON lines ``{"image_path", "caption", "tags"}``. Relative image paths in a metadata file
start at ``image_dir``, without one at the metadata file's folder, and may not leave it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from library.data.config import Subset
from library.data.file_index import FileIndex, SourceFile, list_folder
from library.data.images import IMAGE_SUFFIXES
from library.errors import UserError, did_you_mean

_CONTROL_KEYS = ("control_path", "control_path_0", "control_path_1")


@dataclass(frozen=True, slots=True)
class Source:
    """One image; ``name`` is its path relative to the subset's folder, ``caption`` its raw text."""

    name: str
    image: SourceFile
    caption: str
    mask: SourceFile | None


def find_sources(subset: Subset, index: FileIndex, warnings: list[str]) -> list[Source]:
    """List a subset's images with captions and masks, sorted by name.

    Args:
        subset: where to look.
        index: memory of the subset's cache folder.
        warnings: lines are added about images without a caption and masks without an image.

    Raises:
        UserError: no images; missing, empty or unreadable captions, metadata or masks.
    """
    found = _from_metadata(subset, index) if subset.metadata_file else _from_folder(subset, index, warnings)
    if subset.mask_dir is None:
        return [Source(name, image, caption, None) for name, image, caption in found]
    return _with_masks(subset, subset.mask_dir, found, index, warnings)


_Found = tuple[str, SourceFile, str]  # name, image, raw caption


def is_image(name: str) -> bool:
    """Whether a file name has the suffix of a format that can be read."""
    return f".{name.rpartition('.')[2].lower()}" in IMAGE_SUFFIXES  # pathlib takes seconds for 100,000 names


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _from_folder(subset: Subset, index: FileIndex, warnings: list[str]) -> list[_Found]:
    folder = subset.image_dir
    assert folder is not None
    files = list_folder(folder)
    names = [name for name in files if is_image(name)]
    if not names:
        inside = any(entry.is_dir() and not entry.name.startswith(".") for entry in os.scandir(folder))
        hint = "; images must lie directly in it: write a subset for each folder inside" if inside else ""
        raise UserError(
            f"{subset.where}: image_dir {str(folder)!r} holds no images "
            f"(png, jpg, webp, bmp, avif, jxl){hint or '; name the folder that does'}"
        )
    suffix = subset.settings.caption_extension
    suffix = suffix if not suffix or suffix.startswith(".") else f".{suffix}"
    found: list[_Found] = []
    without: list[str] = []
    for name in names:
        caption_name = _stem(name) + suffix
        if caption_name in files and caption_name != name:
            caption = _read_caption(f"{folder}{os.sep}{caption_name}", files[caption_name], subset, index)
        else:
            without.append(name)
            caption = subset.settings.class_tokens or ""
        found.append((name, index.image(f"{folder}{os.sep}{name}", files[name]), caption))
    if without and subset.settings.class_tokens is None:
        _complain_about_missing_captions(subset, files, without, suffix, len(names), warnings)
    return found


def _read_caption(path: str, stat: tuple[int, int], subset: Subset, index: FileIndex) -> str:
    lines = [line.strip() for line in index.caption(path, stat).splitlines()]
    if not any(lines):
        raise UserError(f"{path}: empty caption; write one, or delete the file to use class_tokens")
    return "\n".join(line for line in lines if line) if subset.settings.enable_wildcard else lines[0]


def _complain_about_missing_captions(
    subset: Subset,
    files: dict[str, tuple[int, int]],
    without: list[str],
    suffix: str,
    total: int,
    warnings: list[str],
) -> None:
    if len(without) < total:
        warnings.append(
            f"{subset.where}: {len(without)} of {total} images have no {suffix} file ({without[0]}, ...) "
            "and are trained with an empty caption; write captions or set class_tokens"
        )
        return
    stems = {_stem(name) for name in without}
    texts = (".txt", ".caption", ".cap", ".tags")
    beside = [end for end in texts if any(stem + end in files for stem in stems)]
    if beside:
        remedy = f"set caption_extension = '{beside[0]}'"
    else:
        remedy = 'write captions, or set class_tokens to one caption for all ("" for none)'
    raise UserError(f"{subset.where}: none of the {total} images has a {suffix} file; {remedy}")


def _from_metadata(subset: Subset, index: FileIndex) -> list[_Found]:
    file = subset.metadata_file
    assert file is not None
    base = subset.image_dir or file.parent
    folders: dict[str, _Folder] = {}
    found: list[_Found] = []
    for where, name, entry in _metadata_entries(file):
        path = _inside(base, name, where)
        folder, written = os.path.split(path)
        if folder not in folders:
            folders[folder] = _Folder(folder)
        file_name = folders[folder].find(written)
        if file_name is None:
            near = did_you_mean(written, folders[folder].files) or f"; it is looked for in {folder}"
            raise UserError(f"{where}: image {name!r} does not exist{near}")
        image = index.image(f"{folder}{os.sep}{file_name}", folders[folder].files[file_name])
        found.append((name, image, _metadata_caption(subset, entry, where)))
    if not found:
        raise UserError(f"{file}: no images in it; write one entry an image")
    return sorted(found, key=lambda item: item[0])


class _Folder:
    """A folder's files. Images are found with suffix or, as sd-scripts' tools write them, without."""

    def __init__(self, path: str) -> None:
        self.files = list_folder(path) if Path(path).is_dir() else {}
        self._stems: dict[str, str] | None = None

    def find(self, name: str) -> str | None:
        if name in self.files:
            return name
        if self._stems is None:
            self._stems = {_stem(image): image for image in self.files if is_image(image)}
        return self._stems.get(name)


def _metadata_entries(file: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (place for messages, image path as written, its entry) of a JSON or JSON lines file."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); check the file") from error
    if file.suffix.lower() == ".jsonl":
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            where = f"{file} line {number}"
            entry = _parse_json(line, where)
            if not isinstance(entry, dict) or not isinstance(entry.get("image_path"), str):
                raise UserError(f'{where}: no "image_path"; write {{"image_path": ..., "caption": ...}}')
            yield where, entry["image_path"], entry
        return
    entries = _parse_json(text, str(file))
    if not isinstance(entries, dict):
        raise UserError(f'{file}: not an object; write {{"image.png": {{"caption": ...}}}}, or name the file .jsonl')
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            raise UserError(f'{file}: entry {name!r} is not an object; write {{"caption": ...}}')
        yield f"{file}: {name!r}", name, entry


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error}); correct it") from None


def _inside(base: Path, name: str, where: str) -> str:
    """Absolute path of a metadata entry; a relative one must stay below ``base``."""
    path = Path(name).expanduser()
    full = os.path.normpath(base / path)
    if path.is_absolute():
        return full
    if not os.path.realpath(full).startswith(os.path.realpath(base) + os.sep):
        raise UserError(f"{where}: image {name!r} lies outside {base}; write its absolute path")
    return full


def _metadata_caption(subset: Subset, entry: dict[str, Any], where: str) -> str:
    for key in _CONTROL_KEYS:
        if key in entry:
            raise UserError(f"{where}: {key!r} is not taken: FLUX.1 dev and schnell take no control image; remove it")
    caption, tags = entry.get("caption"), entry.get("tags")
    for key, value in (("caption", caption), ("tags", tags)):
        if value is not None and not isinstance(value, str):
            raise UserError(f"{where}: {key!r} is not a string; write it in quotes")
    glue = f"{subset.settings.caption_separator.strip()} "
    lines = [line.strip() for line in (caption or "").splitlines() if line.strip()]
    if not subset.settings.enable_wildcard:
        lines = lines[:1]
    one_line_of_tags = glue.join(tag.strip() for tag in (tags or "").splitlines() if tag.strip())
    if one_line_of_tags:
        lines = [f"{line}{glue}{one_line_of_tags}" for line in lines] or [one_line_of_tags]
    if not lines and caption is None and tags is None and subset.settings.class_tokens is None:
        raise UserError(f'{where}: neither "caption" nor "tags"; add one, or set class_tokens')
    return "\n".join(lines) or (subset.settings.class_tokens or "" if caption is None else "")


def _with_masks(
    subset: Subset, folder: Path, found: list[_Found], index: FileIndex, warnings: list[str]
) -> list[Source]:
    files = list_folder(folder)
    masks: dict[str, str] = {}
    for name in files:
        if is_image(name):
            masks.setdefault(_stem(name), name)
    stems = [_stem(PurePath(name).name) for name, _, _ in found]
    missing = [name for stem, (name, _, _) in zip(stems, found, strict=True) if stem not in masks]
    if missing:
        raise UserError(
            f"{subset.where}: {len(missing)} of {len(found)} images have no mask in conditioning_data_dir "
            f"{folder} ({missing[0]}, ...); add a white image of the same name to train all of it"
        )
    unused = sorted(masks.keys() - set(stems))
    if unused:
        warnings.append(f"{subset.where}: {len(unused)} masks in {folder} belong to no image ({masks[unused[0]]}, ...)")
    return [
        Source(name, image, caption, index.image(f"{folder}{os.sep}{masks[stem]}", files[masks[stem]]))
        for stem, (name, image, caption) in zip(stems, found, strict=True)
    ]
