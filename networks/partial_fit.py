"""What of a LoRA file fits a network or a base, where a part of it was asked to be enough (``allow_partial``).

Without being asked, a file that fits in part only is refused: most of what is then "loaded with no effect" is a file
for another model, and nobody notices. With it everything is named: what was taken, what has no place, what has another
shape, and what the file says nothing about. A file of which nothing fits is refused all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from library.errors import UserError
from networks.files.weights import names_in_short

_SHOWN = 20  # names of each sort; a FLUX LoRA has 500


class PartialFit:
    """A tally of one file's modules."""

    def __init__(self, source: str, unknown: Sequence[str] = (), unmatched: Sequence[str] = ()) -> None:
        """Begin with the keys that mean no module of the family, and the modules that have no place here.

        Attributes:
            unknown: those keys; may be added to.
        """
        self._source, self.unknown, self._unmatched = source, list(unknown), list(unmatched)
        self._misfits: list[str] = []
        self._matched: set[str] = set()

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """Count module ``name`` as matched, or with the reason of a ``UserError`` raised inside as one that misfits."""
        try:
            yield
        except UserError as error:
            self._misfits.append(str(error))
        else:
            self.takes(name)

    def takes(self, name: str) -> None:
        """Count module ``name`` as matched."""
        self._matched.add(name)

    def lacks(self, names: Sequence[str]) -> None:
        """Count modules as without a place."""
        self._unmatched += names

    def misfits(self, problems: Sequence[str]) -> None:
        """Count modules as of another shape; each is described."""
        self._misfits += problems

    def line(self, wanted: Collection[str] | None = None) -> str:
        """Return what was taken and what was not, by name, in one line; ``wanted`` are the modules there are.

        Raises:
            UserError: nothing fits.
        """
        missing = sorted(set(wanted) - self._matched) if wanted is not None else []
        groups = {
            "not known": self.unknown,
            "without a place here": self._unmatched,
            "of another shape": self._misfits,
            "begun anew": missing,
        }
        left = [f"{len(names)} {what} ({names_in_short(names, _SHOWN)})" for what, names in groups.items() if names]
        if not self._matched:
            raise UserError(f"{self._source}: nothing of it fits: {', '.join(left[:3])}; give a LoRA of this model")
        return f"{self._source}: " + "; ".join([f"{len(self._matched)} modules matched", *left])

    @property
    def complete(self) -> bool:
        """Whether all of the file was taken."""
        return not (self.unknown or self._unmatched or self._misfits)
