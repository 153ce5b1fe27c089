"""Width and height of a JPEG XL image from its first bytes.

Pillow's JPEG XL plugin decodes the whole image when it is opened, which makes reading the sizes of a folder
as slow as reading its pictures, and decodes a decompression bomb before anybody can ask for its size. The
header is short (ISO/IEC 18181-1): behind the signature FF 0A come, least significant bit first, SizeHeader
and the beginning of ImageMetadata, which holds the orientation. In the container form (18181-2) they open
the box ``jxlc`` or the first ``jxlp``.
"""

from __future__ import annotations

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
    if not stream.startswith(b"\xff\x0a"):
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
