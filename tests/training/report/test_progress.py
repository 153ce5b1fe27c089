"""The lines a person sees: every figure asked for, and names as they are written."""

from __future__ import annotations

import io

from rich.console import Console

from library.training.report.progress import TrainingProgress, print_summary

STEP = {
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
    with TrainingProgress(console, total_steps=2, first_step=0) as progress:
        progress.show(STEP | {"step": 1, "s_per_it": 1.0})
        progress.show(STEP | {"step": 2, "s_per_it": 3.0})
    first, last = file.getvalue().splitlines()
    assert first == "step 1/2  loss 0.2500  lr 1.0e+00  d·lr 2.0e-04  1.00 s/it  wait 0.50 s  1.0 GiB  eta 0 min 1 s"
    assert last.startswith("step 2/2")
    assert progress.summary() == [
        ("learning rate", "lr 1.0e+00  d·lr 2.0e-04"),
        ("speed", "2.00 s/it, of it 0.50 s waiting for data"),
    ]


def test_brackets_in_a_name_are_printed_as_they_are() -> None:
    console, file = _console()
    print_summary(console, [("a[bold]b", "out[1]/lo[/]ra.safetensors")])
    assert file.getvalue().split() == ["a[bold]b", "out[1]/lo[/]ra.safetensors"]
