"""Captions by a command of the user's: which images it is run for, what it is given, and what it cannot do."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import library.data.caption_command as caption_command
from library.config.schema import DatasetArguments
from library.data.caption_command import command_words, write_captions
from library.data.config import load_dataset_config
from library.errors import UserError
from tests.data.folders import add_image, build, write_toml
from tests.forked import Script

NAMED = ["-rf.png", "--help.png", "a b'\"c.png", "$(touch pwned).png", "; touch pwned #.png", "{image}.png", "é|x.png"]


@pytest.fixture
def captioner(tmp_path: Path) -> str:
    """A command that notes its arguments in said.jsonl and prints the image's name; "mute" and "bad" as they say."""
    script = tmp_path / "captioner.py"
    script.write_text(
        f"import json, sys\nfrom pathlib import Path\n"
        f"with open({str(tmp_path / 'said.jsonl')!r}, 'a') as f: f.write(json.dumps(sys.argv[1:]) + '\\n')\n"
        "image = Path(sys.argv[-1].removeprefix('--image='))\n"
        "if 'bad' in image.name: print('loading', file=sys.stderr); sys.exit('no  such model')\n"
        "if 'mute' not in image.name: print(f'\\n  a picture\\nof  {image.stem}  \\n'.encode().decode())\n"
    )
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(script))}"


def given(folder: Path) -> list[list[str]]:
    said = folder / "said.jsonl"
    return [json.loads(line) for line in said.read_text().splitlines()] if said.exists() else []


def caption(toml: Path, command: str) -> None:
    config = load_dataset_config(str(toml), DatasetArguments(dataset_config=str(toml)))
    write_captions(command, config, lambda *_: lambda _: None)


def test_only_images_without_a_caption_are_described_and_the_next_run_reads_it(tmp_path: Path, captioner: str) -> None:
    add_image(tmp_path / "img", "a.png", caption="by hand")
    add_image(tmp_path / "img", "b.png", caption=None)
    toml = write_toml(tmp_path)
    caption(toml, f"{captioner} --words 9 {{image}}")
    assert given(tmp_path) == [["--words", "9", str(tmp_path / "img" / "b.png")]]
    assert (tmp_path / "img" / "a.txt").read_text() == "by hand"
    assert (tmp_path / "img" / "b.txt").read_text() == "a picture of b\n"
    assert build(toml).captions() == ["by hand", "a picture of b"]
    caption(toml, f"{captioner} {{image}}")
    assert len(given(tmp_path)) == 1


def test_a_name_is_one_argument_whatever_it_holds(
    tmp_path: Path, captioner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in NAMED:
        add_image(tmp_path / "img", name, caption=None)
    caption(write_toml(tmp_path), f"{captioner} --image={{image}}")
    assert sorted(given(tmp_path)) == sorted([f"--image={tmp_path / 'img' / name}"] for name in NAMED)
    assert not (tmp_path / "pwned").exists()
    (tmp_path / "said.jsonl").unlink()
    for name in NAMED:
        (tmp_path / "img" / name).with_suffix(".txt").unlink()
    monkeypatch.chdir(tmp_path)
    relative = write_toml(tmp_path, subset="image_dir = './img/'")
    caption(relative.relative_to(tmp_path), f"{captioner} {{image}}")
    assert all(Path(path).is_absolute() for (path,) in given(tmp_path))
    assert len(given(tmp_path)) == len(NAMED)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("captioner", "caption_command: 'captioner' lacks {image}; write"),
        ("captioner '{image}", "close the quotes"),
        ("sh -c 'captioner {image}'", "'captioner {image}': there a file's name could run as code"),
        ("sh -c 'cat<{image}'", "could run as code"),
        ("python -c 'f(\"{image}\")'", "could run as code"),
        ("{image} --caption", "could run as code"),
    ],
)
def test_a_command_that_could_not_work_or_would_run_names_is_refused(
    tmp_path: Path, command: str, expected: str
) -> None:
    add_image(tmp_path / "img", "$(touch pwned).png", caption=None)
    with pytest.raises(UserError) as caught:
        caption(write_toml(tmp_path), command)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["{image}", "--image={image}", "file=@{image}", "file:///{image}"])
def test_a_place_of_its_own_or_after_a_key_is_taken(place: str) -> None:
    assert command_words(f"captioner -F '{place}'") == ["captioner", "-F", place]


def test_a_shell_is_given_the_name_as_an_argument_as_the_message_says(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "$(touch pwned).png", caption=None)
    caption(write_toml(tmp_path), "sh -c 'basename \"$1\" | tr a-z A-Z' sh {image}")
    assert (tmp_path / "img" / "$(touch pwned).txt").read_text() == "$(TOUCH PWNED).PNG\n"


def test_a_command_that_fails_or_says_nothing_is_one_line_and_what_is_written_stays(
    tmp_path: Path, captioner: str
) -> None:
    for name in ("a.png", "bad.png", "mute.png"):
        add_image(tmp_path / "img", name, caption=None)
    toml = write_toml(tmp_path)
    with pytest.raises(UserError) as caught:
        caption(toml, f"{captioner} {{image}}")
    assert str(caught.value) == (
        f"{tmp_path / 'img' / 'bad.png'}: caption_command ended with exit status 1 (no  such model); put it right: "
        "captions already written stay"
    )
    assert (tmp_path / "img" / "a.txt").exists()
    (tmp_path / "img" / "bad.png").unlink()
    with pytest.raises(UserError, match=r"mute\.png: .* exit status 0 and no caption \(nothing on stderr\)"):
        caption(toml, f"{captioner} {{image}}")
    assert [one[0].rpartition("/")[2] for one in given(tmp_path)] == ["a.png", "bad.png", "mute.png"]
    with pytest.raises(UserError, match=r"caption_command: 'no-such-captioner' cannot be run \(No such file"):
        caption(toml, "no-such-captioner {image}")


@pytest.mark.parametrize(
    ("printed", "said"), [("'\\033[31mred'", "control characters"), ("$(seq -s, 9999)", "48,887 characters")]
)
def test_what_is_no_caption_is_not_written(tmp_path: Path, printed: str, said: str) -> None:
    add_image(tmp_path / "img", "a.png", caption=None)
    with pytest.raises(UserError, match=f"a\\.png: caption_command prints {said}"):
        caption(write_toml(tmp_path), f'sh -c "printf {printed}" sh {{image}}')
    assert not (tmp_path / "img" / "a.txt").exists()


def lives(mark: str, expected: bool = False) -> bool:
    """Whether a process has the argument ``mark``, once that is as expected or after some seconds."""
    until = time.monotonic() + (100 if expected else 10)  # Python starts slowly beside other tests
    while True:
        found = any(mark in (process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
        if found == expected or time.monotonic() > until:
            return found
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("sleep 600.{mark}", "has not ended after 0.5 s"),
        ("trap '' TERM INT HUP; sleep 600.{mark} & sleep 600.{mark}", "has not ended after 0.5 s"),
        ("yes 600.{mark}", "prints without end"),
        ("yes 600.{mark} >&2 & wait", "prints without end"),
    ],
)
def test_a_command_without_end_is_killed_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    monkeypatch.setattr(caption_command, "_MOST_SECONDS", 0.5 if "after" in said else 60)
    add_image(tmp_path / "img", "a.png", caption=None)
    mark = f"{os.getpid()}{time.monotonic_ns()}"
    with pytest.raises(
        UserError, match=rf"a\.png: caption_command {said}; put it right: captions already written stay"
    ):
        caption(write_toml(tmp_path), shlex.join(["sh", "-c", script.format(mark=mark), "sh", "{image}"]))
    assert not lives(f"600.{mark}")


def test_a_server_that_keeps_stdout_blocks_nothing(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png", caption=None)
    began, mark = time.monotonic(), f"{os.getpid()}{time.monotonic_ns()}"
    caption(write_toml(tmp_path), shlex.join(["sh", "-c", f"sleep 7.{mark} & echo a cat", "sh", "{image}"]))
    assert time.monotonic() - began < 6
    assert (tmp_path / "img" / "a.txt").read_text() == "a cat\n"
    assert lives(f"7.{mark}", expected=True)  # it may be there for the next image


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_command_does_not_outlive_a_run_that_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    add_image(tmp_path / "img", "a.png", caption=None)
    write_toml(tmp_path)
    mark = f"{os.getpid()}{time.monotonic_ns()}"
    words = ["sh", "-c", f"sleep 600.{mark} & sleep 600.{mark}", "sh", "{image}"]
    default = "default_int_handler" if number == signal.SIGINT else "SIG_DFL"  # nohup ignores some, which is inherited
    code = (
        "import signal\nfrom library.config.schema import DatasetArguments\n"
        "from library.data.caption_command import write_captions\n"
        "from library.data.config import load_dataset_config\n"
        f"signal.signal({int(number)}, signal.{default})\n"
        "config = load_dataset_config('dataset.toml', DatasetArguments(dataset_config='dataset.toml'))\n"
        f"write_captions({shlex.join(words)!r}, config, lambda *_: lambda _: None)"
    )
    (tmp_path / "run.py").write_text(code)
    if number == signal.SIGINT:  # Python's own end of a program
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        command = [sys.executable, str(tmp_path / "run.py")]
        run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, env=environment)
        assert lives(f"600.{mark}", expected=True)
        run.send_signal(number)
        assert run.wait(60) == -number  # as Python says it
    else:
        script = Script(tmp_path / "run.py", [], tmp_path)
        assert lives(f"600.{mark}", expected=True)
        os.kill(script.pid, number)
        assert script.wait().returncode == 128 + number  # as a shell says it
    assert not lives(f"600.{mark}")


def test_subsets_that_have_their_captions_are_left_alone(tmp_path: Path, captioner: str) -> None:
    for name in ("img", "named", "listed", "off"):
        add_image(tmp_path / name, "a.png", caption=None)
    (tmp_path / "list.jsonl").write_text(json.dumps({"image_path": "listed/a.png", "caption": "x"}))
    others = ["image_dir = 'named'\nclass_tokens = 'disc'", "metadata_file = 'list.jsonl'"]
    toml = write_toml(tmp_path, subset="\n[[datasets.subsets]]\n".join([*others, "image_dir = 'off'\nnum_repeats = 0"]))
    with pytest.raises(UserError, match="caption_command: every subset has class_tokens or a metadata_file; remove it"):
        caption(toml, f"{captioner} {{image}}")
    caption(
        write_toml(tmp_path, subset="\n[[datasets.subsets]]\n".join(["image_dir = 'img'", *others])),
        f"{captioner} {{image}}",
    )
    assert [one[0] for one in given(tmp_path)] == [str(tmp_path / "img" / "a.png")]


def test_masks_beside_the_images_are_not_described_and_folders_inside_are(tmp_path: Path, captioner: str) -> None:
    add_image(tmp_path / "img", "a.png", caption=None)
    add_image(tmp_path / "img" / "deep", "b.png", caption=None)
    add_image(tmp_path / "img" / "masks", "a.png", caption=None)
    toml = write_toml(tmp_path, subset="image_dir = 'img'\nrecursive = true\nconditioning_data_dir = 'img/masks'")
    caption(toml, f"{captioner} {{image}}")
    assert sorted(path.name for path in (tmp_path / "img").rglob("*.txt")) == ["a.txt", "b.txt"]


def test_no_image_is_written_over(tmp_path: Path, captioner: str) -> None:
    image = add_image(tmp_path / "img", "a.png", caption=None)
    before = image.read_bytes()
    with pytest.raises(UserError, match=r"caption_extension '\.png' is that of an image"):
        caption(write_toml(tmp_path, subset="image_dir = 'img'\ncaption_extension = 'png'"), f"{captioner} {{image}}")
    assert image.read_bytes() == before
    add_image(tmp_path / "img", "a.jpg", caption=None)  # shares the caption of a.png
    caption(write_toml(tmp_path), f"{captioner} {{image}}")
    assert len(given(tmp_path)) == 1


@pytest.mark.parametrize("table", ["general", "dataset", "subset"])
def test_a_dataset_names_no_command(tmp_path: Path, table: str) -> None:
    add_image(tmp_path / "img", "a.png")
    key = "caption_command = 'rm -rf {image}'"
    subset = "image_dir = 'img'"
    toml = write_toml(tmp_path, **{"subset": subset, table: f"{subset}\n{key}" if table == "subset" else key})
    with pytest.raises(UserError, match="'caption_command' is not taken: a dataset may come from a stranger"):
        build(toml)
