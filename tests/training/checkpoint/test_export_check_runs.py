"""The check of the saved LoRA at the end of whole runs, and what happens when the disk lies."""

from __future__ import annotations

from pathlib import Path

import pytest

import library.training.tasks.lora as export
from library.errors import UserError
from tests.runs import run


@pytest.mark.parametrize(
    "settings",
    [
        {"save_precision": "bf16", "save_format": "kohya", "ema_decay": 0.9},
        {"text_encoder_lr": [1e-3], "save_format": "diffusers", "optimizer_type": "AdamWScheduleFree"},
        {"network_type": "lokr", "save_format": "comfy", "full_bf16": True, "mixed_precision": "bf16"},
    ],
    ids=["averaged, bf16", "text encoder, schedule-free", "lokr"],
)
def test_the_summary_says_that_the_file_is_what_was_trained(
    base: Path, dataset: Path, tmp_path: Path, settings: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    events = run(base, dataset, tmp_path, max_train_steps=2, **settings)
    told = " ".join(capsys.readouterr().out.split())
    assert f"LoRA file checked {len(events.task.network.modules)} layers, largest difference " in told
    assert ", read rightly by " in told
    assert "loads in layers read largest difference" in told


def test_a_file_that_is_not_what_was_trained_ends_the_run_with_an_error(
    base: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_file = export.check_file

    def after_a_flipped_bit(path: Path, *rest: object) -> object:
        content = bytearray(path.read_bytes())
        content[-2] ^= 0x20  # the exponent of the last tensor's last number
        path.write_bytes(content)
        return check_file(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(export, "check_file", after_a_flipped_bit)
    with pytest.raises(UserError, match="lora.safetensors"):
        run(base, dataset, tmp_path, max_train_steps=2)
    assert "loss" in capsys.readouterr().out  # the summary was printed all the same
