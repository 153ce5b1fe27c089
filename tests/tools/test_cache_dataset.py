"""A dataset cached ahead leaves training nothing to encode."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from library.config import load_config
from library.models.flux.text import FluxTextEncoder
from library.models.flux.vae import FluxImageEncoder
from tests.forked import run_code
from tests.runs import ROOT, arguments, run, write_base, write_dataset
from tests.tiny import tiny_flux_pipeline
from tests.worker_group import run_in_group
from tools.cache_dataset import cache_dataset


def test_training_after_it_encodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_flux_pipeline(tmp_path / "base")
    dataset = write_dataset(tmp_path, images=2, flip_aug=True)
    (tmp_path / "prompts.txt").write_text("a prompt --w 32 --h 32 --s 1")
    settings = {"sample_prompts": tmp_path / "prompts.txt", "max_train_steps": 1}
    cache_dataset(load_config(arguments(base, dataset, tmp_path / "unused", **settings)))
    assert not (tmp_path / "unused").exists()
    cache = tmp_path / "images" / ".tandem_cache"
    files = sorted(cache.rglob("*.safetensors"))
    assert len(files) == 2 * 2 + 2 + 1  # latents of both orientations, captions, the prompt

    def encode(*_: object) -> None:
        raise AssertionError("everything is cached")

    monkeypatch.setattr(FluxImageEncoder, "encode", encode)
    monkeypatch.setattr(FluxTextEncoder, "encode", encode)
    run(base, dataset, tmp_path / "run", **settings)
    assert sorted(cache.rglob("*.safetensors")) == files
    assert len(list((tmp_path / "run" / "samples").glob("*.png"))) == 1


def test_training_generates_nothing_again_and_the_images_are_a_regularisation_subset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, dataset = write_base(tmp_path / "base"), write_dataset(tmp_path / "data", images=4)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a ring, grey --s 2\na line --w 32 --h 64 --s 2\n")
    settings = {"preserve": "prior", "preserve_prompts": prompts, "general_prompts": "none", "max_train_steps": 4}
    cache_dataset(load_config(arguments(base, dataset, tmp_path / "unused", **settings)))
    folder = Path(capsys.readouterr().out.rpartition("captions: ")[2].strip())
    images = sorted(folder.glob("*.png"))
    times = [image.stat().st_mtime_ns for image in images]
    painted = {path.with_suffix(".txt").read_text(): Image.open(path).size for path in images}
    assert painted == {"a ring, grey\n": (64, 64), "a line\n": (32, 64)}
    run(base, dataset, tmp_path / "run", **settings)
    assert [image.stat().st_mtime_ns for image in images] == times
    assert "painting" not in capsys.readouterr().out

    dataset.write_text(dataset.read_text() + f'[[datasets.subsets]]\nimage_dir = "{folder}"\nis_reg = true\n')
    events = run(base, dataset, tmp_path / "other", preserve="prior", general_prompts="none", max_train_steps=4)
    assert "a ring, grey" in [s.caption for s in events.task.data.train.samples if s.settings.is_reg]


def test_ctrl_c_is_answered_before_what_runs_is_waited_for() -> None:
    code = (
        "import os, signal, sys, time\n"
        "from tools import cache_dataset as tool\n"
        "def work(config):\n"
        "    try: os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n"
        "    finally: print('threads end', file=sys.stderr)\n"
        "tool.cache_dataset = work\n"
        "sys.argv = ['x', '--pretrained_model_name_or_path', 'assets/tiny-flux', '--dataset_config', 'd']\n"
        "tool.main()\n"
    )
    done = run_code(code, [], ROOT)
    assert done.stderr == "interrupted: what is cached is kept, and the same command goes on from it\nthreads end\n"
    assert done.returncode == 130


def _cache(flags: list[str]) -> None:
    cache_dataset(load_config(flags))


def test_the_main_process_writes_captions_and_the_others_read_them(tmp_path: Path) -> None:
    base, dataset = tiny_flux_pipeline(tmp_path / "base"), write_dataset(tmp_path, images=3)
    for number in (0, 2):
        (tmp_path / "images" / f"{number}.txt").unlink()
    log = tmp_path / "log"
    command = f"sh -c 'echo \"$1\" >> {log}; echo a drawn disc' sh {{image}}"
    flags = arguments(base, dataset, tmp_path / "unused", caption_command=command, trigger_word="zorbo")
    assert run_in_group([("captions", _cache, (flags,))], tmp_path) == {"captions": ""}
    assert sorted(log.read_text().split()) == [str(tmp_path / "images" / f"{number}.png") for number in (0, 2)]
    assert (tmp_path / "images" / "0.txt").read_text() == "a drawn disc\n"
    text = tmp_path / "images" / ".tandem_cache" / "text"
    assert len(list(text.rglob("*.safetensors"))) == 2  # "zorbo, a drawn disc" and that of image 1
