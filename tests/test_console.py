"""Live lines reach the terminal as rich made them, also where what is printed is made printable."""

import io
from contextlib import redirect_stdout
from typing import TextIO, cast

from rich.live import Live

from library.console import Console
from library.errors import PrintableStream


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_live_line_moves_the_cursor_and_strangers_words_do_not(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = _Terminal()
    with redirect_stdout(cast(TextIO, PrintableStream(terminal))):
        console = Console(force_terminal=True, markup=False, highlight=False)
        with Live("step 1", console=console, auto_refresh=False) as live:
            live.update("step 2", refresh=True)
            console.print("a name \x1b[2J")
    assert "\\x1b[2J" in terminal.getvalue()  # spelt
    assert terminal.getvalue().count("\\x1b") == 1
    assert "\x1b[2K" in terminal.getvalue()  # rich's own
