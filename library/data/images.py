"""From an image file to the pixels the image encoder sees.

Every image becomes 8-bit RGB, upright, in sRGB:

- EXIF orientation is applied. JPEG XL carries its own, which the decoder has applied already; its EXIF copy
  of it is ignored, as the standard asks, except in transcoded JPEGs, which come back as they were.
- an embedded colour profile that is not sRGB (CMYK scans, Display P3 phones, Adobe RGB) is converted by it;
- 16-bit greyscale is scaled (Pillow's own conversion would clip it to white); palette images are expanded;
- transparent pixels are blended onto white, or kept as the mask with ``alpha_mask``.

Sizes are read without decoding the image. Of an animation (GIF, APNG, WebP, AVIF) or a TIFF of several pages the first
is used, and how many there are is told with the size. A TIFF is turned upright by Pillow itself as it is loaded, and
gives its upright size before.

Pillow's JPEG XL plugin decodes the whole image when it is opened, which makes reading the sizes of a folder
as slow as reading its images, and decodes a decompression bomb before anybody can ask for its size. The
header is short (ISO/IEC 18181-1): behind the signature FF 0A come, least significant bit first, SizeHeader
and the beginning of ImageMetadata, which holds the orientation. In the container form (18181-2) they open
the box ``jxlc`` or the first ``jxlp``.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import ExifTags, Image, ImageCms
from torch import Tensor

from library.config.model_types import Blank
from library.data.buckets import Fit, Size
from library.errors import UserError, reason_of
from library.files import reading

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile as OpenImage


if importlib.util.find_spec("pillow_jxl"):
    import pillow_jxl  # noqa: F401  (registers JPEG XL with Pillow)

warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # what is too large is an error here, in one line

_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "AVIF", "JXL", "BMP", "DIB", "TIFF", "GIF")  # as Pillow calls them
MAX_PIXELS = 178_956_970  # where Pillow speaks of a decompression bomb: 512 MiB of RGB

PIXELS_VERSION = 1  # part of every latent's key: raise it when the same file would give other pixels
DEFAULT_INTERPOLATION = "lanczos"
_FILTERS = {
    "lanczos": Image.Resampling.LANCZOS,
    "area": Image.Resampling.BOX,
    "box": Image.Resampling.BOX,
    "bicubic": Image.Resampling.BICUBIC,
    "cubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "linear": Image.Resampling.BILINEAR,
    "nearest": Image.Resampling.NEAREST,
}
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


def read_header(path: str) -> tuple[Size, int]:
    """Return the upright (width, height) of an image and the number of its frames or pages, without decoding it."""
    if path.lower().endswith(".jxl"):
        with reading(path), open(path, "rb") as file:
            return _size_of_jxl(file.read(HEADER_BYTES), path), 1
    with _open(path, path) as image:
        width, height = image.size
        size = (height, width) if _orientation(image) >= 5 else (width, height)
        return size, _frames(image)


def read_size(path: str) -> Size:
    """Return the upright (width, height) of an image, from its header alone."""
    return read_header(path)[0]


def decode(data: bytes, name: str, alpha_mask: bool = False) -> tuple[Image.Image, Image.Image | None]:
    """Decode an image file's bytes to an upright RGB image and its mask.

    Args:
        data: the file's content.
        name: the file's path, for messages.
        alpha_mask: return the alpha channel (mode L) as mask and leave the colours under it as they are. Else
            transparent pixels are blended onto white and the mask is None. An opaque image's mask is None.
    """
    with _open(io.BytesIO(data), name) as image:
        try:
            image.load()
        except Exception as error:  # Pillow's plugins raise many types here, all of them about the file
            raise UserError(f"{name}: damaged image ({reason_of(error)}); replace or remove it") from error
        rgb, alpha = _split_alpha(upright(image), image.info.get("icc_profile"), name)
    if alpha is None or alpha_mask:
        return rgb, alpha
    white = Image.new("RGB", rgb.size, (255, 255, 255))
    white.paste(rgb, mask=alpha)
    return white, None


def decode_mask(data: bytes, name: str) -> Image.Image:
    """Decode a mask image to mode L: 255 counts fully, 0 not at all; of a colour image, its red channel."""
    rgb, _ = decode(data, name)
    return rgb.getchannel("R")


def fit_image(image: Image.Image, fit: Fit, interpolation: str | None) -> Image.Image:
    """Resize an RGB image or a mask and crop it to ``fit.encoded``; Lanczos unless told otherwise."""
    if image.size != fit.resized:
        image = image.resize(fit.resized, _FILTERS[interpolation or DEFAULT_INTERPOLATION])
    left, top = fit.offset
    return image.crop((left, top, left + fit.encoded[0], top + fit.encoded[1]))


def to_pixels(image: Image.Image) -> Tensor:
    """RGB image -> [3, H, W] fp32 in [-1, 1]."""
    array = torch.from_numpy(np.array(image, dtype=np.uint8))
    return array.permute(2, 0, 1).float().div_(127.5).sub_(1.0)


def to_image(pixels: Tensor) -> Image.Image:
    """[3, H, W] in [-1, 1] -> 8-bit RGB image; what lies beyond is cut off."""
    levels = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy())


def blanked(pixels: Tensor, mask: Tensor, blank: Blank, rng: torch.Generator) -> Tensor:
    """Return ``pixels`` with the region to fill blanked, as the image encoder of a fill model is shown them.

    Args:
        pixels: [..., 3, H, W] in [-1, 1].
        mask: 1 where to fill, of a shape that broadcasts to the pixels'; between 0 and 1 the two are blended.
        blank: mid-grey (0 of [-1, 1]), which FLUX Fill was trained on, black, white, or "noise": every channel of every
            pixel drawn evenly from black to white.
        rng: what noise is drawn from, on the CPU; unused by the others.
    """
    colour: Tensor | float
    if blank == "noise":
        colour = torch.rand(pixels.shape, generator=rng).to(pixels) * 2 - 1
    else:
        colour = {"grey": 0.0, "black": -1.0, "white": 1.0}[blank]
    return pixels * (1 - mask) + colour * mask


def to_latent_mask(mask: Image.Image, latent_factor: int) -> Tensor:
    """Mask of mode L -> [1, H / factor, W / factor] fp32 in 0..1, each value the mean of its square."""
    array = torch.from_numpy(np.array(mask, dtype=np.uint8)).float().div_(255.0)
    return torch.nn.functional.avg_pool2d(array[None], latent_factor)


def _size_of_jxl(start: bytes, name: str) -> Size:
    try:
        size = read_jxl_size(start)
    except ValueError as error:
        raise UserError(f"{name}: not an image that can be read ({error}); replace or remove it") from None
    _refuse_bomb(size, name)
    return size


def _refuse_jxl_bomb(source: str | io.BytesIO, name: str) -> None:
    """Refuse by its header what Pillow's plugin would decode in opening it, whatever the file is called."""
    with open(source, "rb") if isinstance(source, str) else nullcontext(source) as file:
        start = file.read(len(_CONTAINER))
        if start.startswith((_CODESTREAM, _CONTAINER)):
            _size_of_jxl(start + file.read(HEADER_BYTES), name)
        file.seek(0)


def _refuse_bomb(size: Size, name: str) -> None:
    if size[0] * size[1] > MAX_PIXELS:
        raise UserError(f"{name}: more than {MAX_PIXELS} pixels; make it smaller or remove it")


def _open(source: str | io.BytesIO, name: str) -> OpenImage:
    if isinstance(source, str):
        with reading(source, "replace it, or start again if it was removed meanwhile"):
            return _identified(source, name)
    return _identified(source, name)


@functools.cache
def formats() -> tuple[str, ...]:
    """Return the formats that images are read in, whatever a file is called: for EPS Pillow runs a program."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _identified(source: str | io.BytesIO, name: str) -> OpenImage:
    _refuse_jxl_bomb(source, name)
    try:
        image = Image.open(source, formats=formats())
    except Image.DecompressionBombError:
        raise UserError(f"{name}: more than {MAX_PIXELS} pixels; make it smaller or remove it") from None
    except Image.UnidentifiedImageError:
        missing = name.lower().endswith(".jxl") and not importlib.util.find_spec("pillow_jxl")
        remedy = "install pillow-jxl-plugin" if missing else "replace or remove it"
        raise UserError(f"{name}: not an image that can be read; {remedy}") from None
    except Exception as error:
        raise UserError(f"{name}: damaged image ({reason_of(error)}); replace or remove it") from error
    _refuse_bomb(image.size, name)
    return image


def _frames(image: Image.Image) -> int:
    """Frames or pages; what else a JPEG may hold (an HDR gain map, a preview) is neither."""
    if image.format == "MPO":
        return 1
    try:
        return int(getattr(image, "n_frames", 1))
    except Exception:  # damaged behind the first frame, which is the one that is used
        return 1


def upright(image: Image.Image) -> Image.Image:
    """Return an opened image as its EXIF orientation says that it is to be seen; nothing else reads that afterwards."""
    turn = _UPRIGHT.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1..8 that is still to be applied to an opened image, without decoding it."""
    if image.format == "TIFF":
        return 1
    if image.format == "JXL" and not getattr(image, "jpeg", False):
        return 1
    try:  # the base class's method: PNG's own would decode the image to look for an eXIf chunk behind it
        value = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # a broken EXIF block is no reason to refuse the image
        return 1
    return value if value in _UPRIGHT else 1


def _split_alpha(image: Image.Image, profile: bytes | None, name: str) -> tuple[Image.Image, Image.Image | None]:
    """Any mode -> 8-bit sRGB and alpha (mode L), or None where the image is opaque by its mode."""
    if image.mode == "F":
        raise UserError(f"{name}: floating point pixels; save it as 8-bit or 16-bit PNG")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.size and (values.min() < 0 or values.max() > 65535):
            raise UserError(f"{name}: 32-bit pixels; save it as 8-bit or 16-bit PNG")
        image = Image.fromarray(((values.astype(np.int32) + 128) // 257).astype(np.uint8))  # 65535 = 255 * 257
        return _to_srgb(image, profile), None
    alpha = None
    if image.has_transparency_data:
        if image.mode not in ("RGBA", "LA", "PA", "La", "RGBa"):
            image = image.convert("LA" if image.mode == "L" else "RGBA")
        elif image.mode in ("PA", "RGBa"):
            image = image.convert("RGBA")
        elif image.mode == "La":
            image = image.convert("LA")
        alpha = image.getchannel("A")
        image = image.convert("L" if image.mode == "LA" else "RGB")
    return _to_srgb(image, profile), alpha


def _to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    if image.mode in ("P", "1", "YCbCr", "HSV", "LAB"):
        image = image.convert("L" if image.mode == "1" else "RGB")
    if profile:
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            if "sRGB" not in ImageCms.getProfileDescription(source):
                converted = ImageCms.profileToProfile(image, source, _SRGB, outputMode="RGB")
                if converted is not None:
                    return converted
        except (ImageCms.PyCMSError, OSError, ValueError):
            pass  # a broken profile, or one for another colour space: plain conversion below
    return image.convert("RGB")


_CODESTREAM = b"\xff\x0a"
_CONTAINER = b"\x00\x00\x00\x0cJXL \x0d\x0a\x87\x0a"
_RATIOS = ((1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))  # width : height for ratio codes 1..7
HEADER_BYTES = 1 << 16  # enough unless large metadata boxes stand in front of the image


class _Bits:
    def __init__(self, data: bytes) -> None:
        self.value, self.left = int.from_bytes(data[:32], "little"), 8 * len(data[:32])

    def take(self, count: int) -> int:
        if count > self.left:
            raise ValueError("file ends within its header")
        bits = self.value & ((1 << count) - 1)
        self.value >>= count
        self.left -= count
        return bits


def read_jxl_size(data: bytes) -> tuple[int, int]:
    """Return the upright (width, height) of a JPEG XL file that begins with ``data``.

    Raises:
        ValueError: not JPEG XL, or the image does not begin within ``data``.
    """
    stream = _codestream(data)
    if not stream.startswith(_CODESTREAM):
        raise ValueError("no JPEG XL signature")
    bits = _Bits(stream[2:])
    small = bits.take(1) == 1
    height = _side(bits, small)
    ratio = bits.take(3)
    if ratio:
        wide, high = _RATIOS[ratio - 1]
        width = height * wide // high
    else:
        width = _side(bits, small)
    all_default = bits.take(1)
    orientation = 1 if all_default or not bits.take(1) else 1 + bits.take(3)
    return (height, width) if orientation >= 5 else (width, height)


def _side(bits: _Bits, small: bool) -> int:
    if small:
        return 8 * (1 + bits.take(5))
    return 1 + bits.take((9, 13, 18, 30)[bits.take(2)])


def _codestream(data: bytes) -> bytes:
    if not data.startswith(_CONTAINER):
        return data
    at = len(_CONTAINER)
    while at + 8 <= len(data):
        size, kind, header = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8], 8
        if size == 1:
            size, header = int.from_bytes(data[at + 8 : at + 16], "big"), 16
        if kind in (b"jxlc", b"jxlp"):
            return data[at + header + (4 if kind == b"jxlp" else 0) :]  # jxlp begins with its part number
        if size < header:
            break
        at += size
    raise ValueError("no image in the JPEG XL container")
