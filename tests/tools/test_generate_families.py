"""tools/generate.py with the other families: split files and a LoRA, against diffusers' pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from library.errors import UserError
from library.models.family_by_name import family_class
from library.models.registry import lora_targets
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from tests.models.test_image_families import CASES, guidance_of
from tools.generate import image, parser

# beginnings of the layers that get a LoRA, and its format, as far as diffusers reads it
LORAS: dict[str, tuple[str | tuple[str, ...], str]] = {
    "qwen_image": ("", "kohya"),
    "z_image": ("layers.", "kohya"),
    "flux2_klein": (("transformer_b", "single_tr"), "kohya"),
    "krea2": ("", "diffusers"),
}


def write_lora(path: Path, kind: str) -> None:
    """Write a random LoRA on the layers of the family that the table names."""
    targets, random, (beginnings, save_format) = lora_targets()[kind], torch.Generator().manual_seed(1), LORAS[kind]
    weights = {
        name: LoraWeights(
            torch.randn(4, module.in_features, generator=random) * 0.2,
            torch.randn(module.out_features, 4, generator=random) * 0.2,
            2.0,
        )
        for name, module in CASES[kind].transformer().named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith(beginnings) and targets.group_of(name)
    }
    save_adapter(path, weights, targets, save_format)


@pytest.mark.parametrize("kind", LORAS)
def test_split_files_with_a_lora_draw_what_diffusers_draws(kind: str, tmp_path: Path) -> None:
    base, lora = CASES[kind].folder(tmp_path / "base"), tmp_path / "lora.safetensors"
    files = CASES[kind].files(base, tmp_path / "files")
    write_lora(lora, kind)
    flags = [
        *("image", "--model", str(files.transformer), "--model_type", kind, "--vae", str(files.vae)),
        *("--text_encoder", str(files.text_encoder), "--qwen_tokenizer", str(files.tokenizer)),
        *("--lora", f"{lora}:0.5", "--prompt", "a red disc", "--n", "large"),
        *("--w", "64", "--h", "48", "--s", "3", "--d", "5", "--l", "3", "--save_to", str(tmp_path / "out")),
    ]
    (path,) = image(parser().parse_args(flags))

    pipeline: Any = getattr(diffusers, family_class(kind).published_pipeline).from_pretrained(base)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(str(lora), adapter_name="lora")
    pipeline.set_adapters(["lora"], [0.5])
    theirs = pipeline(
        prompt="a red disc",
        **guidance_of(kind, pipeline, 3.0, "large"),
        width=64,
        height=48,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(5),
    ).images[0]
    # the same numbers up to rounding, of which two steps of 255 may be left behind a VAE of random weights
    assert np.abs(np.asarray(Image.open(path)).astype(int) - np.asarray(theirs).astype(int)).max() <= 2

    with pytest.raises(UserError, match=f'ae: has no effect with model_type = "{kind}", whose files are vae'):
        image(parser().parse_args([*flags, "--ae", "x"]))
    with pytest.raises(UserError, match=r"prompt 'a red disc': --g 3.5 is not taken: this model has no guidance input"):
        image(parser().parse_args([*flags, "--g", "3.5"]))
