"""The formats that are read, and the schemes that weights are made by, under their words on command lines."""

from __future__ import annotations

from collections.abc import Callable

from library.errors import UserError, did_you_mean
from library.precision.files import fp8, gguf, int8, mxfp8, nf4, nvfp4, refused
from library.precision.files.base import Scheme, StoredWeight
from library.precision.files.file_tensors import FileTensors
from library.precision.fp8_numbers import E4M3FN, Fp8Format
from library.precision.names import GRANULARITIES, READ_ONLY, SCHEME_NAMES

FINDERS: tuple[Callable[[FileTensors], dict[str, StoredWeight]], ...] = (
    refused.find,
    gguf.find,
    nf4.find,
    fp8.find,
    int8.find,
    nvfp4.find,
    mxfp8.find,
)
_OTHERS: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (int8.Int8Scheme(rows=False), int8.Int8Scheme(), int8.Int8Scheme(group=256), nvfp4.Nvfp4Scheme())
}


def scheme_named(name: str, number_format: Fp8Format = E4M3FN) -> Scheme:
    """Return the scheme called ``name``; ``number_format`` is that of fp8 ones.

    Raises:
        UserError: there is none of that name.
    """
    if name in GRANULARITIES:
        return fp8.Fp8Scheme(name, number_format)
    if name in _OTHERS:
        return _OTHERS[name]
    known = ", ".join(SCHEME_NAMES)
    if name.lower().startswith((*READ_ONLY, "q4_", "q5_", "q6_", "q8_")):
        raise UserError(f"scheme {name!r}: files in it are read and trained on, not written; use {known}")
    raise UserError(f"scheme {name!r} is none of {known}{did_you_mean(name, SCHEME_NAMES)}")
