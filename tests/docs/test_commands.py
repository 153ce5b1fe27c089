"""Every command in the guides is run, in their order, in a folder that looks as they say it does.

The models are the tiny random ones in the published layouts; a few flags make the runs short.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from library.config.schema import DatasetArguments
from library.data.dataset import build_dataset
from tests.processes import run_command
from tests.tiny import save_single_files, tiny_flux_pipeline

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["--max_train_steps", "2", "--lr_warmup_steps", "1", "--network_dim", "2", "--max_data_loader_n_workers", "0"]


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of a page in ``language`` ("" for those that name none), indented ones too."""
    text = (ROOT / page).read_text(encoding="utf-8")
    # all languages are matched, or the end of one block would be taken for the beginning of the next
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [body for named, body in found if named == language]


def commands(page: str) -> list[list[str]]:
    """Return the Python commands of a page, each as a list of words."""
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(".venv/bin/python")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with models, configs, images and dataset.toml as the guides assume."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "models").mkdir()
    tiny_flux_pipeline(folder / "pipeline", double_blocks=11, single_blocks=20)
    files = save_single_files(folder / "pipeline", folder / "single")
    for source, name in (
        (files.transformer, "flux1-dev.safetensors"),
        (files.transformer, "flux1-schnell.safetensors"),
        (files.ae, "ae.safetensors"),
        (files.clip_l, "clip_l.safetensors"),
        (files.t5xxl, "t5xxl_fp16.safetensors"),
    ):
        shutil.copy(source, folder / "models" / name)
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "my_images").mkdir()
    for i in range(10):
        Image.new("RGB", (80, 64), (25 * i, 99, 0)).save(folder / "my_images" / f"{i}.png")
        (folder / "my_images" / f"{i}.txt").write_text(f"colour {i}")
    (toml,) = blocks("docs/getting_started.md", "toml")
    (folder / "dataset.toml").write_text(
        toml.replace("resolution = 1024", "resolution = 64\nbucket_reso_steps = 16\nmin_bucket_reso = 32")
    )
    (folder / "tokenizers.txt").write_text(f"{files.clip_l_tokenizer}\n{files.t5xxl_tokenizer}")
    return folder


def _run(words: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    script, *rest = words[1:]
    clip, t5 = (place / "tokenizers.txt").read_text().splitlines()
    if script == "train_lora.py":
        rest += [*SHORT, "--clip_l_tokenizer", clip, "--t5xxl_tokenizer", t5]
    if script == "tools/generate.py":
        rest += ["--clip_l_tokenizer", clip, "--t5xxl_tokenizer", t5]
        rest = ["64" if word == "1024" else "2" if word == "20" else word for word in rest]
    return run_command([sys.executable, str(ROOT / script), *rest], place)


def test_every_command_of_getting_started_runs_and_leaves_what_the_next_one_needs(place: Path) -> None:
    wanted = commands("docs/getting_started.md")
    assert len(wanted) == 8
    for words in wanted:
        done = _run(words, place)
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    for path in (
        "output/flux_lora_24gb/flux_lora_24gb.safetensors",
        "output/flux_lora_16gb/lr.png",
        "output/flux_lora_12gb/metrics.jsonl",
        "models/flux1-dev-dog.safetensors",
        "my.toml",
    ):
        assert (place / path).stat().st_size > 0, path


@pytest.mark.parametrize("page", ["docs/dataset.md", "README.md"])
def test_every_dataset_toml_in_the_pages_is_valid(page: str, tmp_path: Path) -> None:
    tomls = [block for block in blocks(page, "toml") if "[[datasets]]" in block]
    assert tomls
    for folder in ("photos", "drawings", "masks"):
        (tmp_path / folder).mkdir()
        for i in range(10):
            Image.new("RGB", (64, 64), (25 * i, 0, 0)).save(tmp_path / folder / f"{i}.png")
            (tmp_path / folder / f"{i}.txt").write_text("one, two, three")
    for text in tomls:
        (tmp_path / "dataset.toml").write_text(text.replace("/my/images", str(tmp_path / "photos")))
        arguments = DatasetArguments(dataset_config=str(tmp_path / "dataset.toml"))
        kinds = [kind for key, kind in (("inpaint_", "fill"), ("control_", "references")) if key in text]
        masked = "conditioning_data_dir" in text
        data = build_dataset(arguments, 0, 16, 8, 1.0, masked, kinds[0] if kinds else "none")  # type: ignore[arg-type]
        assert len(data.train) > 0


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("flux*.toml")), ids=lambda path: path.stem)
def test_every_ready_config_trains(config: Path, place: Path) -> None:
    if config.stem in ("flux_lora_24gb", "flux_lora_16gb", "flux_lora_12gb"):
        pytest.skip("run by the guide's own commands")
    words = [".venv/bin/python", "train_lora.py", "--config_file", f"configs/{config.name}"]
    done = _run([*words, "--dataset_config", "dataset.toml"], place)
    assert done.returncode == 0, done.stderr[-2000:]
