"""The command line of a kohya trainer, found in a pasted command or in a shell script.

    accelerate launch --num_cpu_threads_per_process 1 flux_train_network.py \\
        --network_module networks.lora_flux ...

A command is the launcher with its flags, the trainer's script, and the script's flags; only the last are
settings. A script file (``.sh``, ``.bat``, ``.cmd``, ``.ps1``) is searched for the command that starts a trainer:
continued lines (``\\``, ``^`` or a backtick at the end) are joined, comments dropped, and variables that the file
sets itself filled in. Nothing is executed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PureWindowsPath
from typing import Any

from library.config.load import read_keys
from library.config.model_types import Tool, kohya_trainers
from library.errors import UserError
from library.files import read_text

TRAINERS = kohya_trainers()
SCRIPT_SUFFIXES = (".sh", ".bat", ".cmd", ".ps1", ".txt")
# What is read to translate a configuration: another one, a dataset's, and folders of images, whose names say repeats.
_READ = ("config_file", "dataset_config", "train_data_dir", "reg_data_dir", "in_json", "conditioning_data_dir")


@dataclass(frozen=True)
class _Shell:
    """How a kind of script is written."""

    continuation: str
    comment: str
    escape: str
    quotes: str
    assignment: str
    variable: str


_ASSIGN_VALUE = r"(?P<quote>[\"']?)(?P<value>.*?)(?P=quote)$"
_POSIX = _Shell(
    r"\\", r"\s*#", "\\", "\"'", r"\s*(?:export\s+)?(?P<name>\w+)=" + _ASSIGN_VALUE, r"\$\{?(?P<name>[A-Za-z_]\w*)\}?"
)
_BATCH = _Shell(
    r"\^",
    r"\s*(?i:rem\b|::)",
    "",
    '"',
    r"\s*(?i:set)\s+(?P<quote>\"?)(?P<name>\w+)=(?P<value>.*?)(?P=quote)$",
    r"%(?P<name>\w+)%",
)
_POWERSHELL = _Shell("`", r"\s*#", "", "\"'", r"\s*\$(?P<name>\w+)\s*=\s*" + _ASSIGN_VALUE, r"\$(?P<name>[A-Za-z_]\w*)")
_SHELLS = {".bat": _BATCH, ".cmd": _BATCH, ".ps1": _POWERSHELL}


@dataclass(frozen=True)
class Command:
    """A trainer's command: whose it is, its flags, and the launcher's."""

    tool: Tool | None
    arguments: tuple[str, ...]
    launcher: dict[str, str] = field(default_factory=dict)


def read_command(words: Sequence[str]) -> Command:
    """Return the parts of a command that is already split into words.

    Raises:
        UserError: the script is none of :data:`TRAINERS`.
    """
    if len(words) == 1 and " " in words[0].strip():
        words = _split(words[0], _POSIX)
    words = [word for word in words if word not in ("\\", "$@", "%*", "\n")]
    at = next((i for i, word in enumerate(words) if _script(words, i)), None)
    if at is None:
        if not words or not words[0].startswith("-"):
            raise UserError("command: no trainer's script in it; paste all of it, or its flags only")
        return Command(None, tuple(words))
    script = _script(words, at)
    if script not in TRAINERS:
        raise UserError(f"{script}: not a LoRA trainer that Tandem replaces; it reads those of {', '.join(TRAINERS)}")
    launcher: dict[str, str] = {}
    for i, word in enumerate(words[:at]):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            following = words[i + 1] if i + 1 < at and not words[i + 1].startswith("-") else ""
            launcher[name] = value if equals else following
    return Command(TRAINERS[script], tuple(words[at + 1 :]), launcher)


def read_command_file(path: str | Path) -> Command:
    """Return the first trainer's command in a script.

    Raises:
        UserError: the file cannot be read, starts no trainer, or uses a variable that it does not set.
    """
    return _first_command(read_text(path), path)


def paths_read(text: str, name: str) -> list[tuple[str, Any]]:
    """Return key and value of what is read to translate a script or a TOML, which is called ``name``.

    Raises:
        UserError: it can be translated by no means.
    """
    text = text.removeprefix("\ufeff")  # as whoever reads the file does
    if Path(name).suffix.lower() in SCRIPT_SUFFIXES:
        words = _first_command(text, name).arguments
        pairs: Any = pairwise([*(part for word in words for part in word.split("=", 1)), ""])
    else:
        pairs = read_keys(text, name).values.items()
    return [(key.lstrip("-"), value) for key, value in pairs if key.lstrip("-") in _READ]


def _first_command(text: str, path: str | Path) -> Command:
    shell = _SHELLS.get(Path(path).suffix.lower(), _POSIX)
    lines = [line for line in re.split("\r?\n", text) if not re.match(shell.comment, line)]
    joined = re.sub(shell.continuation + r"[ \t]*\n", " ", "\n".join(lines)).split("\n")
    variables: dict[str, str] = {}
    for line in joined:
        line = re.sub(shell.variable, lambda m: variables.get(m["name"], m[0]), line).rstrip()
        if match := re.match(shell.assignment, line):
            variables[match["name"]] = match["value"]
        elif any("train" in match[0] for match in re.finditer(r"\b\w+(\.py\b|\s+--)", line)):
            words = [word for word in _split(line, shell) if word not in ("$@", "${@}", "%*")]
            for word in words:
                if unset := re.search(shell.variable, word):
                    raise UserError(f"{path}: {unset[0]} is not set in this file; write its value into it")
            return read_command(words)
    raise UserError(f"{path}: starts no trainer; it should hold a command with {' or '.join(TRAINERS)}")


def _split(text: str, shell: _Shell) -> list[str]:
    """Return the words of the first command in ``text``."""
    if shell is _POSIX:
        text = re.sub(r"\\[ \t]*\n", " ", text)
    text = re.sub(r"\s\d>(&\d|\s*\S+)", " ", text)  # redirections by number, "2>&1"
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    lexer.escape, lexer.quotes, lexer.commenters = shell.escape, shell.quotes, ""
    words: list[str] = []
    try:
        for word in lexer:
            if word and set(word) <= set(";&|<>"):
                if any("train" in known for known in words):
                    break
                words = []  # "cd sd-scripts && accelerate launch ..."
            else:
                words.append(word)
    except ValueError:
        raise UserError("command: a quote is not closed; close it") from None
    return words


def _script(words: Sequence[str], i: int) -> str:
    """Return the file name of the Python script or module that ``words[i]`` names, or an empty string."""
    name = PureWindowsPath(words[i]).name  # splits at / and \\ alike
    if name.endswith(".py"):
        return name
    if i and words[i - 1] in ("-m", "--module"):
        return words[i].rpartition(".")[2] + ".py"
    return ""
