"""The kind of a model follows from its files and names: tiny models in the published formats, the table's rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from library.config.kinds import kind_of, model_type_of
from library.config.load import load_config
from library.config.model_types import IMAGE_MODELS, MODEL_TYPES
from library.config.published_models import MODEL, published_models
from library.errors import UserError
from library.files import read_json
from tests.models.test_image_families import CASES
from tests.runs import ROOT
from tests.tiny import save_single_files

Folders = dict[str, Path]  # the first model_type of an architecture -> its tiny pipeline


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    found = {name: case.folder(tmp_path_factory.mktemp(name) / "model") for name, case in CASES.items()}
    return {"flux": ROOT / "assets/tiny-flux", **found}


def first_of(name: str) -> str:
    return next(one for one in IMAGE_MODELS if MODEL_TYPES[one].title == MODEL_TYPES[name].title)


def as_variant(folders: Folders, name: str, to: Path) -> Path:
    """Write the settings of a pipeline that is of the variant ``name``, as its publishers have them."""
    source, row = folders[first_of(name)], MODEL_TYPES[name]
    (to / "transformer").mkdir(parents=True)
    settings = read_json(source / "transformer/config.json") | {"guidance_embeds": row.takes_guidance}
    settings |= {"in_channels": 384} if row.conditioning == "fill" else {}
    (to / "transformer/config.json").write_text(json.dumps(settings))
    (to / "model_index.json").write_text(json.dumps({"_class_name": row.pipeline}))
    return to


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_a_folder_is_of_the_variant_that_its_publisher_wrote(folders: Folders, name: str, tmp_path: Path) -> None:
    """With the dataset for it; every variant with other headers or another pipeline is refused when it is set."""
    folder, dataset = as_variant(folders, name, tmp_path / "m"), tmp_path / "dataset.toml"
    edits = MODEL_TYPES[name].conditioning == "references"
    dataset.write_text('[[datasets.subsets]]\ncontrol_directory = "x"\n' if edits else "[general]\n")
    for path in (folder, folder / "transformer"):
        found, lines = model_type_of({MODEL: str(path), "dataset_config": str(dataset)})
        assert found == name
        assert f"trained as {name}" in lines[0]
    for other in IMAGE_MODELS:
        row, own = MODEL_TYPES[other], MODEL_TYPES[name]
        agrees = (row.pipeline == own.pipeline) or {other, name} == {"flux", "flux_kontext"}
        if agrees and name != "flux_kontext":
            assert model_type_of({MODEL: str(folder), "model_type": other})[0] == other
        elif not agrees:
            with pytest.raises(UserError, match=rf"is {own.title} .*, not {other}; set model_type = "):
                model_type_of({MODEL: str(folder), "model_type": other})


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("name", CASES)
def test_a_single_file_is_of_its_architecture(folders: Folders, name: str, prefix: str, tmp_path: Path) -> None:
    file = CASES[name].files(folders[name], tmp_path / "files", prefix).transformer
    kind = kind_of(str(file))
    assert kind.likely[0] == name
    assert {MODEL_TYPES[one].title for one in kind.possible} == {MODEL_TYPES[name].title}


def test_a_file_of_flux_is_told_by_its_shapes_and_its_name(tmp_path: Path) -> None:
    for folder, name in (("tiny-flux", "flux"), ("tiny-flux-fill", "flux_fill")):
        files = save_single_files(ROOT / "assets" / folder, tmp_path / folder)
        assert [kind_of(str(path)).likely[0] for path in (files.transformer, files.comfy_transformer)] == [name, name]
    kontext = (tmp_path / "tiny-flux/flux1.safetensors").rename(tmp_path / "my_kontext_v2.safetensors")
    assert kind_of(str(kontext)).likely == ("flux_kontext",)


def test_what_is_no_model_is_named_with_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\x08" + bytes(7) + b"{}      ")
    (tmp_path / "empty").mkdir()
    parts = save_single_files(ROOT / "assets/tiny-flux", tmp_path / "parts")
    save_file({"lycoris_double_blocks_0_img_attn_qkv.lokr_w1": torch.zeros(2, 2)}, tmp_path / "lokr.safetensors")
    save_file({"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(2, 2)}, tmp_path / "xl.safetensors")
    for path, words in (
        (tmp_path / "x.safetensors", ".*a damaged one; download or convert"),
        (tmp_path / "empty", "nothing tells what kind of model .* give one of FLUX.1, .*or set model_type"),
        (tmp_path / "lokr.safetensors", ".*: a LoRA, not a base model"),
        (tmp_path / "xl.safetensors", ".*: a Stable Diffusion or SDXL checkpoint; give a transformer of one of FLUX.1"),
        (parts.ae, ".*: an image autoencoder, .*; give a transformer of one of FLUX.1"),
        (parts.t5xxl, ".*: a T5 encoder; give a transformer of one of"),
        (tmp_path, r".*: a folder, no diffusers pipeline; give one of its files \(lokr.safetensors, "),
    ):
        with pytest.raises(UserError, match=words):
            model_type_of({MODEL: str(path)})
        with pytest.raises(UserError, match=f"^--{MODEL}: {words}"):
            load_config([f"--{MODEL}", str(path), "--dataset_config", "d.toml"])


@pytest.mark.parametrize("row", published_models(), ids=lambda row: row.name)
def test_a_distilled_model_names_what_to_train_and_where_the_lora_is_used(row: Any) -> None:
    values = {MODEL: row.hub.upper()}
    if row.has_own_layers:
        with pytest.raises(UserError, match=f"cannot be trained; train {row.train_on}$"):
            model_type_of(values)
        return
    found, lines = model_type_of(values)
    assert found == row.model_types[0]
    assert len(lines) == 1 + bool(row.train_on)
    if row.train_on:
        assert f"train {row.train_on} and use the LoRA on {row.name}" in lines[1]
        assert ('base_weights = ["ostris/zimage_turbo_training_adapter"], which is downloaded' in lines[1]) == bool(
            row.adapter
        )
        assert len(model_type_of(values | {"base_weights": ["a.safetensors"]})[1]) == 1
        taught = values | {"distill_from": row.train_on}  # by its base, whose answers are those of many steps
        assert "undoes; set distill_effect = true" in model_type_of(taught)[1][1]
        for more in ({"distill_effect": True}, {"distill_from": row.hub}):
            assert len(model_type_of(taught | more)[1]) == 1


@pytest.mark.parametrize("row", [row for row in published_models() if not row.has_own_layers], ids=lambda row: row.name)
def test_a_model_that_edits_too_is_set_so_for_a_dataset_with_control_images(row: Any, tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text('[[datasets.subsets]]\ncontrol_directory = "x"\n')
    given, *editing = row.model_types
    values = {MODEL: row.hub, "model_type": given, "dataset_config": str(tmp_path / "d.toml")}
    told = [line for line in model_type_of(values)[1] if line.startswith(f"{given} takes no control images")]
    assert [line.partition("; ")[2] for line in told] == [f'set model_type = "{name}"' for name in editing]


def test_an_index_on_the_hub_is_asked_for_a_name_that_the_table_lacks() -> None:
    for name in IMAGE_MODELS:
        found = kind_of("somebody/tuned", lambda asked, name=name: {"_class_name": MODEL_TYPES[name].pipeline})
        assert MODEL_TYPES[found.likely[0]].pipeline == MODEL_TYPES[name].pipeline
    assert kind_of("black-forest-labs/FLUX.1-dev", lambda asked: pytest.fail("it is in the table")).likely == ("flux",)


def test_kinds_are_told_without_torch() -> None:
    code = "import sys; from library.config.kinds import *; print(kind_of(sys.argv[1]).likely, 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, str(ROOT / "assets/tiny-flux-fill")]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout == "('flux_fill',) False\n"
    )


def test_a_file_that_is_no_model_and_a_name_that_is_not_true_are_told(tmp_path: Path) -> None:
    lora, page = tmp_path / "z_image_style.safetensors", tmp_path / "model.safetensors"
    save_file({"diffusion_model.layers.0.attention.qkv.lora_A.weight": torch.zeros(4, 8)}, lora)
    for content in (b"", b"<!DOCTYPE html><html>", lora.read_bytes()[:50]):
        page.write_bytes(content)
        with pytest.raises(UserError, match=r"not a safetensors or GGUF file, or a damaged one; download"):
            model_type_of({MODEL: str(page)})
    lora = lora.rename(tmp_path / "style.safetensors")
    with pytest.raises(UserError, match=r"a LoRA, not a base model; give it as network_weights"):
        model_type_of({MODEL: str(lora)})
    (tmp_path / "Z-Image-Turbo").symlink_to(ROOT / "assets/tiny-flux")
    assert model_type_of({MODEL: str(tmp_path / "Z-Image-Turbo")}) == (
        "flux",
        ["trained as flux; set model_type for flux_kontext"],
    )
