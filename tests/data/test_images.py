"""Every kind of image file becomes upright 8-bit RGB, compared with pixels made by hand."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from library.data.buckets import Fit
from library.data.file_index import FileIndex, SourceFile
from library.data.images import decode, fit_image, read_header, read_size, to_latent_mask, to_pixels
from library.errors import UserError
from tests.data.folders import make_image
from tests.forked import ROOT, run_code


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def rgb(data: bytes) -> np.ndarray:
    return np.asarray(decode(data, "x")[0])


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("WEBP", {"lossless": True}), ("BMP", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"})],
)
def test_lossless_formats_come_back_exactly(kind: str, options: dict) -> None:
    image = make_image(48, 32)
    assert np.array_equal(rgb(saved(image, kind, **options)), np.asarray(image))


@pytest.mark.parametrize("kind", ["JPEG", "AVIF", "WEBP"])
def test_lossy_formats_come_back_nearly(kind: str) -> None:
    ramp = np.add.outer(np.arange(48) * 2, np.arange(64) * 2).astype(np.uint8)
    image = Image.fromarray(np.stack([ramp, ramp[::-1], 255 - ramp], axis=-1))
    difference = rgb(saved(image, kind, quality=95)).astype(int) - np.asarray(image)
    assert np.abs(difference).mean() < 3  # of 255: what these codecs lose on a smooth ramp


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF"])
def test_exif_orientation_is_applied_to_pixels_and_size(kind: str, orientation: int, tmp_path: Path) -> None:
    upright = np.zeros((32, 48, 3), dtype=np.uint8)
    upright[:16, :16] = 255  # a white square in the upper left corner
    upright[16:, 32:, 0] = 255  # a red one in the lower right
    # how a camera stores the upright image (TIFF 6.0: where row 0 and column 0 of the stored image lie)
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: upright.transpose(1, 0, 2)[::-1],
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: upright.transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.fromarray(np.ascontiguousarray(stored)), kind, exif=exif)
    path = tmp_path / f"x.{kind.lower()}"
    path.write_bytes(data)
    assert read_size(str(path)) == (48, 32)
    decoded = rgb(data)
    assert decoded.shape == (32, 48, 3)
    assert np.abs(decoded.astype(int) - upright).mean() < 4  # lossy codecs blur the squares' edges


def test_sixteen_bit_greyscale_is_scaled_not_clipped() -> None:
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    assert rgb(saved(Image.fromarray(values), "PNG"))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_sixteen_bit_colour_is_scaled() -> None:
    # Pillow cannot write it: a PNG by hand, 2 x 1 pixels of 16-bit RGB
    row = b"\x00" + struct.pack(">6H", 0, 257 * 10, 65535, 257 * 200, 257 * 3, 0)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b"")
    assert rgb(data).tolist() == [[[0, 10, 255], [200, 3, 0]]]


@pytest.mark.parametrize("order", ["<", ">"])
def test_sixteen_bit_tiff_is_scaled_in_either_byte_order(order: str) -> None:
    # TIFF 6.0 by hand: one strip of 3 grey values of 16 bits
    mark, values = {"<": b"II", ">": b"MM"}[order], struct.pack(f"{order}3H", 0, 257 * 77, 65535)
    entries = [(256, 4, 1, 3), (257, 4, 1, 1), (258, 3, 1, 16), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8)]
    entries += [(277, 3, 1, 1), (278, 4, 1, 1), (279, 4, 1, 6)]
    directory = struct.pack(f"{order}H", len(entries))
    for tag, kind, count, value in entries:
        packed = struct.pack(f"{order}I", value) if kind == 4 else struct.pack(f"{order}HH", value, 0)
        directory += struct.pack(f"{order}HHI", tag, kind, count) + packed
    data = mark + struct.pack(f"{order}HI", 42, 14) + values + directory + b"\0" * 4
    assert rgb(data)[0, :, 0].tolist() == [0, 77, 255]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_of_several_frames_or_pages_the_first_is_taken_and_all_are_counted(kind: str, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (32, 24), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    (tmp_path / f"x.{kind.lower()}").write_bytes(data)
    assert read_header(str(tmp_path / f"x.{kind.lower()}")) == ((32, 24), 3)
    assert rgb(data)[12, 16].tolist() == [255, 0, 0]


def test_a_transparent_gif_is_laid_on_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 0), 1)
    assert rgb(saved(image, "GIF", transparency=0)).tolist() == [[[255, 255, 255], [200, 100, 50]]]


def test_palette_and_one_bit_images_are_expanded() -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.putpixel((1, 0), 1)
    assert rgb(saved(palette, "PNG")).tolist() == [[[10, 20, 30], [200, 100, 50]]]
    one_bit = Image.new("1", (2, 1))
    one_bit.putpixel((1, 0), 1)
    assert rgb(saved(one_bit, "PNG")).tolist() == [[[0, 0, 0], [255, 255, 255]]]


def test_cmyk_becomes_rgb() -> None:
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # magenta and yellow ink: red
    red, green, blue = rgb(saved(image, "JPEG", quality=100))[8, 8].tolist()
    assert red > 245
    assert max(green, blue) < 10


def test_transparency_is_laid_on_white() -> None:
    image = Image.new("RGBA", (3, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (255, 0, 0, 0))
    image.putpixel((2, 0), (0, 0, 0, 128))
    pixels = rgb(saved(image, "PNG")).tolist()[0]
    assert pixels[:2] == [[255, 0, 0], [255, 255, 255]]
    assert pixels[2] == pytest.approx([127, 127, 127], abs=1)  # half black over white


@pytest.mark.parametrize("mode", ["LA", "P", "L", "RGB", "1"])
def test_every_kind_of_transparency_is_seen(mode: str) -> None:
    if mode == "LA":
        data = saved(Image.new("LA", (2, 2), (0, 0)), "PNG")
    else:  # one colour is declared transparent
        transparent = (0, 0, 0) if mode == "RGB" else 0
        data = saved(Image.new(mode, (2, 2)), "PNG", transparency=transparent)
    assert rgb(data).tolist() == [[[255] * 3] * 2] * 2
    mask = decode(data, "x", alpha_mask=True)[1]
    assert mask is not None
    assert mask.mode == "L"
    assert np.asarray(mask).max() == 0


def test_with_alpha_mask_colours_stay_and_alpha_is_the_mask() -> None:
    image = make_image(8, 8).convert("RGBA")
    alpha = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8))
    image.putalpha(alpha)
    colours, mask = decode(saved(image, "PNG"), "x", alpha_mask=True)
    assert np.array_equal(np.asarray(colours), np.asarray(make_image(8, 8)))
    assert mask is not None
    assert np.array_equal(np.asarray(mask), np.asarray(alpha))
    assert decode(saved(make_image(8, 8), "PNG"), "x", alpha_mask=True)[1] is None


def test_a_colour_profile_other_than_srgb_is_applied() -> None:
    # sRGB's own profile with the primaries of red and green exchanged: what it calls red is sRGB's green
    data = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    data = data.replace(b"rXYZ", b"????").replace(b"gXYZ", b"rXYZ").replace(b"????", b"gXYZ")
    data = data.replace("sRGB".encode("utf-16-be"), "test".encode("utf-16-be"))
    image = Image.new("RGB", (2, 2), (200, 30, 90))
    found = rgb(saved(image, "PNG", icc_profile=data))[0, 0]
    assert np.abs(found.astype(int) - [30, 200, 90]).max() <= 2  # rounding in the profile's 16-bit numbers


@pytest.mark.parametrize("kind", ["sRGB", "LAB", "broken"])
def test_profiles_that_change_nothing_or_do_not_fit_are_passed_over(kind: str) -> None:
    created = None if kind == "broken" else ImageCms.createProfile(kind)  # type: ignore[arg-type]
    profile = ImageCms.ImageCmsProfile(created).tobytes() if created else b"broken"
    image = make_image(8, 8)
    assert np.array_equal(rgb(saved(image, "PNG", icc_profile=profile)), np.asarray(image))


def test_pixels_are_scaled_to_plus_minus_one() -> None:
    image = Image.new("RGB", (3, 2), (0, 255, 51))
    pixels = to_pixels(image)
    assert pixels.shape == (3, 2, 3)
    assert pixels.dtype == torch.float32
    assert pixels[:, 0, 0].tolist() == pytest.approx([-1.0, 1.0, -0.6])


def test_a_latent_mask_is_the_mean_of_each_square() -> None:
    values = np.zeros((16, 16), dtype=np.uint8)
    values[:8, :4] = 255
    assert to_latent_mask(Image.fromarray(values), 8).tolist() == [[[0.5, 0.0], [0.0, 0.0]]]


def test_resizing_keeps_the_middle() -> None:
    image = Image.new("RGB", (100, 50), "black")
    image.paste("white", (25, 0, 75, 50))
    fitted = fit_image(image, Fit((64, 32), (16, 0), (32, 32), (32, 32)), None)
    assert fitted.size == (32, 32)
    assert np.asarray(fitted).min() > 240  # exactly the white middle, but for ringing at its edge


def png_of_declared_size(width: int, height: int) -> bytes:
    data = bytearray(saved(Image.new("RGB", (1, 1)), "PNG"))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("text.png", b"hello", r"text\.png: not an image that can be read; replace or remove it$"),
        ("empty.jpg", b"", r"empty\.jpg: not an image that can be read; replace or remove it$"),
        ("bomb.png", png_of_declared_size(20000, 20000), r"bomb\.png: more than 178956970 pixels; make it smaller"),
        ("large.png", png_of_declared_size(13400, 13400), r"large\.png: more than 178956970 pixels; make it smaller"),
    ],
)
def test_files_that_are_no_usable_images_are_refused_in_one_line(
    name: str, data: bytes, expected: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=expected) as caught:
        read_size(str(tmp_path / name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sides", "code", "said"), [((12000, 8000), 0, ""), ((20000, 20000), 2, "more than 178956970")]
)
def test_a_huge_picture_is_taken_without_a_word_or_refused_in_one_line(
    sides: tuple[int, int], code: int, said: str, tmp_path: Path
) -> None:
    # Pillow warns on stderr of the first and raises at the second, and names neither's file
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "huge.png").write_bytes(png_of_declared_size(*sides))
    script = "import sys; from library.data.images import read_size; from library.errors import exit_on_user_error; "
    script += "exit_on_user_error(lambda: print(*read_size(sys.argv[1])))()"
    done = run_code(script, [str(tmp_path / "images" / "huge.png")], ROOT)
    assert done.returncode == code
    assert done.stdout.split() == ([] if code else [str(side) for side in sides])
    assert done.stderr.count("\n") == bool(code)
    assert (said in done.stderr and "huge.png" in done.stderr) if code else not done.stderr


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_truncated_image_is_refused_in_one_line() -> None:
    for kind in ("PNG", "JPEG", "WEBP", "AVIF"):
        data = saved(make_image(64, 64), kind)
        with pytest.raises(UserError, match=r"^cut: .*; replace or remove it$"):
            decode(data[: len(data) // 2], "cut")


def test_floating_point_pixels_are_refused() -> None:
    data = saved(Image.new("F", (4, 4)), "TIFF")
    with pytest.raises(UserError, match=r"^x: floating point pixels; save it as 8-bit or 16-bit PNG$"):
        decode(data, "x")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that cannot be read is Linux'")
def test_a_disk_that_fails_is_no_damaged_image(tmp_path: Path) -> None:
    """Of an image the header is read where it lies; a check reads all of it. Both say the same."""
    (tmp_path / "a.png").symlink_to("/proc/self/mem")  # whose first bytes the kernel gives nobody
    file = SourceFile(str(tmp_path / "a.png"), 1, 1, 1)
    with pytest.raises(UserError, match=r"a\.png: cannot be read \(Input/output error\); "):
        read_header(file.path)
    (said,) = FileIndex(tmp_path / "cache").decode([file], lambda _: lambda _: None).values()
    assert said.startswith("cannot be read (Input/output error); ")
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(UserError, match=r"b\.png: (damaged image|not an image that can be read)"):
        read_header(str(tmp_path / "b.png"))
