"""What strangers wrote on files and in them is shown, and steers no terminal; live lines reach it as rich made them."""

from __future__ import annotations

import ast
import errno
import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TextIO, cast

import pytest
import torch
from PIL import Image
from rich.live import Live
from rich.table import Table
from rich.text import Text
from safetensors.torch import save_file

from library.console import Console
from library.errors import NotRestoredError, PrintableStream, UserError, exit_on_user_error, one_line, printable, undone
from library.files import write_text
from tests.forked import run_script
from tests.runs import ROOT

HOSTILE = "a\x1b[31m\x1b]0;title\x07\x9b2J\u202egnp.exe\r"
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", "\\x1b[2J"),
        ("\x9b31m", "\\x9b31m"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\u202egnp", "\\u202egnp"),
        ("caf\udce9", "caf\\xe9"),
        ("\ud83d", "\\ud83d"),
        ("naïve 猫 👩‍👩‍👧 é", "naïve 猫 👩‍👩‍👧 é"),
    ],
)
def test_what_steers_a_terminal_is_spelt_out_and_letters_are_not(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown
    printable(text).encode()


def test_an_error_is_one_line_whatever_is_in_it_and_several_problems_are_several() -> None:
    assert one_line(UserError("a\nerror: b\x1b[0m: wrong; correct it")) == "a\\nerror: b\\x1b[0m: wrong; correct it"
    assert one_line(UserError("one\n", "two")).splitlines() == ["one", "two"]


def test_a_value_of_a_book_is_cut_in_an_error_that_keeps_its_place_and_its_remedy() -> None:
    shown = one_line(UserError(f"run.toml:3: seed: '{'a' * 70_000}' does not fit; should be a number"))
    assert len(shown) < 2100
    assert shown.startswith("run.toml:3: seed: 'aaa")
    assert shown.endswith("aaa' does not fit; should be a number")


def test_print_goes_through_the_filter_and_richs_own_colours_past_it() -> None:
    out = io.StringIO()
    stream = PrintableStream(out)
    print(HOSTILE, file=stream)
    stream.writelines([HOSTILE])
    assert not STEERS.search(out.getvalue())
    Console(file=stream).file.write(HOSTILE)
    assert out.getvalue().endswith(HOSTILE)


def test_rich_colours_its_texts_and_nobody_elses() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, markup=False, highlight=False, width=200)
    table = Table(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE, "bold"))
    console.print(table)
    console.print(HOSTILE, style="red")
    own = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert own != out.getvalue()
    assert not STEERS.search(own.replace("\r", ""))
    assert out.getvalue().count("\\x1b[31m") == 4


def test_a_string_is_one_line_and_a_text_or_several_strings_are_several() -> None:
    out, table = io.StringIO(), Table("name\nfake line")
    console = Console(file=out, markup=False, highlight=False, width=200)
    table.add_row("a\nfake line")
    console.print("b\nfake line\t.", "c", sep="\n")
    console.print(table)
    assert not [line for line in out.getvalue().splitlines() if line.strip(" │┃").startswith("fake line")]
    assert out.getvalue().startswith("b\\nfake line")
    console.print(Text("two\nlines"))
    assert out.getvalue().endswith("two\nlines\n")


def test_no_code_prints_a_string_of_several_lines_on_the_console() -> None:
    """It would be shown as one, with the line's end spelt: several strings or a Text are meant."""
    found, names = [], ("print", "note", "say")
    for path in [p for folder in ("library", "networks", "tools", "dev") for p in (ROOT / folder).rglob("*.py")]:
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            last = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if last.endswith(names) and ast.unparse(call.func).endswith(
                ("console.print", "progress.note", "self.note", "say")
            ):
                texts = [arg for arg in call.args if not ast.unparse(arg).startswith("Text(")]
                parts = [part.value for arg in texts for part in ast.walk(arg) if isinstance(part, ast.Constant)]
                if any(isinstance(part, str) and "\n" in part for part in parts):
                    found.append(f"{path.name}:{call.lineno}")
    assert found == []


@pytest.mark.parametrize("tool", ["inspect_model", "convert_lora", "merge_lora", "check_dataset"])
def test_no_tool_lets_a_file_steer_the_terminal(tool: str, tmp_path: Path) -> None:
    lora = tmp_path / f"{HOSTILE.replace('/', '')}.safetensors"
    save_file({f"{HOSTILE}\nfake line.lora_A.weight": torch.ones(2, 2)}, lora, {HOSTILE: f"{HOSTILE}\nx"})
    (tmp_path / "images").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "images" / f"{HOSTILE}\nfake line.png")
    Image.new("RGB", (64, 64)).save(tmp_path / "images/captioned.png")
    (tmp_path / "images/captioned.caption").write_text("a caption")
    dataset = tmp_path / "d.toml"
    dataset.write_text("[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = 'images'\n", encoding="utf-8")
    words = {
        "inspect_model": [str(lora)],
        "convert_lora": ["--lora", str(lora), "--save_to", str(tmp_path / "o.safetensors"), "--save_format", "kohya"],
        "merge_lora": ["--lora", str(lora), "--save_to", str(tmp_path / "o.safetensors")],
        "check_dataset": [str(dataset)],
    }
    done = run_script(ROOT / f"tools/{tool}.py", words[tool], ROOT)
    text = done.stdout + done.stderr
    assert "\\x1b" in text
    assert not STEERS.search(text)
    assert not [line for line in text.splitlines() if line.startswith("fake line")]


def test_a_report_spells_bytes_of_names_that_are_not_utf8(tmp_path: Path) -> None:
    write_text(tmp_path / "report.html", "caf\udce9.png")
    assert (tmp_path / "report.html").read_text() == "caf\\udce9.png"


@pytest.mark.parametrize("number", [errno.ENAMETOOLONG, errno.EACCES, errno.ENOTDIR])
def test_a_path_the_system_refuses_is_one_line(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    def look() -> None:
        raise OSError(number, os.strerror(number), "folder\x1b[31m\n/x")

    with pytest.raises(SystemExit, match="2"):
        exit_on_user_error(look)()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: folder\\x1b[31m\\n/x: ")
    assert os.strerror(number) in line


@pytest.mark.parametrize("script", ["train_lora.py", "ui.py", "tools/check_dataset.py", "tools/merge_lora.py"])
def test_a_working_directory_that_was_removed_is_one_line(script: str, tmp_path: Path) -> None:
    """torch would end the process with a line about oneMKL."""
    command = f"cd {tmp_path} && rmdir {tmp_path} && exec {sys.executable} {ROOT / script} --help"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the working directory: cannot be used (No such file or directory); correct the path\n"


def test_any_other_error_of_the_system_keeps_its_traceback() -> None:
    def connect() -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    with pytest.raises(ConnectionRefusedError):
        exit_on_user_error(connect)()


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_closed_stream_takes_what_is_printed_and_no_file_takes_its_place(closed: str, tmp_path: Path) -> None:
    """As of pythonw, or of a service that closes them."""
    script = "import os, pathlib, sys; from library.errors import UserError, exit_on_user_error\n"
    script += "def main():\n file = open('out', 'w'); print('said', flush=True)\n"
    script += " print('told', file=sys.stderr, flush=True)\n"
    script += " os.write(1, b'x'); os.write(2, b'x'); file.write(str(file.fileno() > 2)); file.close()\n"
    script += " if len(sys.argv) > 1: raise UserError('wrong')\nexit_on_user_error(main)()\n"
    for more, code in (("", 0), (" x", 2)):
        command = f'cd {tmp_path} && PYTHONPATH={ROOT} exec "$0" -c "$1"{more} {closed}'
        done = subprocess.run(
            ["sh", "-c", command, sys.executable, script], capture_output=True, text=True, timeout=100
        )
        assert (done.returncode, (tmp_path / "out").read_text()) == (code, "True"), done


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is Linux'")
@pytest.mark.parametrize(
    "act",
    [
        "print('x')",
        "print('x', flush=True)",
        "Console().print('x')",
        "Console().print(Table('x'))",
        "list(track([1], console=Console(force_terminal=True)))",
        "sys.stdout.rich_proxied_file.write('x')",
        "sys.stdout.writelines(['x' * 99999])",
        "sys.__stdout__.close(); Console().print('x')",
        "sys.__stdout__.close(); print('x')",
    ],
)
def test_whatever_prints_is_told_that_the_disk_is_full(act: str) -> None:
    script = "import sys; from library.errors import exit_on_user_error; from library.console import Console\n"
    script += "from rich.progress import track; from rich.table import Table\n"
    script += f"def main():\n {act}\nexit_on_user_error(main)()\n"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100
        )
    why = "I/O operation on closed file." if "close()" in act else os.strerror(errno.ENOSPC)
    assert (done.returncode, done.stderr.splitlines()) == (
        0,
        [f"warning: not all that was printed could be written ({why})"],
    )


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


@pytest.mark.parametrize("failure", [None, RuntimeError("CUDA out of memory"), KeyboardInterrupt()])
def test_what_could_not_be_taken_back_names_both_reasons(failure: BaseException | None) -> None:
    def undo() -> None:
        raise OSError("the disk is gone")

    @undone("x", undo)
    def work() -> None:
        if failure:
            raise failure

    with pytest.raises(NotRestoredError, match="the disk is gone") as told:
        work()
    assert (type(failure).__name__ in str(told.value)) == (failure is not None)
    assert ("CUDA out of memory" in str(told.value)) == isinstance(failure, RuntimeError)
