"""Checkpoints that are no safetensors, or whose tensors do not lie the way the model wants them.

The loader (``library.models.weights``) reads rows of named tensors, each from its place in a file. Everything here ends
in that form, so that every layout costs the same memory, one model and one tensor:

- :class:`TorchFiles` finds where the tensors of a ``.pth`` or ``.bin`` file lie without reading them. Unpickling is
  restricted to tensors (``weights_only``), and under ``FakeTensorMode`` PyTorch reports each storage's place in the
  file instead of filling it.
- :class:`DerivedWeights` adds tensors that are made when they are asked for: a transpose, a permutation, a join.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from library.errors import UserError
from library.models.weights import Piece, Stored, WeightFiles
from library.safetensors_stream import DTYPE_NAMES


class TorchFiles(WeightFiles):
    """The tensors of files that ``torch.save`` wrote; names may be given a prefix for each file."""

    def __init__(self, path: Path, files: Sequence[tuple[str, Path]]) -> None:
        """Find every tensor in ``files``, pairs of a prefix and a file; ``path`` is what errors name.

        Raises:
            UserError: a file cannot be read, or holds something else than a dict of whole tensors.
        """
        self.path, self.fp8 = path, None
        self._tensors: dict[str, Stored] = {}
        for prefix, file in files:
            for name, tensor in _outline(file).items():
                if not isinstance(tensor, Tensor):
                    continue
                offset = tensor.untyped_storage()._checkpoint_offset
                if not tensor.is_contiguous() or offset is None or tensor.dtype not in DTYPE_NAMES:
                    raise UserError(f"{file}: tensor {name!r} is stored in pieces; save it again with safetensors")
                start = offset + int(tensor.storage_offset()) * tensor.element_size()
                self._tensors[prefix + name] = Stored(file, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), start)


def _outline(file: Path) -> dict[str, Tensor]:
    try:
        with FakeTensorMode():
            state = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; download it again") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{file}: not a PyTorch checkpoint of tensors alone ({reason}); use safetensors") from None
    if not isinstance(state, dict):
        raise UserError(f"{file}: holds a {type(state).__name__}, not named tensors; use another file")
    return state


@dataclass(frozen=True)
class Derived:
    """A tensor made of whole stored ones."""

    shape: tuple[int, ...]
    sources: Sequence[str]
    make: Callable[..., Tensor]


class DerivedWeights(WeightFiles):
    """The tensors of ``base`` and derived ones beside them; fp8 codes keep their layout."""

    def __init__(self, base: WeightFiles, derived: Mapping[str, Derived]) -> None:
        self.path, self.fp8 = base.path, base.fp8
        self._base, self._derived = base, dict(derived)

    def __contains__(self, name: str) -> bool:
        if name in self._derived:
            return all(source in self._base for source in self._derived[name].sources)
        return name in self._base

    @property
    def names(self) -> list[str]:
        """Every tensor's name, stored ones first."""
        return [*self._base.names, *self._derived]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor ``name``; raises a UserError if there is none."""
        return self._derived[name].shape if name in self._derived else self._base.shape(name)

    def read(self, pieces: Sequence[Piece]) -> Tensor:
        """Return the rows of ``pieces`` one below the other, in memory of their own, in the file's dtype."""
        if not any(piece.source in self._derived for piece in pieces):
            return self._base.read(pieces)
        parts = [self._part(piece) for piece in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, piece: Piece) -> Tensor:
        derived = self._derived.get(piece.source)
        if derived is None:
            return self._base.read([piece])
        whole = derived.make(*(self._base.read([Piece(source)]) for source in derived.sources))
        return whole[piece.start : piece.stop].contiguous()
