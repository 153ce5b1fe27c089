"""From an image file to the pixels the image encoder sees.

Every image becomes 8-bit RGB, upright, in sRGB:

- EXIF orientation is applied;
- an embedded colour profile that is not sRGB (CMYK scans, Display P3 phones, Adobe RGB) is converted by it;
- 16-bit greyscale is scaled (Pillow's own conversion would clip it to white); palette images are expanded;
- transparent pixels are blended onto white, or kept as the mask with ``alpha_mask``.

Sizes are read without decoding the image. Of an animation (GIF, APNG, WebP, AVIF) or a TIFF of several pages the first
is used, and how many there are is told with the size. A TIFF is turned upright by Pillow itself as it is loaded, and
gives its upright size before.
"""

from __future__ import annotations

import errno
import functools
import io
import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import ExifTags, Image, ImageCms, ImageFile
from torch import Tensor

from library.config.model_types import Blank
from library.data.buckets import Fit, Size
from library.errors import UserError, reason_of
from library.files import reading

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile as OpenImage

warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # what is too large is an error here, in one line

_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "AVIF", "BMP", "DIB", "TIFF", "GIF")  # as Pillow calls them
MAX_PIXELS = 178_956_970  # where Pillow speaks of a decompression bomb: 512 MiB of RGB

PIXELS_VERSION = 1  # part of every latent's key: raise it when the same file would give other pixels
DEFAULT_INTERPOLATION = "lanczos"
_OTHER_NAMES = {"area": "box", "cubic": "bicubic", "linear": "bilinear"}  # OpenCV's, as in sd-scripts
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
    with reading(path, "replace it, or start again if it was removed meanwhile"), _open(path, path) as image:
        width, height = image.size
        size = (height, width) if _orientation(image) >= 5 else (width, height)
        return size, _frames(image)


def read_size(path: str) -> Size:
    """Return the upright (width, height) of an image, from its header alone."""
    return read_header(path)[0]


def is_turned(path: str) -> bool:
    """Return whether an image's EXIF orientation says that it lies on its side or is mirrored."""
    with reading(path, "look again"), _open(path, path) as image:
        return _orientation(image) > 1


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


def fit_image(image: Image.Image, fit: Fit, interpolation: str | None) -> Image.Image:
    """Resize an RGB image or a mask and crop it to ``fit.encoded``; Lanczos unless told otherwise."""
    if image.size != fit.resized:
        name = interpolation or DEFAULT_INTERPOLATION
        image = image.resize(fit.resized, Image.Resampling[_OTHER_NAMES.get(name, name).upper()])
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


@functools.cache
def formats() -> tuple[str, ...]:
    """Return the formats that images are read in, whatever a file is called: for EPS Pillow runs a program."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _open(source: str | io.BytesIO, name: str) -> OpenImage:
    """Open an image; an OSError with the system's number is left to who reads. EINVAL: Pillow follows a bad offset."""
    try:
        image = Image.open(source, formats=formats())
        if image.width * image.height > MAX_PIXELS:
            raise Image.DecompressionBombError
    except Image.DecompressionBombError:
        raise UserError(f"{name}: more than {MAX_PIXELS} pixels; make it smaller or remove it") from None
    except Image.UnidentifiedImageError:
        raise UserError(f"{name}: not an image that can be read; replace or remove it") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # of the disk, not of what it holds
            raise
        raise UserError(f"{name}: damaged image ({reason_of(error)}); replace or remove it") from error
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
        image = image.convert("LA" if image.mode in ("L", "LA", "La") else "RGBA")
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
