"""``base_weights``, as training on what merge_lora writes; ``sample_model``, as generate.py on the other model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from PIL.ImageChops import difference
from safetensors.torch import save_file

import tools.generate as generate
import tools.merge_lora as merge_lora
from library.errors import NotRestoredError, UserError
from library.training.sampling.sample_model import SampleModel
from tests.runs import call, largest_difference, lora, metadata, run, write_base, write_dataset
from tests.tiny_z_image import tiny_z_pipeline
from tests.training.tasks.test_quantised_runs import linked, with_transformer

STRONG = {"learning_rate": 0.05, "max_train_steps": 3}  # an update that fp8's rounding does not swallow


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """A base, a dataset, and two LoRAs on other layers and of other ranks."""
    folder = tmp_path_factory.mktemp("base_weights")
    base, dataset = write_base(folder / "base"), write_dataset(folder / "data", images=4)
    first = {"network_dim": 4, "network_alpha": 2, "seed": 1}
    second = {"network_dim": 2, "save_format": "kohya", "network_args": ["exclude_patterns=.*attn.*"], "seed": 2}
    for name, settings in (("first", first), ("second", second)):
        run(base, dataset, folder / name, **STRONG | settings)
    return base, dataset, [str(folder / name / "lora.safetensors") for name in ("first", "second")]


def merged(model: Path, loras: list[str], target: Path) -> Path:
    call(merge_lora, "--model", model, "--save_to", target, *loras)
    return target


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (None, {}),
        (None, {"fp8_scaled": True, "fp8_granularity": "row"}),
        (None, {"fp8_base": True}),
        ("comfy_scaled", {}),
        ("plain", {}),
    ],
    ids=["fp32", "fp8_scaled", "fp8_base", "fp8 file with scales", "fp8 file without"],
)
def test_it_is_the_base_that_merge_lora_writes(
    case: tuple[Path, Path, list[str]], tmp_path: Path, layout: str | None, settings: dict[str, object]
) -> None:
    base, dataset, (first, second) = case
    if layout is not None:
        base = with_transformer(base, tmp_path / "fp8", layout)
    run(base, dataset, tmp_path / "own", base_weights=[first, second], base_weights_multiplier=[0.5], **settings)
    words = ["--lora", f"{first}:0.5", f"{second}:1", *(["--accept_loss"] if layout else [])]
    whole = linked(base, tmp_path / "whole", merged(base / "transformer", words, tmp_path / "merged"))
    run(whole, dataset, tmp_path / "written", **settings)
    assert largest_difference(lora(tmp_path / "own"), lora(tmp_path / "written")) == 0
    run(base, dataset, tmp_path / "without", **settings)
    assert largest_difference(lora(tmp_path / "own"), lora(tmp_path / "without")) > 1e-3


def test_the_file_says_what_it_was_trained_on_and_a_state_goes_on_with_nothing_else(
    case: tuple[Path, Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, dataset, (first, second) = case
    asked = {"base_weights": [first], "base_weights_multiplier": [0.5], "save_every_n_steps": 2, "save_state": True}
    run(base, dataset, tmp_path / "out", **asked)
    assert json.loads(metadata(tmp_path / "out")["tandem.base_weights"]) == [{"lora": "lora.safetensors", "ratio": 0.5}]
    assert f"base: {first} merged at 0.5" in capsys.readouterr().out

    state = next((tmp_path / "out").glob("lora-step*-state"))
    run(base, dataset, tmp_path / "resumed", **asked, resume=state)
    assert largest_difference(lora(tmp_path / "resumed"), lora(tmp_path / "out")) == 0
    for other in ({"base_weights": []}, {"base_weights_multiplier": [0.6]}, {"base_weights": [second]}):
        with pytest.raises(UserError, match="base_weights"):
            run(base, dataset, tmp_path / "other", **asked | other, resume=state)

    run(base, dataset, tmp_path / "on", network_weights=tmp_path / "out/lora.safetensors")
    assert "trained on a base with LoRAs merged into it" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("damage", ["gone", "a text file", "of another model"])
def test_what_is_no_lora_of_this_model_is_refused_by_name(
    case: tuple[Path, Path, list[str]], tmp_path: Path, damage: str
) -> None:
    base, dataset, (first, _) = case
    path = tmp_path / "a.safetensors"
    if damage == "a text file":
        path.write_text("a LoRA")
    elif damage == "of another model":
        names = [f"transformer_blocks.77.attn.to_q.lora_{x}.weight" for x in "AB"]
        shapes = [(4, 32), (32, 4)]
        tensors = {f"transformer.{name}": torch.ones(shape) for name, shape in zip(names, shapes, strict=True)}
        save_file(tensors, path)
    with pytest.raises(UserError, match="a.safetensors|transformer_blocks.77"):
        run(base, dataset, tmp_path / "out", base_weights=[first, path])


PROMPT = "a red disc --w 64 --h 64 --d 5 --s 3"
Z_IMAGE: dict[str, object] = {"model_type": "z_image", "learning_rate": 0.02, "max_train_steps": 3}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base and another model of its architecture."""
    folder = tmp_path_factory.mktemp("models")
    return tiny_z_pipeline(folder / "base", seed=0, layers=4), tiny_z_pipeline(folder / "turbo", seed=7, layers=4)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data"), images=2)


def picture(model: Path, text_from: Path, file: Path | None, folder: Path, *more: str) -> Image.Image:
    """Generate the prompt's picture with ``model`` beside the text encoder of ``text_from``."""
    words: list[object] = ["image", "--model", model, "--model_type", "z_image", *(["--lora", file] if file else [])]
    words += ["--text_encoder", text_from, "--vae", text_from, "--prompt", PROMPT, "--save_to", folder]
    call(generate, *words, *more)
    (path,) = folder.glob("*.png")
    return Image.open(path).convert("RGB")


@pytest.mark.parametrize(
    "settings",
    [{}, {"blocks_to_swap": 2}, {"fp8_scaled": True}, {"network_type": "dora"}],
    ids=["plain", "swapped blocks", "quantised", "DoRA"],
)
def test_samples_are_the_other_models_and_training_is_unchanged(
    models: tuple[Path, Path], dataset: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    base, turbo = models
    (tmp_path / "prompts.txt").write_text(PROMPT)
    asked = Z_IMAGE | settings | {"sample_prompts": tmp_path / "prompts.txt", "sample_every_n_steps": 1}
    run(base, dataset, tmp_path / "with", **asked, sample_model=turbo)
    run(base, dataset, tmp_path / "without", **asked)
    assert largest_difference(lora(tmp_path / "with"), lora(tmp_path / "without")) == 0

    file = tmp_path / "with/lora.safetensors"
    if "network_type" in settings:  # no LoRA to generate with: merged it is
        words = ["--lora", str(file), "--model_type", "z_image"]
        turbo = linked(turbo, tmp_path / "whole", merged(turbo / "transformer", words, tmp_path / "merged"))
        expected = picture(turbo, base, None, tmp_path / "generated")
    else:
        precision = ["--fp8_scaled"] if "fp8_scaled" in settings else []
        expected = picture(turbo, base, file, tmp_path / "generated", *precision)
    shown = Image.open(tmp_path / "with/samples/step000003_00.png").convert("RGB")
    # the file holds the LoRA in bf16: at most a level or two of 255
    assert max(high for _, high in difference(shown, expected).getextrema()) <= 3
    others = Image.open(tmp_path / "without/samples/step000003_00.png").convert("RGB")
    assert max(high for _, high in difference(shown, others).getextrema()) > 20, "the models differ"


def test_a_training_adapter_is_left_out_of_samples_and_named_where_it_is_another_models(
    models: tuple[Path, Path], dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, turbo = models
    run(turbo, dataset, tmp_path / "adapter", **Z_IMAGE | {"learning_rate": 0.2})
    adapter = tmp_path / "adapter/lora.safetensors"
    (tmp_path / "prompts.txt").write_text(PROMPT)
    asked = Z_IMAGE | {"sample_prompts": tmp_path / "prompts.txt", "base_weights": [adapter], "sample_model": turbo}
    run(turbo, dataset, tmp_path / "out", **asked)
    expected = picture(turbo, turbo, tmp_path / "out/lora.safetensors", tmp_path / "generated")
    shown = Image.open(tmp_path / "out/samples/step000003_00.png").convert("RGB")
    assert max(high for _, high in difference(shown, expected).getextrema()) <= 3
    assert "trained on base" not in capsys.readouterr().out
    run(base, dataset, tmp_path / "other", **Z_IMAGE | {"base_weights": [adapter]})
    assert re.search(r"adapter/lora.safetensors: trained on base \w+ \(turbo\), this one is", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("layers", "settings", "message"),
    [
        (3, {}, r"sample_model: .* not of one architecture \(one has layers\.3\..*; give a Z-Image model"),
        (4, {"init_lora_weights": "pissa"}, "sample_model.*pissa has changed; remove one of them"),
    ],
    ids=["another size", "PiSSA"],
)
def test_what_cannot_take_the_place_is_refused_before_anything_is_loaded(
    models: tuple[Path, Path], dataset: Path, tmp_path: Path, layers: int, settings: dict[str, object], message: str
) -> None:
    (tmp_path / "prompts.txt").write_text(PROMPT)
    other = tiny_z_pipeline(tmp_path / "other", layers=layers)
    asked = Z_IMAGE | settings | {"sample_prompts": tmp_path / "prompts.txt", "sample_model": other}
    with pytest.raises(UserError, match=message):
        run(models[0], dataset, tmp_path / "out", **asked)
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_failed_exchange_back_ends_the_run_with_the_last_good_step(
    models: tuple[Path, Path], dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Samples are optional, what is trained is not: a run must not go on with the other model's weights.

    A DoRA's file follows from the base too: nothing more of it is saved.
    """
    base, turbo = models
    (tmp_path / "prompts.txt").write_text(PROMPT)
    settings = Z_IMAGE | {"network_type": kind}
    run(base, dataset, tmp_path / "whole", **settings, save_every_n_steps=1)
    write, calls = SampleModel._write, list[int]()

    def fail(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 4:  # there and back at step 1, there at step 2
            raise torch.OutOfMemoryError("CUDA out of memory")
        write(*arguments)

    monkeypatch.setattr(SampleModel, "_write", fail)
    asked = settings | {"sample_prompts": tmp_path / "prompts.txt", "sample_every_n_steps": 1, "sample_model": turbo}
    with pytest.raises(NotRestoredError, match="could not be taken back .*CUDA out of memory"):
        run(base, dataset, tmp_path / "out", **asked)
    assert len(calls) == 4
    name = "lora-step00000002"
    if kind == "dora":
        assert not list((tmp_path / "out").glob("*.safetensors"))
    else:
        assert largest_difference(lora(tmp_path / "out", name), lora(tmp_path / "whole", name)) == 0
