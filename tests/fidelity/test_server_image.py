"""A server's pictures, painted by diffusers' own pipeline with a mistake in it: the mistake is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxFillPipeline
from PIL import Image, ImageDraw

import tools.precision_report as precision_report
from library.config.schema import ModelConfig
from library.console import Console
from library.errors import UserError
from library.fidelity.calibration import Calibration, CalibrationOptions
from library.fidelity.deployed import parse_deployment
from library.fidelity.server_image import ServerPicture, ServerResult, explain_server
from library.fidelity.serving import Models, Variant
from tests.runs import ROOT

FILL = ROOT / "assets" / "tiny-flux-fill"
QUIET = Console(quiet=True)
STEPS, SEED, T5_LENGTH = 4, 11, 32


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of the demo's images with masks."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "images").mkdir()
    (folder / "masks").mkdir()
    sources = sorted((ROOT / "assets" / "demo_dataset" / "images").glob("*.png"))[:2]
    for number, source in enumerate(sources):
        image = Image.open(source).convert("RGB").resize((128, 128))
        image.save(folder / "images" / f"{number}.png")
        (folder / "images" / f"{number}.txt").write_text(source.with_suffix(".txt").read_text())
        mask = Image.new("L", (128, 128))
        ImageDraw.Draw(mask).rectangle((33, 29, 90, 85), fill=255)
        mask.save(folder / "masks" / f"{number}.png")
    (folder / "dataset.toml").write_text(
        '[general]\ncaption_extension = ".txt"\n[[datasets]]\nresolution = 128\nbatch_size = 1\n'
        '[[datasets.subsets]]\nimage_dir = "images"\ninpaint_mask_directory = "masks"\n'
    )
    return folder


@pytest.fixture(scope="module")
def models() -> Models:
    config = ModelConfig(
        model_type="flux_fill", pretrained_model_name_or_path=str(FILL), t5xxl_max_token_length=T5_LENGTH
    )
    return Models(config, parse_deployment("cast"), {}, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def calibration(place: Path, models: Models) -> Calibration:
    options = CalibrationOptions(
        str(place / "dataset.toml"), 2, (0.5,), guidance_scale=1.0, cache_directory=str(place / "cache")
    )
    return models.plan(options).prepare(QUIET)


@pytest.fixture(scope="module")
def pipeline() -> FluxFillPipeline:
    made = FluxFillPipeline.from_pretrained(FILL, torch_dtype=torch.float32).to(torch.float32)
    made.set_progress_bar_config(disable=True)
    return made


def paint(pipeline: FluxFillPipeline, place: Path, number: int, suffix: str = "png", grown: int = 0) -> Path:
    """Paint one picture with diffusers, the mask grown by ``grown`` px; the encoder's mean, as ours."""
    mask = np.asarray(Image.open(place / "masks" / f"{number}.png"))
    rows, columns = np.nonzero(mask)
    served = np.zeros_like(mask)
    served[rows.min() - grown : rows.max() + grown + 1, columns.min() - grown : columns.max() + grown + 1] = 255
    image = Image.open(place / "images" / f"{number}.png")
    caption = (place / "images" / f"{number}.txt").read_text().strip()
    encode = pipeline.vae.encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.vae, "encode", lambda pixels: _mean_only(encode(pixels)))
        found = pipeline(
            caption, image=image, mask_image=Image.fromarray(served), height=128, width=128, guidance_scale=1.0,
            num_inference_steps=STEPS, max_sequence_length=T5_LENGTH, generator=torch.Generator().manual_seed(SEED),
        ).images[0]  # fmt: skip
    path = place / f"server{grown}" / f"{number}.{suffix}"
    path.parent.mkdir(exist_ok=True)
    found.save(path)
    return path


def _mean_only(encoded: object) -> object:
    encoded.latent_dist.sample = lambda generator=None: encoded.latent_dist.mode()  # type: ignore[attr-defined]
    return encoded


def explained(models: Models, calibration: Calibration, files: list[Path], seed: int = SEED) -> ServerResult:
    pictures = [ServerPicture(file, seed) for file in files]
    return explain_server(models, Variant(weights=True), calibration, pictures, STEPS, QUIET)


def test_a_grown_mask_is_named_from_pictures_alone(
    pipeline: FluxFillPipeline, place: Path, models: Models, calibration: Calibration
) -> None:
    files = [paint(pipeline, place, number, grown=8) for number in (0, 1)]
    found = explained(models, calibration, files)
    assert found.nearest.variant.changes()["mask_grow"] == 8
    assert "mask grown by 8 px" in found.sentence()
    assert found.nearest.explained > 0.98
    assert found.nearest.low > 0.9
    assert found.reference.distance > 3
    assert len(found.nearest.images) == 2


def test_an_honest_server_paints_what_the_reference_paints(
    pipeline: FluxFillPipeline, place: Path, models: Models, calibration: Calibration
) -> None:
    found = explained(models, calibration, [paint(pipeline, place, 0)])
    assert found.reference.distance == pytest.approx(1 / 12**0.5, rel=0.15)
    assert "the server paints what the reference paints" in found.sentence()


@pytest.mark.slow
def test_what_nothing_explains_is_called_unexplained(
    pipeline: FluxFillPipeline, place: Path, models: Models, calibration: Calibration
) -> None:
    found = explained(models, calibration, [paint(pipeline, place, 0)], seed=SEED + 1)
    assert "unexplained" in found.sentence()
    assert "Check seed" in found.sentence()
    assert found.unexplained > 0.5


@pytest.mark.slow
def test_a_jpeg_has_a_higher_floor_than_a_png(
    pipeline: FluxFillPipeline, place: Path, models: Models, calibration: Calibration
) -> None:
    found = explained(models, calibration, [paint(pipeline, place, 1, "jpg")])
    assert found.floor > 2 / 12**0.5
    assert found.reference.distance == pytest.approx(found.floor, rel=0.1)
    assert "the server paints what the reference paints" in found.sentence()


def test_a_picture_that_belongs_to_no_image_or_was_resized_is_refused(
    place: Path, models: Models, calibration: Calibration
) -> None:
    Image.new("RGB", (120, 128)).save(place / "0.png")
    Image.new("RGB", (128, 128)).save(place / "other.png")
    with pytest.raises(UserError, match="120 x 128 pixels, and the model paints multiples of 16"):
        explained(models, calibration, [place / "0.png"])
    with pytest.raises(UserError, match="the dataset has no image 'other'.*FILE=NAME"):
        explained(models, calibration, [place / "other.png"])


@pytest.mark.slow
def test_the_tool_takes_pictures_and_writes_what_it_found(
    pipeline: FluxFillPipeline, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = paint(pipeline, place, 0)
    words = ["--model", FILL, "--model_type", "flux_fill", "--deploy", "cast", "--guidance_scale", "1"]
    words += ["--dataset_config", place / "dataset.toml", "--cache_directory", place / "cache", "--images", "1"]
    words += ["--steps", "0", "--sigmas", "0.5", "--save_to", place / "report", "--server_steps", STEPS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tool", *map(str, words), "--server_image", f"{file}=0.png"])
        with pytest.raises(SystemExit):
            precision_report.main()
        assert "give --server_seed and --server_steps" in capsys.readouterr().err
        patch.setattr(
            sys, "argv", ["tool", *map(str, words), "--server_seed", str(SEED), "--server_image", f"{file}=0"]
        )
        precision_report.main()
    assert "1 server picture: " in capsys.readouterr().out
    found = json.loads((place / "report" / "report.json").read_text())["server"]
    assert found["descriptions"][0]["words"] == "the reference"
