"""FLUX.3 klein with reference images: samples against diffusers' modular pipeline on pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from library.conditions import Conditions
from library.config.schema import ModelConfig
from library.models.family import SampleSettings
from library.models.family_by_name import model_family
from tests.models.claims import assert_same_picture
from tests.tiny_flux3 import flux3_reference, tiny_flux3_pipeline


@pytest.mark.parametrize(("flow_map", "cfg"), [(False, 1.0), (False, 3.0), (True, 1.0)], ids=["plain", "cfg", "jumps"])
@pytest.mark.parametrize("sizes", [[(96, 64)], [(64, 48), (32, 80)]], ids=["one reference", "two"])
def test_a_sample_is_what_the_pipeline_draws(
    tmp_path: Path, flow_map: bool, cfg: float, sizes: list[tuple[int, int]]
) -> None:
    """Sizes are multiples of 16, so that the pipeline leaves the pictures as they are."""
    folder = tiny_flux3_pipeline(tmp_path / "model", flow_map=flow_map)
    family = model_family(ModelConfig(model_type="flux3_klein_edit", pretrained_model_name_or_path=str(folder)))
    random = np.random.default_rng(3)
    shown = [Image.fromarray(random.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes]
    encoder, text = family.load_image_encoder(torch.float32), family.load_text_encoder(torch.float32)
    pixels = [torch.from_numpy(np.asarray(each) / np.float32(127.5) - 1).permute(2, 0, 1)[None] for each in shown]
    caption, negative = text.encode(["make the disc red", "blurry"])

    def sample(references: int) -> np.ndarray:
        conditions = Conditions(references=tuple(encoder.encode(each) for each in pixels[:references]))
        transformer = family.load_transformer(torch.float32)
        settings = SampleSettings(64, 48, steps=3, guidance=1.0, seed=7, cfg=cfg)
        words = {"negative_text": negative if cfg > 1 else None}
        return np.asarray(family.sample(transformer, encoder, caption, settings, conditions=conditions, **words), int)

    ours, pipeline = sample(len(sizes)), flux3_reference(folder)
    if not flow_map:
        pipeline.guider.guidance_scale = cfg
    theirs = pipeline(
        prompt="make the disc red",
        **({} if flow_map else {"negative_prompt": "blurry"}),
        image=shown,
        width=64,
        height=48,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(7),
        output="images",
    )[0]
    assert_same_picture(ours, theirs)
    assert np.abs(ours - sample(len(sizes) - 1)).max() > 1, "the last reference reaches the sample"
