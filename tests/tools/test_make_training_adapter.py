"""A training adapter is made of a distilled model alone, and is a LoRA like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tools.make_training_adapter as make_training_adapter
from library.training.sampling import painting
from networks.files.adapters import load_lora
from tests.runs import call, lora, refusal, run, same, write_dataset
from tests.targets import FLUX_TARGETS
from tests.tiny import tiny_flux_pipeline

SETTINGS = {"max_train_steps": 2, "network_dim": 2, "max_data_loader_n_workers": 0, "learning_rate": 1e-2}


def flags(turbo: Path, output: Path, **more: object) -> list[object]:
    prompts = turbo.parent / "prompts.txt"
    prompts.write_text("a ring --w 32 --h 32\na line --w 64 --h 32\n")
    values = SETTINGS | {"pretrained_model_name_or_path": turbo, "output_dir": output, "prompts": prompts} | more
    return [word for key, value in values.items() for word in (f"--{key}", value)]


def test_an_interrupted_run_goes_on_and_a_lora_is_trained_on_the_model_with_the_adapter_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turbo, output = tiny_flux_pipeline(tmp_path / "turbo"), tmp_path / "adapter"
    words = flags(turbo, output, images=5, distilled_steps=2)
    save, saved = painting.save_image, list[Path]()

    def stop_at_the_third(image: Any, path: Path, facts: Any) -> None:
        if len(saved) == 2:
            raise OSError("the disk is full")
        saved.append(path)
        save(image, path, facts)

    with monkeypatch.context() as patch:
        patch.setattr(painting, "save_image", stop_at_the_third)
        with pytest.raises((OSError, SystemExit)):
            call(make_training_adapter, *words)
    times = [path.stat().st_mtime_ns for path in saved]
    call(make_training_adapter, *words)
    images = sorted((output / "images").rglob("*.png"))
    assert len(images) == 5
    assert len({path.read_bytes() for path in images}) == 5  # the same prompt again has another seed
    assert [path.stat().st_mtime_ns for path in saved] == times
    listed = flags(turbo, output, images=6, distilled_steps=2, max_train_steps=3)
    (tmp_path / "prompts.txt").write_text("a ring --w 32 --h 32\na dot --w 32 --h 32\n")
    call(make_training_adapter, *listed)
    assert len(sorted((output / "images").rglob("*.png"))) == 5 + 3  # the rings of before, dots, and none is lost
    captions = [json.loads(line)["caption"] for line in (output / "images/images.jsonl").read_text().splitlines()]
    assert captions == ["a ring", "a dot"] * 3
    assert [path.stat().st_mtime_ns for path in saved] == times
    adapter = output / "training_adapter.safetensors"
    assert load_lora(adapter, FLUX_TARGETS).weights
    dataset = write_dataset(tmp_path / "data", images=2)
    loras = {}
    for name, more in (("with", {"base_weights": adapter}), ("without", {})):
        run(turbo, dataset, tmp_path / name, max_train_steps=1, **more)
        loras[name] = lora(tmp_path / name)
    assert not same(loras["with"], loras["without"])


def test_a_model_that_nothing_calls_distilled_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    base, output = tiny_flux_pipeline(tmp_path / "base"), tmp_path / "adapter"
    line = refusal(make_training_adapter, *flags(base, output))
    assert "--distilled_steps" in line
    assert "base" in line
    assert not output.exists()


@pytest.mark.parametrize(("key", "value"), [("dataset_config", "mine.toml"), ("resolution", 96)])
def test_what_images_the_adapter_is_trained_on_follows_from_the_model_alone(
    tmp_path: Path, key: str, value: object
) -> None:
    turbo = tiny_flux_pipeline(tmp_path / "turbo")
    line = refusal(make_training_adapter, *flags(turbo, tmp_path, **{key: value}))
    assert f"{key}: " in line
    assert "remove it" in line


def test_a_prompt_with_other_steps_than_the_flag_is_refused(tmp_path: Path) -> None:
    turbo = tiny_flux_pipeline(tmp_path / "turbo")
    words = flags(turbo, tmp_path / "adapter", distilled_steps=2)
    (tmp_path / "prompts.txt").write_text("a ring\na line --s 20\n")
    assert "--distilled_steps 2: 'a line' has --s 20; remove one" in refusal(make_training_adapter, *words)
