"""The console that texts, tables and progress bars are printed on, safe to print what strangers wrote on.

A string is one line: a line's end within it came with a name from outside, and is spelt like everything that steers a
terminal. What has several lines is several strings (``print(*lines, sep="\\n")``), or a rich ``Text``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import IO, Any, Literal

import rich.console
from rich.box import SIMPLE_HEAD
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
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


def plain_table(*headings: str, left: Collection[str] = (), title: str | None = None) -> Table:
    """Return an empty table for the terminal; the first column and those in ``left`` hold words, the others numbers."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", border_style="dim", title=title)
    for number, heading in enumerate(headings):
        justify: Literal["left", "right"] = "left" if number == 0 or heading in left else "right"
        table.add_column(heading, justify=justify, overflow="fold")
    return table


def print_summary(console: Console, rows: list[tuple[str, str]]) -> None:
    """Print what a run did and where it left its files."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name, "bold"), Text(value))  # a path may hold what rich takes for markup
    console.print(table)
