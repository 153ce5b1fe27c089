"""A server's pictures, painted by diffusers' own pipeline with a mistake in it: the mistake is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from library.fidelity.server_habits import next_value
from library.fidelity.server_image import Description, ServerPicture, ServerResult, explain_server
from library.fidelity.server_verdict import advice, findings, headline, is_alarm, remedies, sentences
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


def test_two_habits_at_once_are_named_with_their_numbers_and_nothing_else(
    place: Path, models: Models, calibration: Calibration
) -> None:
    server = Server(grown=5, encoded=lambda x, filled: torch.where(filled, -1.0, x), lora=0.0, seed=SEED, tokens=TOKENS)
    found = explained(models, calibration, paint(server, place, place / "two")[:1])
    assert found.nearest.changes == {"blank": -1.0, "mask_grow": 5}
    assert found.nearest.low > 0.99
    assert found.state == "explained"
    assert sum(found.parts) == pytest.approx(found.nearest.explained)
    assert found.along > 1.5 * found.elsewhere  # the frame of 5 pixels and what the model paints beside it
    assert "blanked with black instead of grey and mask grown by 5 px explain 100%" in headline(found)
    first, second = remedies(found)
    assert "blank it with grey, as in training, or train again with inpaint_blank 'black'" in first.text
    assert "without growing it" in second.text
    assert not {"blank", "mask_grow", "shift"} - found.looked_at


def test_an_honest_server_paints_what_the_reference_paints(
    honest: list[Path], models: Models, calibration: Calibration
) -> None:
    found = explained(models, calibration, honest[:1])
    assert found.reference.distance == pytest.approx(1 / 12**0.5, rel=0.15)
    assert "the server paints what the reference paints" in headline(found)
    assert not found.descriptions  # nothing had to be tried
    assert not is_alarm(found)


@pytest.mark.slow
@pytest.mark.parametrize("pictures", [1, 2])
def test_what_nothing_explains_is_called_unexplained(
    honest: list[Path], models: Models, calibration: Calibration, pictures: int
) -> None:
    found = explained(models, calibration, honest[:pictures], seed=SEED + 10)
    assert "nothing that was tried explains it" in headline(found)
    assert "check seed" in advice(found).lower()
    assert [each.cause for each in findings(found)] == ["server"]
    assert len(found.descriptions) <= 100  # the limit that is said before
    assert is_alarm(found)


@pytest.mark.slow
@pytest.mark.parametrize("subsampling", [0, 2])
def test_what_a_jpeg_loses_is_no_difference(
    subsampling: int, honest: list[Path], models: Models, calibration: Calibration, tmp_path: Path
) -> None:
    Image.open(honest[1]).save(jpeg := tmp_path / f"{honest[1].stem}.jpg", quality=80, subsampling=subsampling)
    found = explained(models, calibration, [jpeg])
    assert found.reference.floor > 2 / 12**0.5
    assert found.reference.distance == pytest.approx(found.reference.floor, rel=0.1)
    assert "no more than saving as JPEG makes: the server paints what the reference paints" in headline(found)


def result(reference: float, *found: Description, **more: Any) -> ServerResult:
    first = Description(distance=reference)
    return ServerResult(("a.png",), 4, (), first, found, parts=(0.5,) * len(found[0].habits), **more)


def test_what_explains_too_little_or_as_much_as_another_is_said_so() -> None:
    grown = Description(({"mask_grow": 4},), 1.5, explained=0.98, low=0.97, high=0.99)
    snapped = Description(({"mask_snap": 8},), 1.6, explained=0.975)
    tie = result(10.0, grown, snapped, rivals=(snapped,))
    assert "explain it equally well: mask grown by 4 px, or mask snapped to latent cells" in headline(tie)
    assert [each.cause for each in findings(tie)] == ["server"]
    little = result(10.0, replace(grown, explained=0.93), rounding=1.0)
    assert "nothing that was tried explains it" in headline(little)
    assert "93%" in " ".join(sentences(little))
    assert replace(little, rounding=2.0).state == "explained"  # what is left is what bf16 makes
    assert not remedies(little)
    assert not is_alarm(result(0.9, grown))  # nobody sees it
    assert is_alarm(result(10.0, grown, declared=Variant(mask_grow=4, weights=True)))
    assert not is_alarm(result(10.0, replace(grown, habits=({"weights": True},)), declared=Variant(weights=True)))


@pytest.mark.parametrize("truth", [12, -3, 1, 40])
def test_a_number_between_or_beyond_those_tried_is_found(truth: int) -> None:
    tried = {value: abs(value - truth) ** 1.7 for value in (0, 4, 8, 16, -4)}  # not a parabola
    for _ in range(6):
        value = next_value("mask_grow", tried)
        if value is None:
            break
        tried[value] = abs(value - truth) ** 1.7
    assert min(tried, key=lambda value: tried[value]) == truth


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
    Image.open(honest[0]).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(file)  # as no server does
    words = ["--model", MODEL, "--model_type", "flux_fill", "--deploy", "cast", "--guidance_scale", "1"]
    words += ["--dataset_config", place / "masked" / "dataset.toml", "--cache_directory", place / "cache"]
    words += ["--images", "1", "--steps", "0", "--sigmas", "0.5", "--save_to", place / "report"]
    words += ["--server_steps", SERVER_STEPS]
    assert "give --server_seed and --server_steps" in refusal(
        precision_report, *words, "--server_image", f"{file}={name}"
    )
    words += ["--server_seed", SEED, "--server_image", f"{file}={name.removesuffix('.png')}"]
    said = printed(precision_report, *words)
    assert "1 server picture: at most 100 sampling runs" in said
    found = json.loads((place / "report" / "report.json").read_text())
    assert found["server"]["descriptions"][0]["words"] == "the reference"
    verdict = found["verdict"]
    assert verdict["words"][0].startswith("The server's picture is ")
    assert verdict["words"][0].endswith("nothing that was tried explains it.")
    assert (verdict["cause"], verdict["alarm"]) == ("server", True)
    assert verdict["findings"][0]["evidence"].startswith(verdict["words"][0])
    place = next(at for at, line in enumerate(verdict["words"]) if line.startswith("Not looked at"))
    said = " ".join(verdict["words"][place:])
    assert "--mask_grow" not in said
