"""Small pictures of images, made by a few processes that end with the page and kept on disk.

A decoder that crashes, an image that takes all memory or for ever ends one of these processes, not the page, which
shows a sign in its place. ``python -m library.web.thumbnails`` reads lines of JSON, [image, JPEG to write], and
answers each with an empty line, or with why there is none. A picture's name
follows from the image's path, bytes and time.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from queue import Queue

from library.files import atomic_path
from library.web.jobs import ROOT

SIDE = 384  # pixels: twice what a card shows
_WORKERS = 2
_SECONDS, _MEMORY = 20, 3 * 2**30  # for one image; bytes
_MOST_BYTES = 500 * 2**20  # of all of them; the oldest are removed when the page begins to show some
_MOST_PIXELS = 400_000_000


class Thumbnails:
    """The pictures kept in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._idle: Queue[subprocess.Popen[str] | None] = Queue()
        for _ in range(_WORKERS):
            self._idle.put(None)  # begun when it is wanted
        kept = sorted(((path.stat(), path) for path in folder.glob("*/*.jpg")), key=lambda one: -one[0].st_mtime)
        for (_, path), total in zip(kept, accumulate(stat.st_size for stat, _ in kept), strict=True):
            if total > _MOST_BYTES:
                path.unlink(missing_ok=True)

    def get(self, image: Path) -> Path | None:
        """Return the file with an image's small picture; None if there can be none."""
        try:
            stat = image.stat()
        except OSError:
            return None
        if not image.is_file():  # a pipe would wait
            return None
        name = hashlib.sha256(os.fsencode(f"{SIDE} {image} {stat.st_mtime_ns} {stat.st_size}")).hexdigest()
        kept = self._folder / name[:2] / f"{name[2:30]}.jpg"
        return kept if kept.is_file() or self._make(image, kept) else None

    def _make(self, image: Path, kept: Path) -> bool:
        worker = self._idle.get()
        try:
            if worker is None or worker.poll() is not None:
                worker = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, text=True, cwd=ROOT,
                                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # fmt: skip
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(json.dumps([str(image), str(kept)]) + "\n")
            worker.stdin.flush()
            return worker.stdout.readline() == "\n"
        except OSError:  # it has ended
            return False
        finally:
            self._idle.put(worker)


def make(image: str, kept: str) -> None:
    """Write an image's small picture: upright, its first frame, on white where it is transparent."""
    from PIL import Image, ImageOps

    with Image.open(image) as opened:
        if opened.width * opened.height > _MOST_PIXELS:
            raise ValueError("too many pixels")
        opened.draft("RGB", (SIDE, SIDE))
        small: Image.Image = ImageOps.exif_transpose(opened)
        if small.mode[0] in "IF":  # 16 bits and more
            small = small.convert("F").point(lambda value: value * (1 / 256) + 0) if small.mode[0] == "I" else small
            small = small.convert("L")
        if small.has_transparency_data:
            small = small.convert("RGBA")
            small = Image.alpha_composite(Image.new("RGBA", small.size, "white"), small)
        small = small.convert("RGB")
        small.thumbnail((SIDE, SIDE), reducing_gap=2)
    with atomic_path(kept) as temporary:
        small.save(temporary, "JPEG", quality=80)


def main() -> None:
    """Make pictures until stdin ends."""
    from PIL import Image

    if sys.platform != "win32":
        import resource
        import signal

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    Image.MAX_IMAGE_PIXELS = None  # make() looks itself
    for line in sys.stdin:
        if sys.platform != "win32":
            signal.alarm(_SECONDS)  # ends the process
        try:
            make(*json.loads(line))
            print(flush=True)
        except Exception as error:  # Pillow's plugins raise many types
            print(type(error).__name__, flush=True)
        if sys.platform != "win32":
            signal.alarm(0)


if __name__ == "__main__":
    main()
