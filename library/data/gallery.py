"""The images of a dataset as training sees them, as ``check_dataset.py --json`` writes them for the browser's page.

An image is described by the box that is cut out of it for its bucket; what the model is given besides (the image
without the region to fill, the loss mask, control images, all as they are encoded); its captions; how often it is seen;
and what was found about it. Small pictures of the images lie in a folder of their own.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image

from library.data.buckets import Fit, size_text
from library.data.cache import preview_names, previews
from library.data.captions import can_drop, caption_variants
from library.data.config import DatasetConfig, Subset
from library.data.file_index import content_hash
from library.data.images import is_turned, reduced
from library.data.lint import KINDS, Report, title
from library.data.samples import Sample
from library.data.sources import caption_suffix, is_image, stem
from library.files import atomic_path, clear_leftovers, read_bytes

SIDE = 192  # of a picture of a mask or control image, pixels
THUMBNAIL_SIDE = 384  # of an image: twice what a card of the browser's page shows
_CAPTIONS_SHOWN = 3


def small_jpeg(image: Image.Image, side: int = SIDE) -> bytes:
    """Return an image, made no larger than ``side``, as a JPEG file."""
    small = image.convert("RGB")
    small.thumbnail((side, side), reducing_gap=2)
    data = io.BytesIO()
    small.save(data, "JPEG", quality=75)
    return data.getvalue()


def thumbnail_name(image: str) -> str | None:
    """Return what the small picture of an image is called, by its path, size and time; None if it is not there."""
    try:
        stat = Path(image).stat()
    except OSError:
        return None
    known = os.fsencode(f"{THUMBNAIL_SIDE} {image} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}")
    return f"{hashlib.sha256(known).hexdigest()[:32]}.jpg"


def write_thumbnails(images: Mapping[str, str], folder: Path, advance: Callable[[int], None]) -> None:
    """Have ``folder`` hold a small JPEG of each image, and none of others; those that are there are not made again.

    Args:
        images: path -> :func:`thumbnail_name`; one that cannot be shown has no file in the end.
        folder: made if need be; of its files only thumbnails are removed.
        advance: counts the images.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder)
    for name in {path.name for path in folder.iterdir()} - set(images.values()):
        if re.fullmatch(r"[0-9a-f]{32}\.jpg", name):
            (folder / name).unlink(missing_ok=True)
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(_write_thumbnail, images, [folder / name for name in images.values()]):
            advance(1)


def _write_thumbnail(image: str, path: Path) -> None:
    """Write a small JPEG of an image file, upright, unless it is there; none of one that cannot be shown."""
    if path.exists():
        return
    try:
        data = small_jpeg(reduced(read_bytes(image), image, THUMBNAIL_SIDE), THUMBNAIL_SIDE)
    except Exception:  # whatever a broken image does to a decoder; its finding says what is wrong
        return
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def crop_box(fit: Fit) -> tuple[float, float, float, float]:
    """Return left, top, width and height of what is trained on, in percent of the image."""
    left, top = fit.offset
    left += (fit.encoded[0] - fit.bucket[0]) // 2
    top += (fit.encoded[1] - fit.bucket[1]) // 2
    wide, high = fit.resized
    return 100 * left / wide, 100 * top / high, 100 * fit.bucket[0] / wide, 100 * fit.bucket[1] / high


def marks_of(sample: Sample) -> list[str]:
    """Return what is special about a sample, in words."""
    settings = sample.settings
    marks = ["held out"] if sample.held_out else []
    marks += ["regularisation"] if settings.is_reg else []
    marks += [f"trigger word: {settings.trigger_word}"] if settings.trigger_word else []
    marks += [f"class: {settings.preserve_class}"] if settings.preserve_class else []
    marks += ["mirrored half of the time"] if sample.flips else []
    return marks + (["caption dropped at times"] if can_drop(settings) and not sample.held_out else [])


def hashed_previews(sample: Sample, seed: int) -> list[tuple[str, Image.Image]]:
    """Return ``previews`` of a sample whose files may not have been hashed yet."""
    for file in sample.files:
        file.content = file.content or content_hash(read_bytes(file.path))
    return previews(sample, seed)


def described(config: DatasetConfig, report: Report, samples: Sequence[Sample], refused: str | None) -> dict[str, Any]:
    """Return a check's findings, the buckets and all images in their order, as JSON can hold them.

    Paths have their links resolved. Images that training would stop at come last and have no bucket; a finding names
    images by their number in the list. ``refused``: why there are no samples.
    """
    buckets: dict[tuple[int, tuple[int, int]], list[Sample]] = defaultdict(list)
    for sample in samples:
        buckets[sample.group.dataset, sample.fit.bucket].append(sample)
    images: list[dict[str, Any]] = []
    numbers: dict[str, list[int]] = defaultdict(list)  # of a file as findings name it
    for bucket, key in enumerate(sorted(buckets)):
        for sample in buckets[key]:
            for file in sample.files:
                numbers[file.path].append(len(images))
            subset, path = sample.group.subset, sample.image.path
            captions = caption_variants(sample.caption, sample.settings, _CAPTIONS_SHOWN)
            images.append(
                _known(path, subset, sample.caption_file)
                | {
                    "name": path.removeprefix(f"{subset.image_dir}{os.sep}"),
                    "size": sample.image.size,
                    "bucket": bucket,
                    "box": crop_box(sample.fit),
                    "captions": list(dict.fromkeys(captions)),
                    "repeats": sample.repeats,
                    "marks": marks_of(sample) + ["turned upright (EXIF)"] * is_turned(path),
                    "besides": preview_names(sample),
                    "companions": [os.path.realpath(file.path) for file in sample.files[1:]],
                }
            )
    subsets = [subset for dataset in config.datasets for subset in dataset.subsets]
    for path in dict.fromkeys(path for one in report.findings if one.is_error for path in one.paths):
        if path not in numbers:
            inside = [one for one in subsets if one.image_dir is not None and Path(path).is_relative_to(one.image_dir)]
            numbers[path].append(len(images))
            images.append(
                dict.fromkeys(("size", "bucket", "box"))
                | dict.fromkeys(("captions", "marks", "besides", "companions"), ())
                | _known(path, inside[0] if inside else None)
                | {"name": Path(path).name, "repeats": 0}
            )
    kinds = _put_findings(report, images, numbers)
    several = len(config.datasets) > 1
    return {
        "dataset": str(config.path),
        "notes": [*report.sizes, *report.notes],
        "refused": refused,
        "images": images,
        "kinds": kinds,
        "buckets": [
            {
                "name": size_text(size) + f", dataset {number + 1}" * several,
                "images": len(buckets[number, size]),
                "batch_size": config.datasets[number].settings.batch_size,
                "seen": sum(s.repeats for s in buckets[number, size] if not s.held_out),
            }
            for number, size in sorted(buckets)
        ],
    }


def _put_findings(
    report: Report, images: list[dict[str, Any]], numbers: Mapping[str, list[int]]
) -> list[dict[str, Any]]:
    """Give each image its findings; return those of each kind, which name images by their ``numbers``."""
    for image in images:
        image["findings"] = []
    kinds = []
    for kind, found in report.by_kind().items():
        named = [sorted({n for path in one.paths for n in numbers[path]}) for one in found]
        findings = [{"text": one.text, "images": of} for one, of in zip(found, named, strict=True)]
        kinds.append({"kind": kind, "title": title(found), "is_error": found[0].is_error, "findings": findings})
        for one, of in zip(found, named, strict=True):
            for number in of:
                other = next((images[n]["name"] for n in of if images[n]["path"] != images[number]["path"]), "another")
                short = KINDS[kind]["short"].format(other=other)
                found_there = {"kind": kind, "short": short, "is_error": one.is_error, "text": one.text}
                images[number]["findings"].append(found_there)
    return kinds


def _known(image: str, subset: Subset | None, caption_file: str | None = None) -> dict[str, Any]:
    """Where an image and its caption lie, or why that cannot be edited."""
    path, caption, why = os.path.realpath(image), None, "no subset of the dataset names it"
    if subset is not None and subset.metadata_file is not None:
        why = f"it stands in {subset.metadata_file.name}; edit that file"
    elif subset is not None and is_image(f"x{caption_suffix(subset)}"):
        why = f"caption_extension {caption_suffix(subset)} is that of an image; name another in the TOML"
    elif subset is not None:
        caption, why = os.path.realpath(caption_file or stem(image) + caption_suffix(subset)), ""
    return {"path": path, "caption_file": caption, "why": why}
