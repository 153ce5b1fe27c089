"""What a quick look at an image file shows: whether it decodes, its size, content hash, perceptual hash and borders.

The whole file is decoded, or a truncated one would pass, but JPEGs at an eighth of their size where that is enough
(``Image.draft``: the decoder leaves out the fine frequencies). Results are cached by bytes and modification time, so
that the next check of ten thousand images opens none.

The perceptual hash is a difference hash (Krawetz 2013, "Kind of like that"): the image in grey at 9 x 8, a bit for
every pair of neighbours that says which is brighter, 64 bits. Resizing, recompression and brightness leave nearly all
of them alone. Flat images have no such differences, so an 8 x 8 thumbnail in colour is kept beside it. Both are twenty
lines; the package ``imagehash`` would bring scipy and PyWavelets.
"""

from __future__ import annotations

import base64
import io
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

from library.data.file_index import FileMemory, SourceFile, content_hash
from library.data.images import decode, read_header, upright
from library.errors import UserError, reason_of
from library.files import read_bytes

_VERSION = 5
_REDUCED = 256  # longer side of the reduced image in which borders are looked for
_SAME_ROW = 24  # spread of a bar's row, of 255: a JPEG's bar is not quite even
_SAME_BAR = 12  # and how far a row may lie from the bar's first one
_EDGE = 3  # rows in which a picture begins, reduced as it is


@dataclass(frozen=True, slots=True)
class ImageStats:
    """What one file shows; the fields after ``problem`` are 0 or empty where it does not decode."""

    problem: str | None
    width: int = 0
    height: int = 0
    content: str = ""  # hash of the bytes
    dhash: int = 0  # 64 bits
    thumbnail: str = ""  # 8 x 8 RGB, base64
    bars: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # left, top, right, bottom, as shares of the side
    frames: int = 1  # or pages

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, upright."""
        return self.width, self.height


def measure_image(path: str) -> ImageStats:
    """Look at a file; what is wrong with it is in ``problem``."""
    try:
        data = read_bytes(path)
        (width, height), frames = read_header(path)
        small = reduced(data, path, _REDUCED)
    except UserError as error:
        return ImageStats(str(error).removeprefix(f"{path}: "))
    thumbnail = np.asarray(small.resize((8, 8), Image.Resampling.BOX), np.uint8)
    return ImageStats(
        None,
        width,
        height,
        content_hash(data),
        difference_hash(small),
        base64.b64encode(thumbnail.tobytes()).decode(),
        find_bars(small),
        frames,
    )


def difference_hash(image: Image.Image) -> int:
    """Return 64 bits: of each row of 9 grey values, whether the left of two neighbours is brighter."""
    grey = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.LANCZOS), np.int16)
    bits = (grey[:, :-1] > grey[:, 1:]).reshape(-1)
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def find_bars(image: Image.Image) -> tuple[float, float, float, float]:
    """Return the share of the side that even bars take at left, top, right and bottom; all 0 for an even image."""
    planes = np.ascontiguousarray(np.asarray(image.convert("RGB")).transpose(2, 0, 1))  # [3, H, W]: quick to reduce
    lengths = []
    for across in (1, 2):  # columns, rows
        spread = np.subtract(planes.max(axis=across), planes.min(axis=across), dtype=np.int16).max(axis=0)
        means = planes.mean(axis=across, dtype=np.float32)
        rows = planes.swapaxes(1, 2) if across == 1 else planes
        lengths += [_bar(spread, means, rows), _bar(spread[::-1], means[:, ::-1], rows[:, ::-1])]
    left, right, top, bottom = lengths
    height, width = planes.shape[1:]
    if left == width or top == height:
        return (0.0, 0.0, 0.0, 0.0)
    return round(left / width, 3), round(top / height, 3), round(right / width, 3), round(bottom / height, 3)


def _bar(spread: NDArray[np.int16], means: NDArray[np.float32], rows: NDArray[np.uint8]) -> int:
    """Return how many rows from the first on are even and of the first's colour, if a picture begins behind them.

    There, most of a row has another colour. Behind an even background only as much has as the subject is wide.

    Args:
        spread: [n] of each row. means: [3, n]. rows: [3, n, m].
    """
    even = (spread <= _SAME_ROW) & (np.abs(means - means[:, :1]).max(axis=0) <= _SAME_BAR)
    if even.all():
        return len(even)
    length = int(even.argmin())
    differs = np.abs(rows[:, length : length + _EDGE] - means[:, :1, None]).max(axis=0) > _SAME_ROW
    return length if differs.mean(axis=1).max() >= 0.5 else 0


def reduced(data: bytes, name: str, side: int) -> Image.Image:
    """Decode to RGB, at most ``side`` pixels a side, without the full size in between where that is a JPEG."""
    if data[:2] == b"\xff\xd8" and not ImageFile.LOAD_TRUNCATED_IMAGES:
        try:
            with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
                image.draft("RGB", (side, side))
                small = upright(image).convert("RGB")
        except Exception as error:  # Pillow's plugins raise many types here, all of them about the file
            raise UserError(f"{name}: damaged image ({reason_of(error)}); replace or remove it") from None
    else:
        small, _ = decode(data, name)
    small.thumbnail((side, side), Image.Resampling.BOX)
    return small


def measure_images(
    folder: Path, files: Sequence[SourceFile], start: Callable[[int], Callable[[int], None]]
) -> list[ImageStats]:
    """Return what each file shows, from memory where it is as it was.

    Args:
        folder: the cache, which need not exist yet.
        files: to look at.
        start: ``start(total) -> advance(n)``, of those that have not been looked at as they are.
    """
    memory = FileMemory(folder / "image_stats.json", _VERSION, ("images",))
    found = {file.path: _remembered(memory, file) for file in files}
    new = [file for file in files if found[file.path] is None]
    advance, started = start(len(new)), time.time_ns()
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow and hashing let go of the interpreter's lock
        for file, stats in zip(new, pool.map(measure_image, [file.path for file in new]), strict=True):
            found[file.path] = stats
            advance(1)
            memory.keep("images", file.path, file.stat, started, asdict(stats))
    memory.save()
    return [known for file in files if (known := found[file.path])]


def _remembered(memory: FileMemory, file: SourceFile) -> ImageStats | None:
    for known in memory.recall("images", file.path, file.stat):
        if known["problem"] is None:  # else it may have passed: a plug-in was installed, a share is back
            return ImageStats(**known | {"bars": tuple(known["bars"])})
    return None
