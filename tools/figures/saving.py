"""How the pictures of the documentation are written."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from library.files import atomic_path


def save(figure: Figure, path: Path) -> Path:
    """Write ``figure`` as a PNG of 96 colours on white that is the same every time; return its path."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    picture = Image.open(drawn).convert("RGB").quantize(96, dither=Image.Dither.NONE)
    with atomic_path(path) as temporary:
        picture.save(temporary, format="PNG", optimize=True)
    return path
