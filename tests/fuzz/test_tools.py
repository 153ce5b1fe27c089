"""Tools as a person starts them, each in a process of its own: damaged files, odd files in their place, odd arguments.

A case takes a command that works, and damages one of its files or replaces one of its words. Whatever that is, the tool
ends by itself with exit code 0 or 2, shows no traceback and no character that steers a terminal, computes for ten
seconds at most and takes a bounded amount of memory. A case is known by its number and the seed, which is printed:
``FUZZ_SEED=... FUZZ_CASES=... python -m pytest tests/fuzz/test_tools.py`` repeats it.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from tests import fuzz
from tests.forked import ROOT, Script
from tests.fuzz import CASES, SEED, outcomes
from tests.networks.conftest import make_flux
from tests.targets import FLUX_TARGETS

STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
WORDS = [
    "", "nan", "inf", "-inf", "1e400", "-1", "0", "1" * 30, "1" * 5000, "a" * 5000, "~nobody-of-this-name/x", "/",
    "/dev/zero", "/dev/null", "pipe", "folder", "loop", "folder/missing", "\x1b[31mred", "\u202egnp", "\udce9", "a=b",
    "=", "a.safetensors:inf", "a.safetensors:1e39", "a.safetensors:", ":", "--", "-", "--help", "[" * 3000, "{}", "é猫",
]  # fmt: skip
NUMBERS = [b"1e400", b"-1", b"99999999999999999999999", b"NaN", b"0", b"null", b"1" * 5000, b'"x"', b"[]", b"{}"]
PIECES = [
    b"\x00", b"\xef\xbb\xbf", b"\xff\xfe", b"\x1b[31m", b"\xe2\x80\xae", b"\xe9", b"\\ud83d", b"\n", b"\r", b'"', b"'",
    b"[", b"[" * 3000, b"{" * 3000, b"a." * 3000, b"\\", b"#", b"=", b":", b",", b"../../",
]  # fmt: skip


def make_files(folder: Path) -> None:
    """Write what the commands read."""
    torch.manual_seed(0)
    names = [f"transformer_blocks.{block}.attn.to_{part}" for block in range(2) for part in "qkv"]
    for name in ("a", "b"):
        weights = {each: LoraWeights(torch.randn(2, 32), torch.randn(32, 2), 2.0) for each in names}
        step = {"ss_base_model_version": "flux1", "ss_steps": str(ord(name)), "modelspec.title": "t", "x": "y"}
        save_adapter(folder / f"{name}.safetensors", weights, FLUX_TARGETS, "comfy", metadata=step)
    (folder / "images").mkdir()
    for number in range(3):
        Image.new("RGB", (64 + number, 64), (90 * number, 9, 9)).save(folder / "images" / f"{number}.png")
        (folder / "images" / f"{number}.caption").write_text(f"a picture, {number}", encoding="utf-8")
    listed = [{"image_path": f"{number}.png", "caption": f"picture {number}"} for number in range(3)]
    (folder / "listed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in listed), encoding="utf-8")
    subset = "[[datasets.subsets]]\nimage_dir = 'images'\nnum_repeats = 2\n"
    (folder / "d.toml").write_text(f"[general]\nresolution = [64, 64]\n[[datasets]]\n{subset}", encoding="utf-8")
    (folder / "l.toml").write_text(
        f"[[datasets]]\nresolution = 64\n{subset}metadata_file = 'listed.jsonl'\n", encoding="utf-8"
    )
    lines = [{"step": step, "loss": 1 / step, "lr/lora": 1e-4, "s_per_it": 0.5} for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "run.toml").write_text(
        '[model]\npretrained_model_name_or_path = "nowhere"\ndataset_config = "d.toml"\n[network]\nnetwork_dim = 4\n'
        'network_args = ["in_dims=[4,4,4,4,4]"]\n[optimizer]\nlearning_rate = 1e-4\n',
        encoding="utf-8",
    )
    (folder / "llm.toml").write_text(
        'data_dir = "nowhere"\npreset = "llama-tiny"\nmax_train_steps = 3\n', encoding="utf-8"
    )
    (folder / "text.jsonl").write_text('{"text": "one two"}\n{"text": "three"}\n' * 300, encoding="utf-8")
    shutil.copytree(folder / "images", folder / "sets" / "2_cat")
    model = make_flux()
    model.save_pretrained(folder / "base")
    model.proj_out.weight.data += torch.ones_like(model.proj_out.weight)
    model.save_pretrained(folder / "tuned")
    kohya: dict[str, object] = {
        "network_dim": 4,
        "unet_lr": 1e-4,
        "max_train_epochs": 3,
        "optimizer_type": "AdamW8bit",
        "seed": 1,
    }
    words = {"pretrained_model_name_or_path": "flux1-dev.safetensors", "output_name": "cat", "train_data_dir": "sets"}
    kohya |= words
    toml = "".join(f"{key} = {value!r}\n" for key, value in kohya.items())
    (folder / "kohya.toml").write_text(toml, encoding="utf-8")
    flags = " \\\n ".join(f"--{key}={value}" for key, value in kohya.items())
    (folder / "train.sh").write_text(f"accelerate launch flux_train_network.py {flags} --sdpa\n", encoding="utf-8")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")


NEEDS_LINUX = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="measures by what Linux tells")
WEIGHTS = "diffusion_pytorch_model.safetensors"

# the script, its words, and the files among them that are damaged
COMMANDS = [
    ("tools/inspect_model.py", ["a.safetensors"], ["a.safetensors"]),
    (
        "tools/convert_lora.py",
        ["--lora", "a.safetensors", "--save_to", "o.safetensors", "--save_format", "kohya"],
        ["a.safetensors"],
    ),
    (
        "tools/merge_lora.py",
        ["--lora", "a.safetensors:0.5", "b.safetensors", "--save_to", "o.safetensors"],
        ["a.safetensors", "b.safetensors"],
    ),
    (
        "tools/resize_lora.py",
        ["--model", "a.safetensors", "--save_to", "o.safetensors", "--new_rank", "1"],
        ["a.safetensors"],
    ),
    (
        "tools/merge_lora.py",
        ["--model", "base", "--lora", "a.safetensors", "--save_to", "o", "--save_precision", "bf16"],
        ["base/config.json", f"base/{WEIGHTS}", "a.safetensors"],
    ),
    (
        "tools/quantize_model.py",
        ["--model", "base", "--save_to", "o.safetensors", "--layout", "plain"],
        ["base/config.json", f"base/{WEIGHTS}"],
    ),
    (
        "tools/extract_lora.py",
        ["--model_org", "base", "--model_tuned", "tuned", "--save_to", "o.safetensors", "--dim", "2"],
        ["tuned/config.json", f"tuned/{WEIGHTS}"],
    ),
    ("tools/migrate_config.py", ["kohya.toml", "--save_to", "o.toml"], ["kohya.toml"]),
    ("tools/migrate_config.py", ["train.sh", "--save_to", "o.toml"], ["train.sh"]),
    ("tools/plot_lr.py", ["metrics.jsonl", "--save_to", "o.png"], ["metrics.jsonl"]),
    ("tools/check_dataset.py", ["d.toml", "--json", "o.json"], ["d.toml", "images/0.png", "images/1.caption"]),
    ("tools/check_dataset.py", ["l.toml"], ["l.toml", "listed.jsonl"]),
    ("tools/prepare_text.py", ["text.jsonl", "--train_tokenizer=300", "--save_to", "o"], ["text.jsonl"]),
    ("train_lora.py", ["--config_file", "run.toml", "--network_alpha", "4"], ["run.toml"]),
    ("train_llm.py", ["--config_file", "llm.toml", "--learning_rate", "1e-3"], ["llm.toml"]),
]  # fmt: skip


def damage(data: bytes, draw: random.Random) -> bytes:
    """Return ``data`` with up to three changes, of which most leave a file of the same kind."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data) + 1)
        numbers = list(re.finditer(rb"\d+(\.\d+)?", data[:4096]))
        match draw.randrange(8):
            case 0:
                data = data[:at]
            case 1 if data:
                data = data[: at - 1] + bytes([draw.randrange(256)]) + data[at:]
            case 2:
                data = data[:at] + draw.choice(PIECES) + data[at:]
            case 3 | 4 if numbers:
                number = draw.choice(numbers)
                data = data[: number.start()] + draw.choice(NUMBERS) + data[number.end() :]
            case 5:
                end = min(len(data), at + draw.randrange(200))
                data = data[:end] + data[at:end] * draw.choice([1, 1, 50]) + data[end:]
            case 6:
                end = min(len(data), at + draw.randrange(40))
                data = data[:at] + data[end:]
            case 7 if draw.random() < 0.3:
                text = data.decode("utf-8", errors="replace")
                data = text.encode(draw.choice(["utf-16", "utf-16-le", "utf-8-sig", "utf-32"]))
            case _:
                pass
    return data


def peak_of(pid: int) -> tuple[int, float] | None:
    """Return a process's highest use of memory in KiB and its CPU seconds; None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    memory = re.search(r"VmHWM:\s+(\d+)", status)
    return (int(memory[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")) if memory else None


def run_case(number: int, folder: Path) -> None:
    draw = random.Random(f"{SEED}:{number}")
    script, words, files = draw.choice(COMMANDS)
    words = list(words)
    if draw.random() < 0.65:
        file = folder / draw.choice(files)
        file.write_bytes(damage(file.read_bytes(), draw))
    else:
        at, word = draw.randrange(len(words)), draw.choice(WORDS)
        writes = word == "/" and words[at - 1] in ("--save_to", "--json")
        words[at] = "/proc/self" if writes else word  # root may write into "/"; nobody can there, or beside it
    check(f"FUZZ_SEED={SEED} case {number}: {script} {[word[:60] for word in words]}", ROOT / script, words, folder)


def check(case: str, script: Path, words: list[str], folder: Path) -> int:
    """Run a script in ``folder``, hold it to all that is asked of a tool, and return its exit code."""
    beside = sorted(folder.parent.iterdir())
    begun, used, more = time.monotonic(), 0.0, 0.0
    running = Script(script, words, folder)
    first = None
    while not running.has_ended() and time.monotonic() - begun < fuzz.WALL_SECONDS:
        if (now := peak_of(running.pid)) is not None:
            first = first or now
            more, used = (now[0] - first[0]) / 1024, now[1]
        if used > fuzz.CPU_SECONDS or more > fuzz.MEBIBYTES:
            break
        time.sleep(0.01)
    state = running.state()
    try:
        done = running.wait(limit=1.0)
    except AssertionError as late:
        raise AssertionError(f"{case}: {used:.1f} s of computing, {more:.0f} MiB; {state}\n{late}") from None
    text = f"{case}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert done.returncode in (0, 2), text
    assert "Traceback" not in done.stderr, text
    assert not STEERS.search((done.stdout + done.stderr).replace("\r", "")), text
    if done.returncode == 2:
        _, error, lines = done.stderr.rpartition("error: ")
        assert error, text
        configuration = script.name.startswith(("train", "migrate_config"))  # of which each mistake has a line
        assert configuration or "\n" not in lines.strip(), text
    assert used <= fuzz.CPU_SECONDS, f"{text}\n{used:.0f} s of computing"
    assert more <= fuzz.MEBIBYTES, f"{text}\n{more:.0f} MiB"
    assert sorted(folder.parent.iterdir()) == beside, f"{text}\nwrote beside its folder"
    assert (folder / "pipe").is_fifo(), f"{text}\nput a file in the pipe's place"
    assert all(Path(device).is_char_device() for device in ("/dev/null", "/dev/zero")), f"{text}\nhit a device"
    outcomes["taken" if done.returncode == 0 else "refused"] += 1
    return done.returncode


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read, undamaged."""
    folder = tmp_path_factory.mktemp("whole")
    make_files(folder)
    return folder


def copy_of(whole: Path, folder: Path) -> Path:
    """Copy what the commands read into ``folder``."""
    shutil.copytree(whole, folder, symlinks=True, ignore=shutil.ignore_patterns("pipe"))
    os.mkfifo(folder / "pipe")
    return folder


@NEEDS_LINUX
@pytest.mark.parametrize(("script", "words"), [command[:2] for command in COMMANDS], ids=range(len(COMMANDS)))
def test_every_command_works_before_it_is_damaged(whole: Path, tmp_path: Path, script: str, words: list[str]) -> None:
    expected = 2 if script.startswith("train") else 0  # these have no model: what is tried is their configuration
    assert check(script, ROOT / script, words, copy_of(whole, tmp_path / "x")) == expected


@NEEDS_LINUX
@pytest.mark.parametrize("part", range(4))
def test_any_damage_to_a_tools_files_and_words_ends_in_a_line(whole: Path, tmp_path: Path, part: int) -> None:
    each = max(2, CASES // 200)
    for number in range(part * each, (part + 1) * each):
        folder = copy_of(whole, tmp_path / str(number))
        run_case(number, folder)
        shutil.rmtree(folder)
