"""Small pictures of images, made by processes that end with the page and kept on disk.

A decoder that crashes, an image that takes all memory or for ever ends one of these processes, not the page, which
shows a sign in its place. Each pool has one process, so that only the image that ended it is without its picture. A
picture's name follows from the image's path, bytes and time.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from queue import Queue
from threading import Thread

from library.files import atomic_path

SIDE = 384  # pixels: twice what a card shows
_WORKERS = 2
_SECONDS, _MEMORY = 20, 3 * 2**30  # for one image; bytes
_MOST_BYTES = 500 * 2**20  # of all of them; the oldest are removed when the page begins to show some


class Thumbnails:
    """The pictures kept in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._idle: Queue[ProcessPoolExecutor] = Queue()
        for _ in range(_WORKERS):
            self._idle.put(_pool())
        kept = sorted(((path.stat(), path) for path in folder.glob("*/*.jpg")), key=lambda one: -one[0].st_mtime)
        for (_, path), total in zip(kept, accumulate(stat.st_size for stat, _ in kept), strict=True):
            if total > _MOST_BYTES:
                path.unlink(missing_ok=True)

    def get(self, image: Path) -> Path | None:
        """Return the file with an image's small picture; None if there can be none."""
        if not image.is_file():  # a pipe would wait
            return None
        stat = image.stat()
        name = hashlib.sha256(os.fsencode(f"{SIDE} {image} {stat.st_mtime_ns} {stat.st_size}")).hexdigest()
        kept = self._folder / name[:2] / f"{name[2:30]}.jpg"
        if kept.is_file():
            return kept
        pool = self._idle.get()
        try:
            return kept if pool.submit(make, image, kept).result() else None
        except BrokenProcessPool:  # the image was too much for it
            pool = _pool()
            return None
        finally:
            self._idle.put(pool)


def _pool() -> ProcessPoolExecutor:
    """Return a pool of one process, which begins when it is first needed."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _limit)


def _limit() -> None:
    """Limit this process, and have it end with the page, however that ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what decoders say of broken images is for nobody
    Thread(target=_end_with_the_page, daemon=True).start()
    with suppress(ImportError):  # Windows has none
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))


def _end_with_the_page() -> None:
    if page := multiprocessing.parent_process():
        page.join()
        os._exit(1)


def make(image: Path, kept: Path) -> bool:
    """Write an image's small picture: upright, its first frame, on white where it is transparent; tell if it could."""
    from PIL import Image, ImageOps

    Image.MAX_IMAGE_PIXELS = 200_000_000  # it refuses twice as many
    alarm = getattr(signal, "alarm", int)  # ends the process; Windows has none
    alarm(_SECONDS)
    with suppress(Exception), Image.open(image) as opened:  # Pillow's plugins raise many types
        opened.draft("RGB", (SIDE, SIDE))
        small: Image.Image = ImageOps.exif_transpose(opened)
        if small.mode[0] == "I":  # 16 bits and more
            small = small.convert("F").point(lambda value: value * (1 / 256) + 0)
        small = small.convert("RGBA")
        small.thumbnail((SIDE, SIDE), reducing_gap=2)
        small = Image.alpha_composite(Image.new("RGBA", small.size, "white"), small).convert("RGB")
        with atomic_path(kept) as temporary:
            small.save(temporary, "JPEG", quality=80)
    alarm(0)
    return kept.is_file()
