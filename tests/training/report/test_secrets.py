"""Tokens of the environment and of other trainers' configurations reach nothing that a run leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from library.config import load_config
from library.config.kohya.translate import summary
from library.config.kohya.translation import Note
from tests.runs import arguments, run, write_base, write_dataset

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
    config.write_text(f'pretrained_model_name_or_path = "m"\ndataset_config = "d"\n{key} = "{TOKEN}"\n')
    for argv in (["--config_file", str(config)], [*arguments(tmp_path, tmp_path, tmp_path), f"--{key}", TOKEN]):
        notes: list[Note] = []
        loaded = load_config(argv, notes)
        (said,) = [line for line in summary(notes) if key in line]
        assert "secrets do not belong in a configuration" in said
        assert TOKEN not in "".join(summary(notes)) + loaded.model_dump_json()
