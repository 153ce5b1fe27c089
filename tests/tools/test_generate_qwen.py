"""tools/generate.py with Qwen-Image: split files and a LoRA, against diffusers' pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from PIL import Image

from library.errors import UserError
from library.models.qwen_image.files import QWEN_TARGETS
from networks.files.adapters import save_adapter
from networks.files.weights import LoraWeights
from tests.tiny_qwen import save_split_files, tiny_qwen_pipeline, tiny_qwen_transformer
from tools.generate import image, parser


def test_split_files_with_a_lora_draw_what_diffusers_draws(tmp_path: Path) -> None:
    base = tiny_qwen_pipeline(tmp_path / "base")
    files = save_split_files(base, tmp_path / "files")
    random = torch.Generator().manual_seed(1)
    weights = {
        name: LoraWeights(
            torch.randn(4, module.in_features, generator=random) * 0.2,
            torch.randn(module.out_features, 4, generator=random) * 0.2,
            2.0,
        )
        for name, module in tiny_qwen_transformer().named_modules()
        if isinstance(module, torch.nn.Linear) and QWEN_TARGETS.group_of(name)
    }
    save_adapter(tmp_path / "lora.safetensors", weights, QWEN_TARGETS, "kohya")
    flags = ["image", "--model", str(files.transformer), "--model_type", "qwen_image", "--vae", str(files.vae)]
    flags += ["--text_encoder", str(files.text_encoder), "--qwen_tokenizer", str(files.tokenizer)]
    flags += ["--lora", f"{tmp_path / 'lora.safetensors'}:0.5", "--prompt", "a red disc", "--n", "large"]
    flags += ["--w", "64", "--h", "48", "--s", "3", "--d", "5", "--l", "3", "--save_to", str(tmp_path / "out")]
    (path,) = image(parser().parse_args(flags))

    pipeline = QwenImagePipeline.from_pretrained(base)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(str(tmp_path / "lora.safetensors"), adapter_name="lora")
    pipeline.set_adapters(["lora"], [0.5])
    theirs = pipeline(
        "a red disc",
        negative_prompt="large",
        true_cfg_scale=3.0,
        width=64,
        height=48,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(5),
    ).images[0]
    # the same numbers up to rounding, of which two steps of 255 may be left behind a VAE of random weights
    assert np.abs(np.asarray(Image.open(path)).astype(int) - np.asarray(theirs).astype(int)).max() <= 2

    with pytest.raises(UserError, match='ae: has no effect with model_type = "qwen_image", whose files are vae'):
        image(parser().parse_args([*flags, "--ae", "x"]))
    with pytest.raises(UserError, match=r"prompt 'a red disc': --g 3.5 is not taken: this model has no guidance input"):
        image(parser().parse_args([*flags, "--g", "3.5"]))
