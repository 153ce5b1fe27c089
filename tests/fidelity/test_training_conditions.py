"""The conditions of training, from a LoRA's file and the dataset, and what a server's program gives instead of them."""

from __future__ import annotations

import argparse
import io
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxFillPipeline
from diffusers.image_processor import VaeImageProcessor
from safetensors.torch import save_file

from library.config.model_types import BLANKS
from library.console import Console
from library.fidelity.calibration import Calibration
from library.fidelity.conditioning import as_program_gives, give
from library.fidelity.deployed import parse_deployment
from library.fidelity.deployed_parts import settle
from library.fidelity.runs import prepare_eval_set
from library.fidelity.servers import BY_NAME
from library.fidelity.serving import Models, Served, Variant
from networks.files.metadata import TrainedOn, trained_on
from tests.runs import write_dataset
from tests.tiny import T5_LENGTH, tiny_flux_pipeline
from tools.command import calibration_plan
from tools.precision_report import parser

OT = {"transformer": {"guidance_scale": 2.0}, "text_encoder_2_sequence_length": 77}  # of OneTrainer's TrainConfig


@pytest.mark.parametrize(
    ("metadata", "wanted"),
    [
        ({}, TrainedOn()),
        ({"tandem.inpaint_blank": "black grey", "ss_guidance_scale": "1.0"}, TrainedOn(("black", "grey"), 1.0)),
        ({"tandem.inpaint_blank": "pink", "ss_guidance_scale": "None"}, TrainedOn()),
        ({"tandem.settings": '{"t5xxl_max_token_length": 128}'}, TrainedOn(t5_tokens=128)),  # before the key below
        ({"tandem.t5xxl_max_token_length": "64", "tandem.guidance_scale": "30"}, TrainedOn((), 30.0, 64)),
        ({"tandem.settings": "5f6e", "ot_config": "[]", "ss_guidance_scale": "nan"}, TrainedOn()),
        ({"ot_revision": "23df3832", "ot_config": json.dumps(OT)}, TrainedOn(("grey",), 2.0, 77)),
        ({"tandem.t5xxl_max_token_length": "-3", "ot_config": '{"transformer": 3}'}, TrainedOn()),
    ],
)
def test_what_a_file_says_of_its_training(metadata: dict[str, str], wanted: TrainedOn) -> None:
    assert replace(trained_on(metadata), remarks=()) == wanted


@pytest.mark.parametrize(
    ("metadata", "remarks"),
    [
        ({"ss_guidance_scale": "1.0", "tandem.guidance_scale": "1"}, []),  # the same
        ({"ss_guidance_scale": "None"}, []),  # sd-scripts: not set
        (
            {"ss_guidance_scale": "5", "tandem.guidance_scale": "1"},
            ["ss_guidance_scale says 5, tandem.guidance_scale 1, which is taken"],
        ),
        ({"tandem.t5xxl_max_token_length": "many"}, ["tandem.t5xxl_max_token_length 'many': no number; left out"]),
        (
            {"tandem.inpaint_blank": "purple"},
            ["tandem.inpaint_blank 'purple': none of grey, black, white, noise; left out"],
        ),
    ],
)
def test_metadata_that_contradict_each_other_or_cannot_be_read_are_a_line_each(
    metadata: dict[str, str], remarks: list[str], folder: Path
) -> None:
    assert list(trained_on(metadata).remarks) == remarks
    _, _, printed = prepared(folder, metadata, "grey")
    assert all(f"note: lora.safetensors: {each}" in printed for each in remarks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    tiny_flux_pipeline(folder / "base", model_type="flux_fill")
    return folder


def prepared(
    folder: Path,
    metadata: dict[str, str] | None,
    dataset_blank: str | None,
    flags: tuple[str, ...] = (),
    server: str = "",
) -> tuple[Models, Calibration, str]:
    """Return models and calibration as the report makes them of a LoRA's metadata and a dataset, and what it prints."""
    keys: dict[str, Any] = {"inpaint_masks": '["rectangles"]'} | (
        {"inpaint_blank": f'"{dataset_blank}"'} if dataset_blank else {}
    )
    dataset = write_dataset(folder / "data", images=1, **keys)
    words = ["--model", str(folder / "base"), "--model_type", "flux_fill", "--dataset_config", str(dataset)]
    if metadata is not None:
        save_file({"x": torch.zeros(1)}, folder / "lora.safetensors", metadata)
        words += ["--lora", str(folder / "lora.safetensors")]
    options: argparse.Namespace = parser().parse_args([*words, "--deploy", "cast", *flags])
    plan = calibration_plan(options, options.model)
    printed = io.StringIO()
    models = Models(plan.config, parse_deployment("cast"), {}, torch.float32, torch.device("cpu"))
    models.server = BY_NAME[server or "diffusers"]
    return models, plan.prepare(Console(file=printed, soft_wrap=True)), printed.getvalue()


@pytest.mark.parametrize(
    ("recorded", "dataset"), list(itertools.product((None, "", *BLANKS), (None, "black", "noise")))
)
def test_the_loras_own_record_counts_and_then_the_datasets(
    recorded: str | None, dataset: str | None, folder: Path
) -> None:
    """Without a flag the programs' grey is a cause, unless it is what training had; a flag says what another gives."""
    metadata = None if recorded is None else {"tandem.inpaint_blank": recorded}
    models, calibration, printed = prepared(folder, metadata, dataset)
    trained = recorded or dataset or "grey"
    assert calibration.data.config.inpaint_blanks == (trained,)
    lines = [line for line in printed.splitlines() if line.startswith("note:")]
    doubtful = recorded is not None and recorded != (dataset or "grey")
    assert len(lines) == doubtful
    words = "is assumed" if not recorded and not dataset else "is taken"
    assert not doubtful or f"{trained} {words}" in lines[0]
    assert not doubtful or ("dataset.toml does not say" in lines[0] or "neither" in lines[0]) == (dataset is None)
    for server in BY_NAME.values():
        models.server = server
        found = as_program_gives(models, Variant(weights=True), calibration)
        assert found.changes() == {"weights": True} | ({} if trained == "grey" else {"blank": "grey"})
        assert trained == "grey" or models.words("blank", found.blank) == f"blank grey instead of {trained}"
        for flag in BLANKS:
            same = flag == trained != "noise"
            assert as_program_gives(models, Variant(blank=flag), calibration).blank == (None if same else flag)


def test_what_the_model_is_shown_is_what_diffusers_shows_it(folder: Path) -> None:
    models, calibration, _ = prepared(folder, {"tandem.inpaint_blank": "black"}, None)
    eval_set = prepare_eval_set(models, calibration, Variant(), 1)
    (pixels,) = eval_set.pixels
    served = as_program_gives(models, Variant(), calibration)
    region = pixels.mask.expand_as(pixels.image) == 1  # type: ignore[union-attr]
    assert (give(pixels, "fill", Variant()).shown[0][region] == -1).all()
    fitted_on = models.plan(calibration.plan.options).prepare(Console(quiet=True), textures=True)  # as fixes are
    assert fitted_on.data.config.inpaint_blanks == ("black",)
    pipeline = FluxFillPipeline.from_pretrained(folder / "base")
    assert isinstance(pipeline.mask_processor, VaeImageProcessor)
    image = pipeline.image_processor.preprocess((pixels.image[None] + 1) / 2)
    mask = pipeline.mask_processor.preprocess(pixels.mask[None])  # type: ignore[index]
    assert torch.allclose(give(pixels, "fill", served).shown[0], (image * (1 - mask))[0], atol=1e-6)


@pytest.mark.parametrize("server", list(BY_NAME))
def test_tokens_and_guidance_that_somebody_chose_are_conditions(server: str, folder: Path) -> None:
    """FLUX is trained at 1 and Fill sampled at 30: that is nobody's fault. Five is somebody's choice."""
    program = BY_NAME[server].gives
    for told, flags, run, served in (
        ("1", (), 30.0, None), ("30", (), 30.0, None), ("5", (), 5.0, 30.0),
        ("5", ("--guidance_scale", "1"), 1.0, None),
    ):  # fmt: skip
        models, calibration, printed = prepared(folder, {"ss_guidance_scale": told}, None, flags, server)
        assert calibration.plan.options.guidance_scale == run
        assert as_program_gives(models, Variant(), calibration).guidance == served
        assert ("trained at 5" in printed) == (told == "5" and run != 5)
    models, calibration, _ = prepared(folder, {"tandem.t5xxl_max_token_length": str(T5_LENGTH // 2)}, None, (), server)
    assert calibration.fit[0].text["prompt_embeds"].shape[1] == T5_LENGTH // 2
    found = as_program_gives(models, Variant(text=Served(dtype="fp16")), calibration)
    assert found == Variant(text=Served(dtype="fp16"), t5_tokens=program.t5_tokens)
    assert models.words("t5_tokens", 256) == f"T5 with 256 tokens of a caption instead of {T5_LENGTH // 2}"
    assert as_program_gives(models, Variant(t5_tokens=T5_LENGTH), calibration).t5_tokens == T5_LENGTH
    assert as_program_gives(models, Variant(t5_tokens=T5_LENGTH // 2), calibration) == Variant()  # as in training
    served = settle(models, Variant(t5_tokens=T5_LENGTH), calibration, 0)[0]
    assert served.t5_tokens == T5_LENGTH
    (text,) = models.texts(served, [calibration.sources[0].text])  # type: ignore[misc]
    assert len(text["prompt_embeds"]) == T5_LENGTH
    models, calibration, _ = prepared(folder, {}, None, (), server)
    assert settle(models, Variant(t5_tokens=T5_LENGTH), calibration, 0)[0] == Variant()  # the model's own number
