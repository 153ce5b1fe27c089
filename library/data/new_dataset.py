"""Which files a dataset is made of, and how one begins: a folder of images, its TOML, files that are put into it.

Nothing heavy is imported here, as library/web/data.py asks.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import BinaryIO

from library.errors import UserError
from library.files import find_bad_name, toml_text, write_text

_PNG_AND_JPEG = (".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif")
IMAGE_SUFFIXES = frozenset((*_PNG_AND_JPEG, ".webp", ".avif", ".bmp", ".dib", ".tif", ".tiff", ".gif"))
CAPTION_SUFFIXES = frozenset((".txt", ".caption"))  # of new ones; a dataset may name others
LEAST_RESOLUTION = 32  # a patch of every model
MOST_CAPTION_BYTES = 2**20  # no model reads more than a few thousand


def write_dataset(folder: Path, image_dir: str, trigger_word: str, resolution: str, repeats: str) -> Path:
    """Write the TOML of a new dataset of one subset, as a person has typed its values; return its path.

    Args:
        folder: of the TOML.
        image_dir: of the images, as seen from ``folder``; it is made if need be. Captions end as they do in there:
            ".caption" where only such are there, else ".txt".
        trigger_word: or "".
        resolution: pixels.
        repeats: of each image in an epoch.
    """
    try:
        numbers = {"resolution": int(resolution), "num_repeats": int(repeats)}
    except ValueError:
        numbers = {}
    if numbers.get("resolution", 0) < LEAST_RESOLUTION or numbers["num_repeats"] < 1:
        raise UserError(f"New dataset: resolution and repeats are whole numbers from {LEAST_RESOLUTION} and 1")
    images = folder / image_dir
    images.mkdir(parents=True, exist_ok=True)
    endings = {file.suffix for file in images.iterdir()} & CAPTION_SUFFIXES
    subset: dict[str, object] = {"image_dir": image_dir, "num_repeats": numbers["num_repeats"]}
    subset["validation_split"] = "auto"
    subset |= {"trigger_word": trigger_word} if trigger_word else {"class_tokens": ""}  # without: refused
    ending = ".caption" if endings == {".caption"} else ".txt"
    tables = {
        "general": {"caption_extension": ending, "multiline_captions": True, "enable_bucket": True},
        "datasets": [{"resolution": numbers["resolution"], "batch_size": 1, "subsets": [subset]}],
    }
    write_text(folder / "dataset.toml", toml_text(tables))
    return folder / "dataset.toml"


def find_bad_start(name: str) -> str | None:
    """Return in words why a dataset or a file of it cannot be called ``name``; None if it can."""
    return find_bad_name(name) or ("a dot at its beginning hides it; remove it" if name[0] == "." else None)


def refusal_of(name: str) -> str | None:
    """Return in words why a file called ``name`` is not put into a dataset; None if it is."""
    is_known = Path(name).suffix.lower() in IMAGE_SUFFIXES | CAPTION_SUFFIXES
    remedy = "save a photo as JPEG or PNG, a caption as .txt"  # HEIC of phones, raw files of cameras, documents
    return find_bad_start(name) or (None if is_known else f"files of this kind are not read here; {remedy}")


def add_file(path: Path, content: BinaryIO) -> str | None:
    """Write an image or caption into a dataset, over none that is there; return why not, None if it was written."""
    if path.suffix.lower() in CAPTION_SUFFIXES and not content.read(MOST_CAPTION_BYTES).strip():
        return "is empty; an image without a caption needs no file"
    content.seek(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "xb") as output:
            shutil.copyfileobj(content, output)
    except FileExistsError:
        return "there is one of this name already; it was left as it is"
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return None
