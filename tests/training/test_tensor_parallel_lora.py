"""Tensor parallelism for LoRAs: two processes that have the layers together, against one that has them all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from library.config import load_config
from library.config.load import load_language_config
from tests.runs import arguments, largest_difference, lora, run, write_dataset
from tests.training.test_llm_lora_runs import adapter, place  # noqa: F401  # the fixture
from tests.training.test_llm_lora_runs import flags as chat_flags
from tests.training.test_llm_lora_runs import run as chat_run
from tests.worker_group import run_in_group
from train_lora import train, train_language_model

# Sums over processes are added in another order, and AdamW's first steps divide by numbers as small as rounding:
# shared/findings measured 2.5e-5 after three steps, the same layout under FSDP2 allows itself 2e-4.
SAME_IN_FP32 = 2e-4
SETTINGS: dict[str, object] = {
    "max_train_steps": 3,
    "gradient_accumulation_steps": 2,
    "gradient_checkpointing": True,
    "max_grad_norm": 0.01,  # clips
    "save_every_n_steps": 2,
    "save_state": True,
    "sample_every_n_steps": 2,
    "optimizer_args": ["eps=1e-6"],  # AdamW's own 1e-8 is as small as rounding of these clipped gradients
    # modulation layers are whole on every process, the others split
    "network_args": ["img_mod_dim=2", "txt_mod_dim=2", "single_mod_dim=2"],
}


def train_one(flags: list[str]) -> None:
    train(load_config(flags))


def chat_one(flags: list[str]) -> None:
    train_language_model(load_language_config(flags))


@pytest.fixture(scope="module")
def runs(base: Path, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The same runs on one process and on two that have the layers together."""
    folder = tmp_path_factory.mktemp("tensor")
    images = write_dataset(folder / "images", text="batch_size = 1\nvalidation_split = 0.25\nvalidation_seed = 1")
    prompts = folder / "prompts.txt"
    prompts.write_text("a red disc --w 64 --h 64 --s 2 --d 1\n")
    one = SETTINGS | {"sample_prompts": prompts}
    run(base, images, folder / "one", **one)
    two = one | {"tp": 2}
    jobs = [
        ("two", train_one, (arguments(base, images, folder / "two", **two),)),
    ]
    assert run_in_group(jobs, folder) == dict.fromkeys(("two",), "")
    return folder


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_that_have_the_layers_together_equal_one(runs: Path) -> None:
    one, two = lines(runs / "one"), lines(runs / "two")
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for expected, found in zip(one, two, strict=True):
        for key in ("loss", "val_loss", "grad_norm"):
            assert found.get(key) == (pytest.approx(expected[key], rel=1e-4) if key in expected else None), key
    print(largest_difference(lora(runs / "two"), lora(runs / "one")))
    assert largest_difference(lora(runs / "two"), lora(runs / "one")) < SAME_IN_FP32
    names = sorted(path.name for path in (runs / "one/samples").iterdir())
    assert sorted(path.name for path in (runs / "two/samples").iterdir()) == names
