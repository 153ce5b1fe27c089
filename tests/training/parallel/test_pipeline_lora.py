"""Pipelines for LoRAs: two processes with half of the blocks each, against one that has them all."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.layouts import SETTINGS as LAYOUT_SETTINGS
from tests.layouts import assert_goes_on_either_way, assert_same_metrics, chat_one, lines, train_one
from tests.runs import arguments, largest_difference, lora, run, write_dataset
from tests.tiny_flux2 import tiny_flux2_pipeline
from tests.tiny_krea2 import tiny_krea2_pipeline
from tests.tiny_qwen import tiny_qwen_pipeline
from tests.tiny_qwen_21 import tiny_21_pipeline
from tests.training.tasks.test_chat_lora_runs import adapter, place  # noqa: F401  # the fixture
from tests.training.tasks.test_chat_lora_runs import flags as chat_flags
from tests.training.tasks.test_chat_lora_runs import run as chat_run
from tests.training.test_nonfinite import BAD, spoilt
from tests.worker_group import run_in_group

# Gradients are sums over microbatches; 2.5e-5 was measured after three steps of another tiny model.
SAME_IN_FP32 = 1e-4
SETTINGS: dict[str, object] = LAYOUT_SETTINGS | {
    "gradient_accumulation_steps": 2,
    "optimizer_args": ["eps=1e-6"],  # AdamW's own 1e-8 is as small as rounding of these clipped gradients
    "network_args": ["img_mod_dim=2", "in_dims=[2,2,2,2,2]"],  # all stages compute the conditioning
}
# What one block has trains none in the first stage; Prodigy's step size follows from the whole LoRA.
FP8: dict[str, object] = {"max_train_steps": 2, "fp8_scaled": True, "optimizer_type": "Prodigy", "learning_rate": 1.0}
FP8 |= {"network_args": ["train_double_block_indices=none"], "ema_decay": 0.5}
QWEN: dict[str, object] = {"max_train_steps": 2, "model_type": "qwen_image", "timestep_sampling": "qwen_shift"}
QWEN |= {"optimizer_args": ["eps=1e-6"]}
FLUX2 = QWEN | {"model_type": "flux2_klein", "timestep_sampling": "flux2_shift", "network_args": ["single_mod_dim=2"]}
KREA2: dict[str, object] = {"max_train_steps": 2, "model_type": "krea2", "timestep_sampling": "krea2_shift"}
KREA2 |= {"optimizer_args": ["eps=1e-6"]}
QWEN_21 = QWEN | {"model_type": "qwen_image_21", "network_args": ["mod_dim=2"]}  # one stream
CHAT: dict[str, object] = {"max_train_steps": 3, "network_dropout": 0.0, "gradient_accumulation_steps": 2}
CHAT |= {"train_batch_size": 4, "packing": True, "max_length": 20, "sample_prompts": ["say 1"], "sample_tokens": 6}


def write_images(folder: Path, wide: tuple[int, ...] = (1, 4, 6), held_out: float = 0.25) -> Path:
    """Write a dataset of two sizes; batches of two and, where a size has an odd number of images, of one."""
    text = "batch_size = 2\nenable_bucket = true\nmin_bucket_reso = 32\nbucket_reso_steps = 16\n"
    dataset = write_dataset(folder, text=text + f"validation_split = {held_out}\nvalidation_seed = 1")
    for i in wide:
        with Image.open(folder / f"images/{i}.png") as image:
            image.resize((96, 48)).save(folder / f"images/{i}.png")
    return dataset


@pytest.fixture(scope="module")
def runs(base: Path, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The same runs on one process and on two stages."""
    folder = tmp_path_factory.mktemp("pipeline")
    images, qwen = write_images(folder / "images"), tiny_qwen_pipeline(folder / "qwen", blocks=3)
    prompts = folder / "prompts.txt"
    prompts.write_text("a red disc --w 64 --h 64 --s 2 --d 1\n")
    one, captions = SETTINGS | {"sample_prompts": prompts}, write_dataset(folder / "captions", 4, text="batch_size = 2")
    (captions.parent / "images/2.txt").write_text("a disc" + ", plain" * 9)  # batches are padded
    run(base, images, folder / "one", **one)
    run(base, captions, folder / "fp8_one", **FP8)
    run(qwen, captions, folder / "qwen_one", **QWEN)
    flux2 = tiny_flux2_pipeline(folder / "flux2", double_blocks=2, single_blocks=3)
    run(flux2, captions, folder / "flux2_one", **FLUX2)
    krea2 = tiny_krea2_pipeline(folder / "krea2", layers=3)
    run(krea2, captions, folder / "krea2_one", **KREA2)
    qwen_21 = tiny_21_pipeline(folder / "qwen_21", blocks=3)
    run(qwen_21, captions, folder / "qwen_21_one", **QWEN_21)
    chat_run(place, folder / "chat_one", "gpt2", **CHAT)
    two, state = one | {"pp": 2}, folder / "one/lora-step00000002-state"
    by_weights = {"pp": 2, "microbatches": 2, "pp_balance": "weights"}
    jobs = [
        ("two", train_one, (arguments(base, images, folder / "two", **two),)),
        ("there", train_one, (arguments(base, images, folder / "there", **two, resume=state),)),
        ("fp8_two", train_one, (arguments(base, captions, folder / "fp8_two", **FP8, **by_weights),)),
        ("qwen_two", train_one, (arguments(qwen, captions, folder / "qwen_two", **QWEN, pp=2),)),
        ("flux2_two", train_one, (arguments(flux2, captions, folder / "flux2_two", **FLUX2, pp=2),)),
        ("krea2_two", train_one, (arguments(krea2, captions, folder / "krea2_two", **KREA2, pp=2),)),
        ("qwen_21_two", train_one, (arguments(qwen_21, captions, folder / "qwen_21_two", **QWEN_21, pp=2),)),
        ("chat_two", chat_one, (chat_flags(place, folder / "chat_two", "gpt2", **CHAT, **by_weights),)),
        ("many", train_one, (arguments(base, images, folder / "many", **two, microbatches=3),)),
    ]
    said = run_in_group(jobs, folder)
    assert said.pop("many").startswith("microbatches: 3, but the dataset's batches have at most 2 images; set")
    assert said == dict.fromkeys(said, "")
    run(base, images, folder / "back", **one, resume=folder / "two/lora-step00000002-state")
    return folder


def test_two_stages_equal_one_process(runs: Path) -> None:
    one, two = lines(runs / "one"), lines(runs / "two")
    levels = sorted({key for line in one for key in line if "/sigma_" in key})
    assert len(levels) > 3
    assert_same_metrics(one, two, ("loss", "grad_norm", "sigma_mean", *levels), rel=1e-5)
    assert largest_difference(lora(runs / "two"), lora(runs / "one")) < SAME_IN_FP32


def test_samples_go_through_the_stages(runs: Path) -> None:
    names = sorted(path.name for path in (runs / "one/samples").iterdir())
    assert sorted(path.name for path in (runs / "two/samples").iterdir()) == names
    for name in (name for name in names if name.startswith("step")):
        one, two = (np.asarray(Image.open(runs / run / "samples" / name), dtype=int) for run in ("one", "two"))
        assert np.abs(one - two).max() <= 1  # rounding to eight bits


def test_a_run_goes_on_under_another_layout(runs: Path) -> None:
    assert_goes_on_either_way(runs, SAME_IN_FP32)


@pytest.mark.parametrize("kind", ["fp8", "qwen", "qwen_21", "flux2", "krea2"])
def test_other_bases_optimizers_and_families_too(kind: str, runs: Path) -> None:
    assert largest_difference(lora(runs / f"{kind}_two"), lora(runs / f"{kind}_one")) < SAME_IN_FP32
    one, two = (lines(runs / f"{kind}_{processes}") for processes in ("one", "two"))
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-5)


def test_a_language_models_lora_too(runs: Path) -> None:
    one, two = adapter(runs / "chat_one/lora"), adapter(runs / "chat_two/lora")
    assert largest_difference(two, one) < SAME_IN_FP32
    answer = "samples/step000003.txt"
    assert (runs / "chat_two" / answer).read_text() == (runs / "chat_one" / answer).read_text()
    one_line, two_line = (lines(runs / name)[0] for name in ("chat_one", "chat_two"))
    assert two_line["loss_tokens"] == one_line["loss_tokens"]


@pytest.mark.slow
def test_what_is_not_finite_is_found_whichever_stage_meets_it(base: Path, tmp_path: Path) -> None:
    clean = write_dataset(tmp_path / "clean", text="batch_size = 2")
    run(base, clean, tmp_path / "clean/out", max_train_steps=1)  # fills the caches
    data, large = spoilt(clean, tmp_path / "data", math.nan), spoilt(clean, tmp_path / "large", 1e30)
    left_out: dict[str, object] = {"on_nan": "skip", "max_train_steps": 5, "optimizer_args": ["eps=1e-6"]}
    run(base, data, tmp_path / "one", **left_out)
    jobs = [
        ("two", train_one, (arguments(base, data, tmp_path / "two", **left_out, pp=2),)),
        ("large", train_one, (arguments(base, large, tmp_path / "stopped", max_train_steps=5, pp=2),)),
    ]
    said = run_in_group(jobs, tmp_path)
    assert said["two"] == ""
    assert largest_difference(lora(tmp_path / "two"), lora(tmp_path / "one")) < SAME_IN_FP32
    assert BAD in said["large"]


@pytest.mark.slow
def test_two_pipelines_share_the_batches(base: Path, runs: Path, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", (1, 3, 4, 6), 0.0)  # an even number of batches, two to a step
    one = SETTINGS | {"sample_prompts": runs / "prompts.txt"}
    run(base, images, tmp_path / "one", **one)
    four = one | {"pp": 2, "dp": 2, "gradient_accumulation_steps": 1}
    jobs = [("four", train_one, (arguments(base, images, tmp_path / "four", **four),))]
    assert run_in_group(jobs, tmp_path, processes=4) == {"four": ""}
    assert largest_difference(lora(tmp_path / "four"), lora(tmp_path / "one")) < SAME_IN_FP32
    for expected, found in zip(lines(tmp_path / "one"), lines(tmp_path / "four"), strict=True):
        for key in ("loss", "grad_norm"):
            assert found.get(key) == (pytest.approx(expected[key], rel=1e-5) if key in expected else None), key
