"""The lines a person sees: every figure asked for, and names as they are written."""

from __future__ import annotations

import io
import re
import time
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console

from library.config import load_config
from library.config.kohya.translate import summary
from library.config.kohya.translation import Note
from library.console import Console as OwnConsole
from library.console import print_summary
from library.training.report.progress import (
    Preparation,
    TrainingProgress,
    Work,
    counting,
)
from tests.runs import arguments, run, write_base, write_dataset

STEP = {
    "epoch": 1,
    "loss_ema": 0.25,
    "lr/lora": 1.0,
    "d/lora": 2e-4,
    "d*lr/lora": 2e-4,
    "data_wait_s": 0.5,
    "peak_mem_bytes": 2**30,
}


def _console() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=100), file


def test_a_log_file_gets_a_line_with_every_figure_and_a_summary_of_the_run() -> None:
    console, file = _console()
    with TrainingProgress(console, total_steps=2, total_epochs=3, first_step=0) as progress:
        progress.advance(1)
        progress.show(STEP | {"step": 1, "s_per_it": 1.0})
        progress.advance(2)
        progress.show(STEP | {"step": 2, "s_per_it": 3.0})
        progress.show(STEP | {"step": 2, "s_per_it": 3.0, "data_wait_s": 0.1})
    first, second, third = (line.split("  ", 1) for line in file.getvalue().splitlines())
    waiting = "1.00 s/it (0.50 s of it waiting for data)"
    rates = "lr 1.0e+00  d·lr 2.0e-04"
    assert first[1] == f"step 1/2  epoch 2/3  avg loss 0.2500  {rates}  {waiting}  1.0 GiB"
    assert second[1].startswith("step 2/2")
    assert second[1].endswith("eta 0 s")
    assert "3.00 s/it  1.0 GiB" in third[1]  # too little waiting to be told
    for stamp, _ in (first, second, third):
        assert abs((datetime.now() - datetime.fromisoformat(stamp)).total_seconds()) < 60
    assert progress.summary() == [
        ("learning rate", "lr 1.0e+00  d·lr 2.0e-04"),
        ("speed", "2.33 s/it, of it 0.37 s waiting for data"),
    ]


def test_brackets_in_a_name_are_printed_as_they_are() -> None:
    console, file = _console()
    print_summary(console, [("a[bold]b", "out[1]/lo[/]ra.safetensors")])
    assert file.getvalue().split() == ["a[bold]b", "out[1]/lo[/]ra.safetensors"]


TOKEN = "hf_planted0123456789secret"
VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")


def holding(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and TOKEN.encode() in file.read_bytes()]


def test_a_run_leaves_no_token_behind(tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, TOKEN)
    base, dataset = write_base(tmp_path / "base"), write_dataset(tmp_path / "data", images=2)
    run(base, dataset, tmp_path / "out", max_train_steps=1, save_state=True, log_with="tensorboard")
    printed = capfd.readouterr()
    assert TOKEN not in printed.out + printed.err
    written = {file.name for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert {"lora.safetensors", "config.toml", "metrics.jsonl"} <= written
    assert holding(tmp_path) == []
    (tmp_path / "planted").write_text(TOKEN)
    assert holding(tmp_path) == [tmp_path / "planted"]  # it would have been found


@pytest.mark.parametrize("key", ["huggingface_token", "wandb_api_key"])
def test_a_token_in_a_configuration_is_passed_over_without_being_repeated(key: str, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'pretrained_model_name_or_path = "m"\nmodel_type = "flux"\ndataset_config = "d"\n{key} = "{TOKEN}"\n'
    )
    for argv in (
        ["--config_file", str(config)],
        [*arguments(tmp_path, tmp_path, tmp_path, model_type="flux"), f"--{key}", TOKEN],
    ):
        notes: list[Note] = []
        loaded = load_config(argv, notes)
        (said,) = [line for line in summary(notes) if key in line]
        assert "secrets do not belong in a configuration" in said
        assert TOKEN not in "".join(summary(notes)) + loaded.model_dump_json()


def test_a_terminal_has_one_live_line_that_ends_with_the_count() -> None:
    stream = io.StringIO()
    console = OwnConsole(file=stream, force_terminal=True, width=80, markup=False, highlight=False)
    with counting(console) as start:
        advance = start("encoding [red]images", 3)
        for _ in range(3):
            advance(1)
        console.print("note: afterwards")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "encoding [red]images: 3 of 3\n" in shown
    assert "of 3" not in shown.partition("note: afterwards")[2]


def test_the_list_says_how_long_a_step_took_the_last_time_and_nothing_where_that_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def listed(items: int, *kind: object) -> str:
        console, file = _console()
        work = {"encoding": Work.of(items, tmp_path / "times", *kind)}
        preparation.plan({"encoding": f"{items} new"}, console, work)
        assert f"  encoding: {preparation.steps['encoding']}\n" in file.getvalue()
        return preparation.steps["encoding"]

    preparation = Preparation()
    preparation.folder = tmp_path
    assert listed(10, "flux", (512, 512)) == "10 new"
    advance = preparation.begin("encoding", 10)
    advance(0)
    for seconds in (62.0, *[2.0] * 4):  # the model is loaded, in 60; then batches of two
        now += seconds * 2 if seconds < 60 else seconds + 2
        advance(2)
    assert listed(100, "flux", (512, 512)) == "100 new; about 4 min 20 s, as last time"
    assert listed(0, "flux", (512, 512)) == "0 new"
    assert listed(100, "flux", (768, 768)) == "100 new"  # of another size nothing is known
    advance = preparation.begin("encoding", 10)
    advance(4)  # broken off: the last time is the one before
    assert listed(100, "flux", (512, 512)) == "100 new; about 4 min 20 s, as last time"
    (kept,) = (tmp_path / "times").iterdir()
    for damaged in (b"", b"[1", kept.read_bytes().replace(b"60", b"90"), b"\xff" * 40):
        kept.write_bytes(damaged)
        assert listed(100, "flux", (512, 512)) == "100 new"
