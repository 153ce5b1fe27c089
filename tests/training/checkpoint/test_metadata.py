"""The ``ss_*`` metadata against values worked out by hand from sd-scripts' own definitions."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from PIL import Image

from library.config.schema import DatasetArguments
from library.data.config import load_dataset_config
from library.data.dataset import TrainingData, build_dataset
from library.training.checkpoint.metadata import (
    dataset_facts,
    model_file_facts,
    most_frequent,
    save_facts,
    sha256_of,
    without_folders,
)
from library.training.checkpoint.state import Position
from tests.runs import metadata, run, write_dataset

TOML = """
[general]
caption_extension = ".txt"
[[datasets]]
resolution = 64
batch_size = 2
enable_bucket = true
bucket_reso_steps = 16
min_bucket_reso = 32
max_bucket_reso = 128
  [[datasets.subsets]]
  image_dir = "{folder}/cats"
  num_repeats = 2
  class_tokens = "Thing"
  flip_aug = true
  keep_tokens = 1
  [[datasets.subsets]]
  image_dir = "{folder}/plain"
  is_reg = true
"""


def _pictures(folder: Path, sizes: list[tuple[int, int]], captions: list[str | None]) -> None:
    folder.mkdir()
    for i, (size, caption) in enumerate(zip(sizes, captions, strict=True)):
        Image.new("RGB", size).save(folder / f"{i}.png")
        if caption is not None:
            (folder / f"{i}.txt").write_text(caption)


def _data(folder: Path, toml: str) -> TrainingData:
    (folder / "dataset.toml").write_text(toml.format(folder=folder))
    arguments = DatasetArguments(dataset_config=str(folder / "dataset.toml"))
    return build_dataset(load_dataset_config(arguments.dataset_config, arguments), 0, 16, 8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    folder = tmp_path_factory.mktemp("facts")
    _pictures(folder / "cats", [(96, 64), (64, 64), (128, 128)], ["Cat, dog", "cat,  , bird,CAT", None])
    _pictures(folder / "plain", [(64, 64)] * 8, ["dog"] * 8)
    return _data(folder, TOML)


def test_a_dataset_is_described_as_sd_scripts_describes_it(data: TrainingData) -> None:
    facts = dataset_facts(data, batches_at_once=3)
    tags = {"cats": {"cat": 3, "dog": 1, "bird": 1, "thing": 1}, "plain": {"dog": 8}}
    # 3 cats twice; 8 regularisation images are listed and 6 are used, as many as there are cats
    # 96x64 goes to 80x48, nearest in aspect: an error of 5/3 - 3/2 in the mean over 3 + 6 images
    buckets = {
        "buckets": {"0": {"resolution": [64, 64], "count": 10}, "1": {"resolution": [80, 48], "count": 2}},
        "mean_img_ar_error": pytest.approx((5 / 3 - 3 / 2) / 9),
    }
    common = {
        "num_repeats": 1,
        "color_aug": False,
        "flip_aug": False,
        "random_crop": False,
        "shuffle_caption": False,
        "keep_tokens": 0,
        "keep_tokens_separator": None,
        "secondary_separator": None,
        "enable_wildcard": False,
        "caption_prefix": None,
        "caption_suffix": None,
        "resize_interpolation": None,
        "class_tokens": None,
    }
    cats = {"img_count": 3, "num_repeats": 2, "flip_aug": True, "keep_tokens": 1, "class_tokens": "Thing"}
    assert json.loads(str(facts["datasets"])) == [
        {
            "is_dreambooth": True,
            "batch_size_per_device": 2,
            "num_train_images": 6,
            "num_reg_images": 8,
            "resolution": [64, 64],
            "enable_bucket": True,
            "min_bucket_reso": 32,
            "max_bucket_reso": 128,
            "tag_frequency": tags,
            "bucket_info": buckets,
            "resize_interpolation": None,
            "subsets": [
                common | cats | {"image_dir": "cats", "is_reg": False},
                common | {"img_count": 8, "image_dir": "plain", "is_reg": True},
            ],
        }
    ]
    assert json.loads(str(facts["tag_frequency"])) == tags
    assert json.loads(str(facts["dataset_dirs"])) == {"cats": {"n_repeats": 2, "img_count": 3}}
    assert json.loads(str(facts["reg_dataset_dirs"])) == {"plain": {"n_repeats": 1, "img_count": 8}}
    assert json.loads(str(facts["bucket_info"])) == buckets
    expected = {
        "num_train_images": 6,
        "num_reg_images": 8,
        "num_validation_images": 0,
        "batch_size_per_device": 2,
        "total_batch_size": 6,
        "resolution": (64, 64),
        "enable_bucket": True,
        "min_bucket_reso": 32,
        "max_bucket_reso": 128,
        "shuffle_caption": False,
        "caption_dropout_rate": 0.0,
    }
    assert {key: facts[key] for key in expected} == expected
    assert "flip_aug" not in facts  # the two subsets differ


def test_several_datasets_are_told_apart_and_share_no_single_values(tmp_path: Path) -> None:
    _pictures(tmp_path / "cats", [(64, 64)], ["cat"])
    one = '[[datasets]]\nresolution = 64\ncaption_extension = ".txt"\n'
    one += '  [[datasets.subsets]]\n  image_dir = "{folder}/cats"\n'
    facts = dataset_facts(_data(tmp_path, one + one.replace("64", "32")), 1)
    assert [d["resolution"] for d in json.loads(str(facts["datasets"]))] == [[64, 64], [32, 32]]
    assert [d["bucket_info"] for d in json.loads(str(facts["datasets"]))] == [None, None]
    folder = {"n_repeats": 1, "img_count": 1}
    assert json.loads(str(facts["dataset_dirs"])) == {"cats": folder, "cats (2)": folder}
    assert json.loads(str(facts["tag_frequency"])) == {"cats": {"cat": 1}}
    assert "resolution" not in facts


def test_rare_tags_are_left_out_where_there_are_too_many() -> None:
    frequency = {"a": {f"sentence {i}": 1 for i in range(100_000)} | {"common": 9}, "b": {"é" * 50: 2}}
    kept = most_frequent(frequency, 10_000)
    assert 9_900 < len(json.dumps(kept)) <= 10_000
    assert kept["a"]["common"] == 9
    assert kept["b"] == frequency["b"]
    assert most_frequent({"a": {"x": 1, "y": 2}}, 100) == {"a": {"x": 1, "y": 2}}


def test_a_file_is_hashed_once_until_it_changes(tmp_path: Path) -> None:
    file, memory = tmp_path / "model.safetensors", tmp_path / "cache" / "hashes.json"
    content = bytes(range(256)) * 5000  # 1.28 MB, so that the old hash sees bytes
    file.write_bytes(content)
    facts = model_file_facts("sd_model", str(file), memory)
    digest = hashlib.sha256(content).hexdigest()
    assert facts == {
        "sd_model_name": "model.safetensors",
        "sd_model_hash": hashlib.sha256(content[1 << 20 : (1 << 20) + (1 << 16)]).hexdigest()[:8],
        "new_sd_model_hash": digest,
    }
    times, written = (file.stat().st_atime_ns, file.stat().st_mtime_ns), memory.stat().st_mtime_ns
    assert sha256_of(file, memory) == digest
    assert memory.stat().st_mtime_ns == written, "it was remembered"
    file.write_bytes(bytes(len(content)))
    os.utime(file, ns=times)  # as long and as old as before
    assert sha256_of(file, memory) == hashlib.sha256(bytes(len(content))).hexdigest()
    assert model_file_facts("vae", str(tmp_path), memory) == {"vae_name": tmp_path.name}
    assert model_file_facts("vae", None, memory) == {}


def test_epochs_are_counted_as_sd_scripts_counts_them() -> None:
    """There a step's file has the epochs done, an epoch's file too, the last file all that were begun."""
    assert save_facts(Position(step=3, epoch=0, batches=3), 10, 0.0)["epoch"] == 0
    assert save_facts(Position(step=5, epoch=1, batches=0), 10, 0.0)["epoch"] == 1
    assert save_facts(Position(step=10, epoch=2, batches=0), 10, 0.0)["epoch"] == 2
    assert save_facts(Position(step=10, epoch=1, batches=2), 10, 0.0)["epoch"] == 2


def test_no_folder_of_this_machine_is_published() -> None:
    sections = {
        "model": {"ae": "models/ae.safetensors", "anything": "/home/me/x.bin", "windows": r"C:\me\x.bin"},
        "hub": {"huggingface_repo_id": "me/lora", "steps": 3, "home": "~/x"},
        "sampling": {"sample_prompts": [r"black/white --ci /home/me/x y.png --CI=C:\me\z.png --w 64 --mi m/n.png"]},
        "file": {"sample_prompts": "mine/prompts.txt"},
    }
    assert without_folders(sections) == {
        "model": {"ae": "ae.safetensors", "anything": "x.bin", "windows": "x.bin"},
        "hub": {"huggingface_repo_id": "me/lora", "steps": 3, "home": "x"},
        "sampling": {"sample_prompts": ["black/white --ci x y.png --CI=z.png --w 64 --mi n.png"]},
        "file": {"sample_prompts": "prompts.txt"},
    }


def test_a_runs_file_carries_every_key_and_no_folder(base: Path, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data", images=5, text="batch_size = 2\nvalidation_split = 0.2")
    settings = {"network_args": ["single_dim = 2"], "optimizer_args": ["eps=1e-7"], "save_every_n_steps": 2}
    settings |= {"trigger_word": "zorbo", "caption_command": "describe --key s3cret {image}"}
    # 4 images in batches of 2, two batches a step: 1 step an epoch, so 3 steps are 3 epochs
    run(base, dataset, tmp_path / "out", max_train_steps=3, gradient_accumulation_steps=2, **settings)
    found = metadata(tmp_path / "out")
    expected = {
        "ss_num_train_images": "4",
        "ss_num_validation_images": "1",
        "ss_num_batches_per_epoch": "2",
        "ss_num_epochs": "3",
        "ss_epoch": "3",
        "ss_steps": "3",
        "ss_max_train_steps": "3",
        "ss_total_batch_size": "4",
        "ss_resolution": "(64, 64)",
        "ss_optimizer": "torch.optim.adamw.AdamW(eps=1e-07)",
        "ss_network_args": '{"single_dim": "2"}',
        "ss_unet_lr": "0.001",
        "ss_text_encoder_lr": "None",
        "ss_cache_latents": "True",
        "ss_model_type": "flux",
        "ss_model_prediction_type": "raw",
        "ss_v2": "False",
        "ss_sd_model_name": base.name,
        "modelspec.trigger_phrase": "zorbo",
    }
    assert {key: found.get(key) for key in expected} == expected
    assert "s3cret" not in json.dumps(found)
    assert 0 <= int(found["ss_session_id"]) < 2**32
    assert str(tmp_path) not in json.dumps(found)
    assert str(base.parent) not in json.dumps(found)
    documented = (Path(__file__).resolve().parents[3] / "docs/lora_formats.md").read_text(encoding="utf-8")
    assert [key for key in found if key.startswith("ss_") and f"`{key.removeprefix('ss_')}`" not in documented] == []
    earlier = metadata(tmp_path / "out/lora-step00000002.safetensors")
    assert earlier["ss_session_id"] == found["ss_session_id"]
