"""A server's pictures, painted by diffusers' own pipeline with a mistake in it: the mistake is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

import tools.precision_report as precision_report
from bench.tiny_runs import MODEL
from library.config.schema import ModelConfig
from library.console import Console
from library.errors import UserError
from library.fidelity.calibration import Calibration, CalibrationOptions
from library.fidelity.deployed import parse_deployment
from library.fidelity.server_image import ServerPicture, ServerResult, explain_server
from library.fidelity.serving import Models, Variant
from tests.fidelity.planted_faults import SERVER_STEPS, Server, paint, write_masked
from tests.runs import printed, refusal

QUIET = Console(quiet=True)
SEED, TOKENS = 11, 32


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of the demo's images with masks."""
    folder = tmp_path_factory.mktemp("server")
    write_masked(folder / "masked")
    return folder


@pytest.fixture(scope="module")
def honest(place: Path) -> list[Path]:
    """What diffusers paints of them without a mistake."""
    return paint(Server(lora=0.0, seed=SEED, tokens=TOKENS), place, place / "honest")


@pytest.fixture(scope="module")
def models() -> Models:
    names = {"model_type": "flux_fill", "pretrained_model_name_or_path": str(MODEL)}
    config = ModelConfig.model_validate(names | {"t5xxl_max_token_length": TOKENS})
    return Models(config, parse_deployment("cast"), {}, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def calibration(place: Path, models: Models) -> Calibration:
    dataset, cache = str(place / "masked" / "dataset.toml"), str(place / "cache")
    options = CalibrationOptions(dataset, 2, (0.5,), guidance_scale=1.0, cache_directory=cache)
    return models.plan(options).prepare(QUIET)


def explained(models: Models, calibration: Calibration, files: list[Path], seed: int = SEED) -> ServerResult:
    pictures = [ServerPicture(file, seed) for file in files]
    return explain_server(models, Variant(weights=True), calibration, pictures, SERVER_STEPS, QUIET)


def test_a_grown_mask_is_named_from_pictures_alone(place: Path, models: Models, calibration: Calibration) -> None:
    files = paint(Server(grown=8, lora=0.0, seed=SEED, tokens=TOKENS), place, place / "grown")
    found = explained(models, calibration, files)
    assert found.nearest.variant.changes()["mask_grow"] == 8
    assert "mask grown by 8 px" in found.sentence()
    assert found.nearest.explained > 0.98
    assert found.nearest.low > 0.9
    assert found.reference.distance > 3
    assert len(found.nearest.images) == 2


def test_an_honest_server_paints_what_the_reference_paints(
    honest: list[Path], models: Models, calibration: Calibration
) -> None:
    found = explained(models, calibration, honest[:1])
    assert found.reference.distance == pytest.approx(1 / 12**0.5, rel=0.15)
    assert "the server paints what the reference paints" in found.sentence()


@pytest.mark.slow
def test_what_nothing_explains_is_called_unexplained(
    honest: list[Path], models: Models, calibration: Calibration
) -> None:
    found = explained(models, calibration, honest[:1], seed=SEED + 1)
    assert "unexplained" in found.sentence()
    assert "Check seed" in found.sentence()
    assert found.unexplained > 0.5


@pytest.mark.slow
def test_a_jpeg_has_a_higher_floor_than_a_png(honest: list[Path], models: Models, calibration: Calibration) -> None:
    Image.open(honest[1]).save(jpeg := honest[1].with_suffix(".jpg"))
    found = explained(models, calibration, [jpeg])
    assert found.floor > 2 / 12**0.5
    assert found.reference.distance == pytest.approx(found.floor, rel=0.1)
    assert "the server paints what the reference paints" in found.sentence()


def test_a_picture_that_belongs_to_no_image_or_was_resized_is_refused(
    honest: list[Path], place: Path, models: Models, calibration: Calibration
) -> None:
    small = place / honest[0].name
    Image.new("RGB", (120, 128)).save(small)
    Image.new("RGB", (128, 128)).save(place / "other.png")
    with pytest.raises(UserError, match="120 x 128 pixels, and the model paints multiples of 16"):
        explained(models, calibration, [small])
    with pytest.raises(UserError, match="the dataset has no image 'other'.*FILE=NAME"):
        explained(models, calibration, [place / "other.png"])


@pytest.mark.slow
def test_the_tool_takes_pictures_and_writes_what_it_found(honest: list[Path], place: Path) -> None:
    file, name = place / "painted.png", honest[0].name
    shutil.copyfile(honest[0], file)
    words = ["--model", MODEL, "--model_type", "flux_fill", "--deploy", "cast", "--guidance_scale", "1"]
    words += ["--dataset_config", place / "masked" / "dataset.toml", "--cache_directory", place / "cache"]
    words += ["--images", "1", "--steps", "0", "--sigmas", "0.5", "--save_to", place / "report"]
    words += ["--server_steps", SERVER_STEPS]
    assert "give --server_seed and --server_steps" in refusal(
        precision_report, *words, "--server_image", f"{file}={name}"
    )
    words += ["--server_seed", SEED, "--server_image", f"{file}={name.removesuffix('.png')}"]
    assert "1 server picture: " in printed(precision_report, *words)
    found = json.loads((place / "report" / "report.json").read_text())["server"]
    assert found["descriptions"][0]["words"] == "the reference"
