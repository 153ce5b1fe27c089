"""A family's image against that of diffusers' pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from library.models.family import Family, SampleSettings


def assert_sample_is_the_pipelines(
    family: Family,
    pipeline: Any,
    cfg: float,
    shown: Callable[[Any], np.ndarray] = np.asarray,
    most: int = 1,
    **theirs: Any,
) -> None:
    """Sample 64 x 96 pixels in three steps with both.

    Args:
        shown: the pipeline's image as RGB; numbers up to 255.
        most: by how much a number may differ.
        theirs: the pipeline's own names of the guidance; ``negative_prompt_embeds`` among them are those of "blurry,
            large", where the pipeline takes no negative text.
    """
    transformer, encoder = family.load_transformer(torch.float32).train(), family.load_text_encoder(torch.float32)
    text, negative = encoder.encode(["a red disc", "blurry, large"])
    image = family.sample(
        transformer,
        family.load_image_encoder(torch.float32),
        text,
        SampleSettings(64, 96, steps=3, guidance=3.5, seed=7, cfg=cfg),
        negative_text=negative if cfg > 1 else None,
    )
    if cfg > 1 and "negative_prompt_embeds" not in theirs:
        theirs["negative_prompt"] = "blurry, large"
    expected = pipeline(
        prompt="a red disc",
        width=64,
        height=96,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(7),
        **theirs,
    ).images[0]
    assert image.size == expected.size == (64, 96)
    tokens = 64 * 96 // (family.patch_size * pipeline.vae_scale_factor) ** 2
    assert family.sampling_sigmas(3, tokens) == pytest.approx(pipeline.scheduler.sigmas.tolist())
    ours = np.asarray(image, dtype=int)
    # the same numbers up to rounding, sums may be split differently: one step of 255 may be left
    assert np.abs(ours - shown(expected).astype(int)).max() <= most
    assert ours.std() > 5, "a flat image would agree with another flat one"
    assert transformer.training, "the mode is put back"
