"""Every command in the guides is run, in their order, in a folder that looks as they say it does.

The models are the tiny random ones in the published layouts; a few flags make the runs short.
"""

from __future__ import annotations

import random
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import toml
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from safetensors.torch import load_file, save_file

from library.config.schema import DatasetArguments
from library.data.config import load_dataset_config
from library.data.dataset import build_dataset, check_masks
from library.models.qwen_image.text import TEMPLATES
from library.training.memory import dry_run
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from tests.cuda.device import FakeDevice
from tests.curves import without_curves
from tests.targets import FLUX_TARGETS, Z_IMAGE_TARGETS
from tests.tiny import save_single_files, tiny_flux_pipeline
from tests.tiny_ernie_image import save_ernie_split_files, tiny_ernie_pipeline
from tests.tiny_flux2 import save_flux2_files, tiny_dev_pipeline, tiny_flux2_pipeline
from tests.tiny_flux3 import save_flux3_split_files, tiny_flux3_pipeline
from tests.tiny_krea2 import save_krea2_split_files, tiny_krea2_pipeline
from tests.tiny_qwen import save_split_files, tiny_qwen_pipeline
from tests.tiny_qwen_21 import save_21_split_files, tiny_21_pipeline
from tests.tiny_z_image import save_z_split_files, tiny_z_pipeline

ROOT = Path(__file__).resolve().parents[2]
# the pages train in one folder what is theirs, here with each other's files
SHORT = ["--max_train_steps", "2", "--max_data_loader_n_workers", "0", "--overwrite"]


DEEP_MODELS: dict[str, Callable[[Path], Path]] = {
    "flux_of_14": lambda folder: (
        save_single_files(tiny_flux_pipeline(folder, double_blocks=8, single_blocks=6), folder / "single").transformer
    ),
    "deep_flux": lambda folder: (
        save_single_files(tiny_flux_pipeline(folder, double_blocks=16, single_blocks=30), folder / "single").transformer
    ),
    "deep_qwen": lambda folder: save_split_files(tiny_qwen_pipeline(folder, blocks=42), folder / "single").transformer,
    "deep_flux2": lambda folder: (
        save_flux2_files(tiny_flux2_pipeline(folder, double_blocks=8, single_blocks=24), folder / "single").transformer
    ),
    "deep_krea2": lambda folder: (
        save_krea2_split_files(tiny_krea2_pipeline(folder, layers=19), folder / "single").transformer
    ),
}
# configs that swap more blocks than a tiny model has otherwise
DEEP = dict.fromkeys(("flux_lora_12gb", "flux_lora_8gb"), "deep_flux")
DEEP |= {"flux_lora_16gb": "flux_of_14", "krea2_lora_12gb": "deep_krea2"}
DEEP |= dict.fromkeys(("qwen_image_lora_24gb", "qwen_image_lora_12gb"), "deep_qwen")
DEEP |= {"flux2_klein_9b_lora_12gb": "deep_flux2"}
WHOLE = {"FLUX.1-dev", "FLUX.1-Fill-dev", "my_lora/config.toml"}  # of a folder that has its tokenizers
HUB = {"black-forest-labs/FLUX.2-klein-base-9B": "flux2"}  # name on the hub -> the folder that stands for it
DATASET = """
[general]
caption_extension = ".txt"
enable_bucket = true
[[datasets]]
resolution = 1024
validation_split = 0.1
  [[datasets.subsets]]
  image_dir = "my_images"
"""
CALIBRATED = ("tools/refit_lora.py", "tools/merge_lora.py", "tools/quantize_model.py")


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of a page in ``language`` ("" for those that name none), indented ones too."""
    text = (ROOT / page).read_text(encoding="utf-8")
    # all languages are matched, or the end of one block would be taken for the beginning of the next
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [body for named, body in found if named == language]


def commands(page: str) -> list[list[str]]:
    """Return the Python commands of a page, each as a list of words, comments left out."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = re.findall(r"^ *\.venv/bin/python +((?:tools/|train_lora).*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with models, configs, images and dataset.toml as the guides assume."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "models").mkdir()
    files = save_single_files(tiny_flux_pipeline(folder / "pipeline"), folder / "single")
    fill = save_single_files(tiny_flux_pipeline(folder / "fill", model_type="flux_fill"), folder / "single_fill")
    qwen = save_split_files(tiny_qwen_pipeline(folder / "qwen"), folder / "single_qwen")
    flux3 = save_flux3_split_files(tiny_flux3_pipeline(folder / "flux3"), folder / "single_flux3")
    qwen_21 = save_21_split_files(tiny_21_pipeline(folder / "qwen_21"), folder / "single_qwen_21")
    z_image = save_z_split_files(tiny_z_pipeline(folder / "z_image"), folder / "single_z_image")
    flux2 = save_flux2_files(tiny_flux2_pipeline(folder / "flux2"), folder / "single_flux2")
    dev = save_flux2_files(tiny_dev_pipeline(folder / "dev", double_blocks=8, single_blocks=48), folder / "single_dev")
    ernie = save_ernie_split_files(tiny_ernie_pipeline(folder / "ernie"), folder / "single_ernie")
    krea2 = save_krea2_split_files(tiny_krea2_pipeline(folder / "krea2"), folder / "single_krea2")
    for source, name in (
        (files.transformer, "flux1-dev.safetensors"),
        (files.transformer, "flux1-schnell.safetensors"),
        (files.transformer, "flux1-kontext-dev.safetensors"),
        (fill.transformer, "flux1-fill-dev.safetensors"),
        (files.ae, "ae.safetensors"),
        (files.clip_l, "clip_l.safetensors"),
        (files.t5xxl, "t5xxl_fp16.safetensors"),
        (qwen.transformer, "qwen_image_bf16.safetensors"),
        (qwen.transformer, "qwen_image_edit_bf16.safetensors"),
        (qwen.transformer, "qwen_image_edit_2509_bf16.safetensors"),
        (qwen.vae, "qwen_image_vae.safetensors"),
        (qwen.text_encoder, "qwen_2.5_vl_7b.safetensors"),
        *((file, file.name) for file in (qwen_21.transformer, qwen_21.vae, qwen_21.text_encoder)),
        (z_image.transformer, "z_image_bf16.safetensors"),
        (z_image.transformer, "z_image_turbo_bf16.safetensors"),
        (flux2.text_encoder, "qwen_3_4b.safetensors"),  # as wide as Z-Image's, and deeper
        (flux2.text_encoder, "qwen_3_8b.safetensors"),
        (flux2.transformer, "flux-2-klein-base-4b.safetensors"),
        (flux2.transformer, "flux-2-klein-base-9b.safetensors"),
        (flux2.vae, "flux2-vae.safetensors"),
        (dev.transformer, "flux2-dev.safetensors"),
        (dev.text_encoder, "mistral_3_small_flux2_bf16.safetensors"),
        (flux3.transformer, "flux-3-image-klein-base.safetensors"),
        (flux3.text_encoder, "qwen3vl_4b_bf16.safetensors"),
        (krea2.transformer, "krea2_raw_bf16.safetensors"),
        (ernie.transformer, "ernie-image.safetensors"),
        (ernie.text_encoder, "ministral-3-3b.safetensors"),
    ):
        shutil.copy(source, folder / "models" / name)
    up = {"layers.0.attention.to_q": LoraWeights(torch.ones(2, 64), torch.zeros(64, 2), 2.0)}
    save_adapter(folder / "models/zimage_turbo_training_adapter_v2.safetensors", up, Z_IMAGE_TARGETS)
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "my_images").mkdir()
    for i in range(10):
        pixels = random.Random(i).randbytes(10 * 8 * 3)  # no two images are nearly the same
        Image.frombytes("RGB", (10, 8), pixels).resize((80, 64)).save(folder / "my_images" / f"{i}.png")
        (folder / "my_images" / f"{i}.txt").write_text(f"colour {i}")
    shutil.copytree(folder / "my_images", folder / "my_controls")
    shutil.copytree(folder / "my_images", folder / "my_photos")
    text = DATASET
    (folder / "dataset.toml").write_text(_small(text))
    for example in (ROOT / "configs" / "datasets").glob("*.toml"):
        (folder / example.name).write_text(_small(example.read_text()))
    (folder / "tokenizers.txt").write_text(
        f"{files.clip_l_tokenizer}\n{files.t5xxl_tokenizer}\n{qwen.tokenizer}\n{dev.tokenizer}"
    )
    shutil.copy(folder / "dataset.toml", folder / "my_dataset.toml")
    shutil.copy(files.transformer, folder / "flux1-dev.safetensors")
    (folder / "FLUX.1-dev").symlink_to(folder / "pipeline")
    (folder / "FLUX.1-Fill-dev").symlink_to(folder / "fill")
    (folder / "fill.toml").write_text(_small(text) + '\ninpaint_blank = "black"\n')
    (folder / "assets").symlink_to(ROOT / "assets")
    return folder


def _small(dataset: str) -> str:
    """Return a dataset TOML for the tiny models' sizes."""
    dataset = dataset.replace("control_resolution = 1024", "control_resolution = 64")
    return dataset.replace("resolution = 1024", "resolution = 64", 1)


def _run(words: list[str], place: Path) -> None:
    """Run a script as Python runs it, but in this process, which has its imports behind it.

    Raises:
        AssertionError: it ended with an error.
    """
    script, *rest = words
    rest = [path for word in rest for path in (_matching(word, place) if "*" in word else [HUB.get(word, word)])]
    clip, t5, qwen, mistral = (place / "tokenizers.txt").read_text().splitlines()
    tokenizers = ["--clip_l_tokenizer", clip, "--t5xxl_tokenizer", t5]
    if any(name in word for word in rest for name in ("qwen", "z_image", "flux2", "flux3", "krea2")):
        tokenizers = ["--qwen_tokenizer", qwen]
    if any("flux2_dev" in word or "ernie_image" in word for word in rest):
        tokenizers = ["--mistral_tokenizer", mistral]
    if script == "train_lora.py":
        rank = [] if "--dim_from_weights" in rest else ["--network_dim", "2"]
        rest += ["--lr_warmup_steps", "1"] if "configs/demo.toml" in rest or "configs/demo_fp8.toml" in rest else []
        rest += [*SHORT, *rank, *([] if WHOLE & {*rest} else tokenizers)]
        if "my_lora/config.toml" in rest:  # in its first two steps nothing but the rest may be kept, and nothing learnt
            few = [*_few_pictures(place), "--sample_prompts", str(place / "general_prompts.txt")]
            rest += [*few, "--max_train_steps", "8"]
    if script == "tools/plan_memory.py":  # counts each block, and the same configuration trains with blocks swapped
        rest += ["--blocks_to_swap", "0"]
    for deep in {deep for config, deep in DEEP.items() if f"configs/{config}.toml" in rest and "train" in script}:
        if not (place / f"models/{deep}.safetensors").exists():
            shutil.copy(DEEP_MODELS[deep](place / deep), place / f"models/{deep}.safetensors")
        rest += ["--pretrained_model_name_or_path", f"models/{deep}.safetensors"]
    if script == "tools/precision_report.py":
        rest += ["--images", "1", "--sigmas", "0.5", "--steps", "2"]
    elif "--dataset_config" in rest and script in CALIBRATED:
        rest += ["--calibration_images", "1", "--calibration_sigmas", "0.5"]
    if script == "tools/generate.py":
        rest += tokenizers
        rest = ["64" if word == "1024" else "2" if word == "20" else word for word in rest]
    AcceleratorState._reset_state(reset_partial_state=True)  # it refuses a second run of other precision otherwise
    seen_small = {name: replace(template, area=64 * 64) for name, template in TEMPLATES.items()}
    argv = mock.patch.object(sys, "argv", [script, *rest])
    published = mock.patch.dict(TEMPLATES, seen_small)  # whose areas take a minute here
    with chdir(place), argv, without_curves(), published:
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as left:
            if left.code:
                raise AssertionError(f"{' '.join(words)}: left with {left.code}") from left


def _few_pictures(place: Path) -> list[str]:
    """Return the flags of a training with preservation that generates two pictures first instead of dozens."""
    flags = []
    for key, text in (("preserve_prompts", "a red circle"), ("general_prompts", "a house")):
        (place / f"{key}.txt").write_text(f"{text} --w 128 --h 128 --s 2\n")
        flags += [f"--{key}", str(place / f"{key}.txt")]
    return flags


def _matching(pattern: str, place: Path) -> list[str]:
    """Return what a shell makes of a pattern."""
    return sorted(str(path.relative_to(place)) for path in place.glob(pattern))


def _run_page(page: str, place: Path, count: int) -> None:
    wanted = commands(page)
    assert len(wanted) == count, "a command was added or is not found any more: see that this test prepares for it"
    for words in wanted:
        _run(words, place)


def _assert_written(place: Path, *paths: str) -> None:
    assert [path for path in paths if not (place / path).exists() or (place / path).stat().st_size == 0] == []


def test_every_command_of_start_runs_and_leaves_what_the_next_one_needs(place: Path) -> None:
    _run_page("docs/start.md", place, 3)
    _assert_written(
        place, "my_lora/config.toml", "my_lora/dataset.toml", "output/my_lora/my_lora.safetensors", "my.toml"
    )


def test_every_command_about_models_runs(place: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "device_processes", device.processes)
    _run_page("docs/choose.md", place, 3)
    _assert_written(place, "output/krea2_lora_12gb/krea2_lora_12gb.safetensors")


def test_every_command_about_training_runs(place: Path) -> None:
    (place / "output/flux_lora_16gb/lr.png").unlink(missing_ok=True)
    _run_page("docs/train.md", place, 2)
    _assert_written(place, "output/flux_lora_16gb/lr.png")


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """The folder after ``make demo`` and a first training."""
    demo = ["train_lora.py", "--config_file", "configs/demo.toml", "--no-sample_at_first", "--no-sample_at_end"]
    _run([*demo, *_few_pictures(place), "--cache_directory", str(place / "cache")], place)  # the page draws its curves
    _run(["train_lora.py", "--config_file", "configs/flux_lora.toml", "--dataset_config", "my_dataset.toml"], place)
    return place


def test_every_command_of_the_readme_is_one_of_starts() -> None:
    """Which runs them in the same folder, in the same order."""
    assert commands("README.md") == commands("docs/start.md")[:2]


def test_every_command_about_lora_formats_runs(trained: Path) -> None:
    weights = load_file(trained / "flux1-dev.safetensors")
    noise = torch.Generator().manual_seed(0)
    tuned = {name: t + 0.1 * torch.randn(t.shape, generator=noise) for name, t in weights.items()}
    save_file(tuned, trained / "finetune.safetensors")
    lora = trained / "output/flux_lora/flux_lora.safetensors"
    for copy in ("a", "b"):
        shutil.copy(lora, trained / f"{copy}.safetensors")
    _run_page("docs/lora_formats.md", trained, 6)
    written = ("comfy_lora", "merged", "lora", "small", "both")
    _assert_written(trained, *(f"{name}.safetensors" for name in written))


def test_every_command_about_precision_runs(place: Path) -> None:
    noise = torch.Generator().manual_seed(0)
    down, up = (torch.randn(shape, generator=noise) for shape in ((2, 64), (64, 2)))
    save_adapter(
        place / "style.safetensors", {"transformer_blocks.0.attn.to_q": LoraWeights(down, up, 2.0)}, FLUX_TARGETS
    )
    _run_page("docs/quantised_files.md", place, 5)
    _assert_written(place, "flux1-dev-fp8.safetensors", "FLUX.1-dev-fp8", "flux1-dev-musubi.safetensors")
    _run_page("docs/precision.md", place, 8)
    _assert_written(
        place,
        "door-fp8.safetensors",
        "report-after/report.html",
        "style-fp8.safetensors",
        "merged",
        "merged.safetensors",
        "FLUX.1-dev-compensated",
    )
    _assert_written(place, "report/report.html")
    _run_page("docs/serving.md", place, 2)
    _assert_written(place, "flux1-dev-int8.safetensors", "style-int8.safetensors")


def test_every_command_about_reliability_runs(
    trained: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "device_processes", device.processes)
    _run(commands("docs/reliability.md")[0], trained)
    _run_page("docs/reliability.md", trained, 2)  # the same command again goes on
    _assert_written(trained, "output/flux_lora/flux_lora.safetensors", "output/flux_lora/flux_lora-state/position.json")


def test_the_command_about_datasets_runs(place: Path) -> None:
    _run_page("docs/dataset.md", place, 1)


def test_every_command_about_kohyas_flags_runs(place: Path) -> None:
    settings = {
        "pretrained_model_name_or_path": "models/flux1-dev.safetensors",
        "ae": "models/ae.safetensors",
        "clip_l": "models/clip_l.safetensors",
        "t5xxl": "models/t5xxl_fp16.safetensors",
        "network_module": "networks.lora_flux",
        "lr_scheduler": "cosine",
        "dataset_config": "dataset.toml",
        "output_dir": "output/kohya",
        "output_name": "kohya",
    }
    (place / "kohya.toml").write_text(toml.dumps(settings) + "network_train_unet_only = true\n")
    _run_page("docs/kohya_flags.md", place, 2)
    _assert_written(place, "output/kohya/kohya.safetensors", "tandem.toml")


def test_every_dataset_toml_in_the_pages_is_valid(tmp_path: Path) -> None:
    tomls = [block for block in blocks("docs/dataset.md", "toml") if "[[datasets]]" in block]
    assert tomls
    for folder in ("photos", "drawings", "masks"):
        (tmp_path / folder).mkdir()
        for i in range(10):
            Image.new("RGB", (64, 64), (25 * i, 255, 0)).save(tmp_path / folder / f"{i}.png")
            (tmp_path / folder / f"{i}.txt").write_text("one, two, three")
    for text in tomls:
        (tmp_path / "dataset.toml").write_text(text.replace("/my/images", str(tmp_path / "photos")))
        arguments = DatasetArguments(dataset_config=str(tmp_path / "dataset.toml"))
        kinds = [kind for key, kind in (("inpaint_", "fill"), ("control_", "references")) if key in text]
        kind = kinds[0] if kinds else "none"
        data = build_dataset(load_dataset_config(arguments.dataset_config, arguments, kind), 0, 16, 8)  # type: ignore[arg-type]
        check_masks(data, "conditioning_data_dir" in text)
        assert len(data.train) > 0


# The guides' own commands run those of flux and qwen_image; of the others each family has one here in every test run.
CONFIGS = [
    path
    for path in sorted((ROOT / "configs").glob("*_lora*.toml"))
    if not re.fullmatch(r"flux_lora|(flux|qwen_image)_lora_\d+gb", path.stem)
]
SAMPLE = {"flux2_klein_4b_lora", "flux3_klein_edit_lora", "flux_fill_lora", "krea2_lora_12gb", "ernie_image_lora"}
SAMPLE |= {"qwen_image_21_edit_lora", "qwen_image_edit_plus_lora", "z_image_turbo_lora"}


@pytest.mark.parametrize(
    "config",
    [pytest.param(path, id=path.stem, marks=() if path.stem in SAMPLE else pytest.mark.slow) for path in CONFIGS],
)
def test_every_ready_config_trains(config: Path, place: Path) -> None:
    example = f"{config.stem.removesuffix('_lora')}.toml"  # of models that need more than images and captions
    dataset = example if (place / example).exists() else "dataset.toml"
    _run(["train_lora.py", "--config_file", f"configs/{config.name}", "--dataset_config", dataset], place)
    _assert_written(place, f"output/{config.stem}/{config.stem}.safetensors")
