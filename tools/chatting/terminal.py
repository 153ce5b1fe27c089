"""Chat in a terminal: lines in, answers out as they are made; commands begin with a slash.

Ctrl-C stops an answer and keeps what was said; at the prompt it clears the line. Without a terminal (a pipe), lines
are read just the same, and only answers and notes are printed.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from rich.console import Console

from library.errors import UserError, did_you_mean, one_line
from tools.chatting.commands import COMMANDS, run_command
from tools.chatting.session import Session

# A model may write any character; those that steer a terminal are not shown.
_STEERING = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def chat_in_terminal(session: Session, history_file: Path | None) -> None:
    """Talk until the end of the input or /quit.

    Args:
        session: with its model loaded.
        history_file: where typed lines are kept for the next time; None: only for this one.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no UTF-8 must not end the talk
    console = Console(highlight=False, markup=False, soft_wrap=True, emoji=False)
    console.print(session.introduction(), style="bold")
    console.print("/help lists commands, Ctrl-C stops an answer, Ctrl-D leaves", style="dim")
    with _line_history(history_file):
        while (line := _read_line(console)) is not None:
            if line.startswith("/") and not line.startswith("//"):
                if not _command(session, line[1:], console):
                    return
            elif line.strip() or not session.conversation.template.has_turns:
                _answer(session, line.removeprefix("/") if line.startswith("//") else line, console)


def _answer(session: Session, line: str, console: Console) -> None:
    try:
        with closing(session.answer(line)) as pieces:
            for piece in pieces:
                console.print(piece.translate(_STEERING), end="")
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim", end="")
    except UserError as error:
        console.print(f"error: {one_line(error)}", style="red")
        return
    console.print()
    for remark in session.remarks():
        console.print(f"note: {remark}", style="yellow")
    if console.is_terminal:
        console.print(session.report(), style="dim")


def _command(session: Session, line: str, console: Console) -> bool:
    """Run a command; return whether to go on."""
    name, _, rest = line.strip().partition(" ")
    if name in ("quit", "exit"):
        return False
    if name not in COMMANDS:
        known = [*COMMANDS, "quit"]
        console.print(f"error: no command /{name}{did_you_mean(name, known)}; /help lists them", style="red")
        return True
    try:
        console.print(run_command(session, name, rest.strip()), style="cyan")
    except UserError as error:
        console.print(f"error: {one_line(error)}", style="red")
    except KeyboardInterrupt:
        console.print("(stopped)", style="dim")
    return True


def _read_line(console: Console) -> str | None:
    """Return what was typed; a line that ends in a backslash goes on in the next. None at the end of the input."""
    lines: list[str] = []
    while True:
        try:
            line = input("... " if lines else "> ") if console.is_terminal else input()
        except EOFError:
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            console.print("\n(/quit or Ctrl-D leaves)", style="dim")
            lines.clear()
            continue
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


@contextmanager
def _line_history(file: Path | None) -> Iterator[None]:
    """Let arrow keys recall lines, also those of earlier times if there is a file for them."""
    if not sys.stdin.isatty():
        yield
        return
    import readline

    readline.set_history_length(1000)
    if file is not None:
        with suppress(FileNotFoundError):
            readline.read_history_file(file)
    try:
        yield
    finally:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
