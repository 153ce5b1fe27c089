"""The console that texts, tables and progress bars are printed on, safe to print what strangers wrote on.

A string is one line: a line's end within it came with a name from outside, and is spelt like everything that steers a
terminal. What has several lines is several strings (``print(*lines, sep="\\n")``), or a rich ``Text``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from library.errors import printable


class Console(rich.console.Console):
    """rich's console; no character of what is printed steers the terminal, but rich's own colours and cursor do.

    Attributes:
        preparation: of a run's console: what counted work is a step of (``library.training.report.progress``).
    """

    preparation: Any = None

    @property
    def file(self) -> IO[str]:
        """The stream itself: rich goes past one wrapper, a live line (rich's) around PrintableStream is two."""
        stream = super().file
        while (inner := getattr(stream, "rich_proxied_file", stream)) is not stream:
            stream = inner
        return stream

    @file.setter
    def file(self, stream: IO[str]) -> None:
        self._file = stream

    def render_str(self, text: str, **how: Any) -> Text:
        """Return rich's text of a string, which is measured as it will be shown."""
        return super().render_str(printable(text, "\t"), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return what rich makes of ``renderable``, its texts :func:`library.errors.printable`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text, "\n\t"))
