"""Chat in a terminal: lines in, answers out as they are made; commands begin with a slash.

Each command changes the session and returns what to print. Ctrl-C stops an answer and keeps what was said; at the
prompt it clears the line. Without a terminal (a pipe), lines are read just the same, and only answers and notes are
printed.
"""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from rich.text import Text

from library.console import Console
from library.errors import UserError, did_you_mean, one_line
from library.files import write_text
from tools.chatting.session import ANOTHER_SEED, Session
from tools.command import SAMPLING_NAMES

_WHOLE = ("max_new_tokens", "top_k", "seed")
_OFF = ("off", "none")


def run_command(session: Session, name: str, rest: str) -> str:
    """Run command ``name`` of ``COMMANDS`` with what follows it; return what to print."""
    return COMMANDS[name][1](session, rest)


def _help(session: Session, rest: str) -> str:
    lines = [f"/{name:<10}{text}" for name, (text, _) in COMMANDS.items()]
    return "\n".join([*lines, f"/{'quit':<10}leave (or Ctrl-D)", "A message that begins with / is written with //."])


def _reset(session: Session, rest: str) -> str:
    session.conversation.reset()
    return "the conversation begins anew"


def _undo(session: Session, rest: str) -> str:
    turns = session.conversation.turns
    if not turns:
        raise UserError("nothing was said yet that could be taken back; talk first")
    message = turns[-1].question
    session.conversation.take_back(len(turns) - 1)
    return f"taken back: {message}"


def _system(session: Session, rest: str) -> str:
    if rest in ("", *_OFF):
        session.set_system("")
        return "no system message"
    session.set_system(rest)
    return f"system message: {rest}"


def _set(session: Session, rest: str) -> str:
    if not rest:
        return "\n".join(f"{name} {_shown(getattr(session.settings, name))}" for name in SAMPLING_NAMES)
    name, _, text = rest.partition(" ")
    name, text = name.removeprefix("--"), text.strip(" =")
    if name not in SAMPLING_NAMES:
        raise UserError(f"no setting {name!r}{did_you_mean(name, SAMPLING_NAMES)}; /set lists them")
    value: float | None = None
    if text not in _OFF or name not in ("top_k", "top_p", "min_p"):
        kind = int if name in _WHOLE else float
        try:
            value = kind(text)
        except ValueError:
            raise UserError(f"{name}: {text!r} is no {'whole ' if kind is int else ''}number; give one") from None
    session.settings = replace(session.settings, **{name: value})
    return f"{name} {_shown(value)}"


def _shown(value: float | None) -> str:
    return "off" if value is None else f"{value:g}"


def _save(session: Session, rest: str) -> str:
    if not rest:
        raise UserError("/save: needs a file's name, such as /save talk.jsonl")
    path = Path(rest).expanduser()
    if not session.conversation.turns:
        raise UserError("/save: nothing was said yet; talk first")
    try:
        earlier = path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, UnicodeDecodeError):
        raise UserError(f"/save: {path}: holds something else than text in UTF-8; choose another file") from None
    line = json.dumps(session.record(), ensure_ascii=False)
    write_text(path, f"{earlier}{'' if earlier.endswith(chr(10)) or not earlier else chr(10)}{line}\n")
    return f"{path}: added the conversation as one line"


def _history(session: Session, rest: str) -> str:
    said = [f"{message.role}: {message.content}" for message in session.conversation.messages]
    return "\n".join(said) or "nothing was said yet"


def _model(session: Session, rest: str) -> str:
    if not rest:
        return _list(session.registry.models, session.model_name)
    session.choose(rest, session.lora_name if rest == session.model_name else None)
    return session.introduction()


def _lora(session: Session, rest: str) -> str:
    if not rest:
        return _list(["none", *session.registry.loras], session.lora_name or "none")
    session.choose(session.model_name, None if rest in _OFF else rest)
    return f"LoRA: {session.lora_name or 'none'}"


def _strength(session: Session, rest: str) -> str:
    if rest:
        try:
            strength = float(rest)
        except ValueError:
            raise UserError(f"/strength: {rest!r} is no number; give one, such as 0.7") from None
        session.set_strength(strength)
    return f"the LoRA's strength is {session.strength:g}" if session.lora_name else "there is no LoRA on the model"


def _list(names: list[str], chosen: str) -> str:
    return "\n".join(f"{'*' if name == chosen else ' '} {name}" for name in names)


COMMANDS: dict[str, tuple[str, Callable[[Session, str], str]]] = {
    "help": ("this list", _help),
    "reset": ("forget the conversation; the system message stays", _reset),
    "undo": ("take the newest message and its answer back", _undo),
    "retry": ("answer the newest message again, with other numbers drawn", _undo),
    "system": ("TEXT: set the system message; nothing: remove it", _system),
    "set": ("NAME VALUE: set a sampling setting (top_k, top_p, min_p: also off); nothing: list them", _set),
    "history": ("print the conversation", _history),
    "save": ("FILE.jsonl: add the conversation to a file, a line each, as train_lora.py reads it", _save),
    "model": ("NAME: talk to another model; nothing: list them", _model),
    "lora": ("NAME: put a LoRA on the model, or none; nothing: list them", _lora),
    "strength": ("NUMBER: how strongly the LoRA acts, 1 as it was trained; nothing: say it", _strength),
}


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
            if line.strip() == "/retry" and session.conversation.turns:
                _retry(session, console)
            elif line.startswith("/") and not line.startswith("//"):
                if not _command(session, line[1:], console):
                    return
            elif line.strip() or not session.conversation.template.has_turns:
                _answer(session, line.removeprefix("/") if line.startswith("//") else line, console)


def _answer(session: Session, line: str, console: Console) -> None:
    try:
        with closing(session.answer(line)) as pieces:
            for piece in pieces:
                console.print(Text(piece), end="")
    except KeyboardInterrupt:
        console.print("", "(stopped)", sep="\n", style="dim", end="")
    except UserError as error:
        console.print(f"error: {one_line(error)}", style="red")
        return
    console.print()
    for remark in session.remarks():
        console.print(f"note: {remark}", style="yellow")
    if console.is_terminal:
        console.print(session.report(), style="dim")


def _retry(session: Session, console: Console) -> None:
    """Answer the newest message again; at temperature 0 that is the same answer."""
    turns = session.conversation.turns
    message = turns[-1].question
    session.conversation.take_back(len(turns) - 1)
    session.settings = replace(session.settings, seed=session.settings.seed + ANOTHER_SEED)
    _answer(session, message, console)


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
        console.print(Text(run_command(session, name, rest.strip())), style="cyan")
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
            console.print("", "(/quit or Ctrl-D leaves)", sep="\n", style="dim")
            lines.clear()
            continue
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


@contextmanager
def _line_history(file: Path | None) -> Iterator[None]:
    """Let arrow keys recall lines, also those of earlier times if there is a file for them."""
    if not sys.stdin.isatty() or importlib.util.find_spec("readline") is None:  # Windows' own console has arrow keys
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
