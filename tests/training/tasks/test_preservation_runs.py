"""Whole runs with ``preserve = "prior"``: what stays as it was, what is painted once, what is measured and written."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from library.errors import UserError
from tests.runs import (
    arguments,
    assert_same_metrics,
    largest_difference,
    lora,
    metrics,
    run,
    train_flags,
    write_dataset,
)
from tests.worker_group import run_in_group

PAINTED = "a ring, grey --s 2\na line, white --w 64 --h 32 --s 2 --d 7\n"
GENERAL = "a bow, brown --s 2\na cloud, grey --s 2\n"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """A dataset with a trigger word and prompt files, as settings of a run."""
    text = 'batch_size = 2\nvalidation_split = 0.25\nvalidation_seed = 1\ntrigger_word = "disc"'
    dataset = write_dataset(tmp_path / "data", text=text)
    for name, prompts in (("kept", PAINTED), ("general", GENERAL)):
        (tmp_path / f"{name}.txt").write_text(prompts)
    return {
        "dataset_config": dataset,
        "preserve": "prior",
        "preserve_prompts": tmp_path / "kept.txt",
        "general_prompts": tmp_path / "general.txt",
        "cache_directory": tmp_path / "cache",
        "sample_at_end": False,
    }


def painted(cache: Path) -> list[Path]:
    return sorted(cache.glob("painted/*/*.png"))


def measured(output: Path) -> dict[int, tuple[float, float]]:
    """Return by step what was learnt and what was changed elsewhere."""
    found = [line for line in metrics(output) if "val_loss" in line]
    return {line["step"]: (line["val_loss"], line["val_prior_loss"]) for line in found}


def test_the_velocity_on_prompts_without_the_trigger_stays_the_bases(
    base: Path, files: dict[str, Any], tmp_path: Path
) -> None:
    """Without the feature the answers elsewhere move about as far as with no preservation."""
    steps = {"max_train_steps": 40, "learning_rate": 4e-3, "validate_every_n_steps": 20}
    plain = files | {"preserve": "none", "preserve_prompts": None}
    run(base, output=tmp_path / "plain", dataset=plain.pop("dataset_config"), **plain, **steps)
    kept = files | {"preserve_class": "ring", "preserve_share": 0.6}
    run(base, output=tmp_path / "kept", dataset=kept.pop("dataset_config"), **kept, **steps)
    without, with_it = measured(tmp_path / "plain"), measured(tmp_path / "kept")
    assert without[0][1] == with_it[0][1] == 0.0
    assert with_it[40][1] < 0.5 * without[40][1]
    assert with_it[40][0] < with_it[0][0]  # and something was learnt


def test_images_are_painted_once_and_what_is_missing_again_bit_by_bit(
    base: Path, files: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = files.pop("dataset_config")
    run(base, dataset, tmp_path / "one", **files)
    images = painted(tmp_path / "cache")
    assert sorted(Image.open(path).size for path in images) == [(64, 32), (64, 64), (64, 64), (64, 64)]
    contents = {path: path.read_bytes() for path in images}
    assert all(
        Image.open(path).info["prompt"].startswith(path.with_suffix(".txt").read_text().strip()) for path in images
    )
    images[1].unlink()  # as if the run had been killed while it was painted
    times = {path: path.stat().st_mtime_ns for path in images if path.exists()}
    assert "painting" in capsys.readouterr().out
    run(base, dataset, tmp_path / "two", **files)
    assert {path: path.read_bytes() for path in painted(tmp_path / "cache")} == contents
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert largest_difference(lora(tmp_path / "one"), lora(tmp_path / "two")) == 0


def test_the_sheet_of_general_prompts_has_the_bases_image_beside_the_loras(
    base: Path, files: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = files.pop("dataset_config")
    run(base, dataset, tmp_path / "one", **files | {"sample_at_end": True}, learning_rate=0.05)
    before = [
        path
        for path in painted(tmp_path / "cache")
        if path.with_suffix(".txt").read_text() in GENERAL.replace(" --s 2", "")
    ]
    after = sorted((tmp_path / "one/samples/general").glob("step000004_*.png"))
    assert len(before) == len(after) == 2
    assert all(
        Image.open(one).tobytes() != Image.open(other).tobytes() for one, other in zip(before, after, strict=True)
    )
    sheet = Image.open(tmp_path / "one/samples/general/before_after.png")
    assert sheet.width > 2 * 256
    assert "general, before_after" in capsys.readouterr().out


def test_a_resumed_run_gives_the_same_lora(base: Path, files: dict[str, Any], tmp_path: Path) -> None:
    dataset = files.pop("dataset_config")
    often = {"save_every_n_steps": 3, "save_state": True, "max_train_steps": 6, "validate_every_n_steps": 3}
    kept = files | {"preserve_class": "ring", "preserve_blank": True}
    run(base, dataset, tmp_path / "one", **kept, **often)
    run(base, dataset, tmp_path / "two", **kept, **often, resume=tmp_path / "one/lora-step00000003-state")
    assert largest_difference(lora(tmp_path / "one"), lora(tmp_path / "two")) == 0
    assert measured(tmp_path / "one")[6] == measured(tmp_path / "two")[6]


def test_alone_preserve_paints_general_prompts_and_regularisation_images_need_none(
    base: Path, files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = tmp_path / "general.toml"
    short.write_text('preserve_prompts = ["a ring"]\ngeneral_prompts = ["a bow"]\n')
    monkeypatch.setattr("library.training.sampling.painting.GENERAL", short)
    dataset, cache = files["dataset_config"], tmp_path / "cache"
    alone = {"preserve": "prior", "cache_directory": cache, "sample_at_end": False, "max_train_steps": 1}
    events = run(base, dataset, tmp_path / "one", **alone)
    assert sorted(path.with_suffix(".txt").read_text() for path in painted(cache)) == ["a bow\n", "a ring\n"]
    assert {sample.caption for sample in events.task.data.train.samples if sample.settings.is_reg} == {"a ring"}
    events = run(base, dataset, tmp_path / "two", **alone, preserve_class="ring", general_prompts="none")
    assert not any(sample.settings.is_reg for sample in events.task.data.train.samples)
    assert events.task.data.general is None


def test_text_encoders_in_training_are_switched_off_too(base: Path, files: dict[str, Any], tmp_path: Path) -> None:
    dataset = files.pop("dataset_config")
    events = run(base, dataset, tmp_path / "one", **files, text_encoder_lr=[0.05], max_train_steps=6)
    task = events.task
    encoders = task.step.text_encoders.eval()
    plain = run(base, dataset, tmp_path / "two", **files, text_encoder_lr=[1e-9], max_train_steps=1)
    with torch.no_grad(), task.network.bypassed():
        bypassed = encoders(["a ring"])["pooled_prompt_embeds"]
    with torch.no_grad():
        trained, fresh = (
            each(["a ring"])["pooled_prompt_embeds"] for each in (encoders, plain.task.step.text_encoders.eval())
        )
    torch.testing.assert_close(bypassed, fresh, rtol=1e-5, atol=1e-5)
    assert (trained - fresh).abs().max() > 1e-3


LAYOUTS = [{}, {"shard": 2}, {"tp": 2, "gradient_accumulation_steps": 2}]
DEEPSPEED = pytest.mark.skipif(not find_spec("deepspeed"), reason="DeepSpeed is not installed (make test-zero)")


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUTS[0],
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS[1:]),
        *(pytest.param({"zero": stage, "network_dim": 1}, marks=(pytest.mark.slow, DEEPSPEED)) for stage in (2, 3)),
    ],
    ids=["ddp", "shard", "tp", "zero-2", "zero-3"],
)
def test_two_processes_equal_one(base: Path, files: dict[str, Any], tmp_path: Path, layout: dict[str, int]) -> None:
    """Where weights are gathered, a process without a sample that preserves must run the model with the others."""
    dataset = files.pop("dataset_config")
    dataset.write_text(dataset.read_text().replace("batch_size = 2", "batch_size = 1"))
    kept = files | {"preserve_class": "ring", "preserve_share": 0.4, "validate_every_n_steps": 2}
    steps = {"max_train_steps": 5, "learning_rate": 1e-3}
    one = {key: value for key, value in layout.items() if key == "network_dim"}
    run(base, dataset, tmp_path / "one", **kept, **steps, **one | {"gradient_accumulation_steps": 2})
    job = ("two", train_flags, (arguments(base, dataset, tmp_path / "two", **kept, **steps, **layout),))
    assert run_in_group([job], tmp_path) == {"two": ""}
    keys = ("loss", "val_loss", "val_prior_loss", "grad_norm")
    # AdamW's first steps have the gradient's sign: entries near zero may go either way (tests/training/parallel)
    assert_same_metrics(metrics(tmp_path / "one"), metrics(tmp_path / "two"), keys, rel=2e-3)


def test_prompts_that_are_trained_on_are_no_measure(
    base: Path, files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="general_prompts: 'a line, white' is one of preserve_prompts too"):
        run(base, files.pop("dataset_config"), tmp_path / "out", **files | {"general_prompts": "kept.txt"})
