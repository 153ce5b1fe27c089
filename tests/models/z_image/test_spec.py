"""Z-Image alone: what is refused. What it shares with others: the files of the folder above."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.claims import assert_refused
from tests.tiny_qwen import tiny_qwen_pipeline
from tests.tiny_z_image import save_z_split_files, tiny_z_pipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_z_pipeline(tmp_path_factory.mktemp("z") / "pipeline")


def test_other_models_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    files = save_z_split_files(folder, tmp_path / "files")
    qwen = tiny_qwen_pipeline(tmp_path / "qwen")
    omni = tmp_path / "omni.safetensors"
    save_file({**load_file(files.transformer), "siglip_pad_token": torch.ones(1, 64)}, omni)
    wanted = {
        "not ZImageTransformer2DModel; set model_type = .qwen_image": {"pretrained_model_name_or_path": str(qwen)},
        r"not Qwen3 \(no model.layers.0": {"text_encoder": str(files.vae)},
        "'qwen2_5_vl', not qwen3": {"text_encoder": str(qwen)},
        "Z-Image-Omni, not a model family": {"pretrained_model_name_or_path": str(omni)},
        "an image autoencoder.*, not Z-Image": {"pretrained_model_name_or_path": str(files.vae)},
    }
    assert_refused(files.model_config, wanted)
