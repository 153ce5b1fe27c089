"""Image files: cut off, of random bytes, with bytes changed, in every mode that Pillow can save."""

from __future__ import annotations

import io
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageMode

from library.data.images import decode, read_size, reduced
from tests.fuzz import harmless, share_of_cases

MODES = ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "RGBX", "RGBa", "La"]
MODES += ["I;16"]
FORMATS = ["PNG", "JPEG", "WEBP", "BMP", "AVIF", "TIFF", "GIF", "TGA", "PPM", "ICO", "JPEG2000", "DDS", "SGI"]


def pictures() -> dict[tuple[str, str], bytes]:
    """Return (mode, format) -> a picture's file, of all pairs that Pillow writes."""
    found = {}
    for mode in MODES:
        for kind in FORMATS:
            file = io.BytesIO()
            try:
                Image.new(mode, (21, 13)).save(file, kind)
            except Exception:  # not all pairs can be written, and each plugin says so in its own way
                continue
            found[mode, kind] = file.getvalue()
    return found


PICTURES = pictures()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def look(folder: Path, data: bytes, suffix: str, alpha_mask: bool) -> None:
    """Do with a file all that is done with a dataset's image."""
    path = folder / f"picture{suffix}"
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of what it then refuses or repairs
        harmless(read_size, str(path))
        decoded = harmless(decode, data, str(path), alpha_mask)
        harmless(reduced, data, str(path), 256)
    if decoded is not None:
        image, mask = decoded
        assert image.mode == "RGB"
        assert mask is None or (mask.mode == "L" and mask.size == image.size)


@pytest.mark.parametrize(("mode", "kind"), PICTURES)
def test_every_mode_in_every_format_is_taken_or_refused(folder: Path, mode: str, kind: str) -> None:
    assert ImageMode.getmode(mode)
    look(folder, PICTURES[mode, kind], f".{kind.lower()}", alpha_mask=True)


@share_of_cases(0.02)
@given(data=st.binary(max_size=200), suffix=st.sampled_from([".png", ".jpg", ".webp", ".avif", ".bmp"]))
def test_random_bytes_are_refused(folder: Path, data: bytes, suffix: str) -> None:
    look(folder, data, suffix, alpha_mask=False)


@share_of_cases(0.08)
@given(picture=st.sampled_from(sorted(PICTURES)), data=st.data(), alpha_mask=st.booleans())
def test_damaged_pictures_are_taken_or_refused(
    folder: Path, picture: tuple[str, str], data: st.DataObject, alpha_mask: bool
) -> None:
    content = bytearray(PICTURES[picture])
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    look(folder, bytes(content[:end]), f".{picture[1].lower()}", alpha_mask)
