"""Tables of sines: each size of picture and text has its own, and sampling before training does not spoil them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from library.config.schema import ModelConfig
from library.models.family_by_name import model_family
from library.nn.rope import Table
from tests.tiny import tiny_flux_inputs, tiny_flux_pipeline
from tests.tiny_qwen import tiny_qwen_inputs, tiny_qwen_pipeline

CASES = {"flux": (tiny_flux_pipeline, tiny_flux_inputs), "qwen_image": (tiny_qwen_pipeline, tiny_qwen_inputs)}


@pytest.mark.parametrize("name", CASES)
def test_each_bucket_has_its_own_table(name: str, tmp_path: Path) -> None:
    write, draw = CASES[name]
    folder = str(write(tmp_path / "pipeline"))
    family: Any = model_family(ModelConfig(model_type=name, pretrained_model_name_or_path=folder))  # type: ignore[arg-type]
    transformer = family.load_transformer(torch.float32)
    tables: list[Table] = []
    transformer.pos_embed.register_forward_hook(lambda module, args, table: tables.append(table))

    def step(height: int, width: int, tokens: int = 12) -> torch.Tensor:
        inputs = draw(1, 8, tokens)
        text = {key: inputs[key] for key in inputs if key not in ("latents", "sigmas")}
        latents = torch.randn(1, 16, height, width, generator=torch.Generator().manual_seed(0))
        return family.predict_velocity(transformer, latents, inputs["sigmas"], text, 1.0)

    with torch.inference_mode():  # pictures may be drawn before the first step
        step(8, 4)
    first = step(8, 4)
    step(4, 8)
    step(8, 4, tokens=9)
    torch.testing.assert_close(step(8, 4), first, rtol=0, atol=0)
    cosines = [cos for cos, _ in tables]
    assert torch.equal(cosines[1], cosines[4])
    assert not any(cos.is_inference() for cos in cosines[1:])
    assert cosines[1].shape == cosines[2].shape
    assert not torch.equal(cosines[1], cosines[2])  # as many tokens, in another shape
    assert cosines[3].shape != cosines[1].shape
