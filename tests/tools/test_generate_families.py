"""tools/generate.py with the other families: split files and a LoRA, against diffusers' pipelines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline, Krea2Pipeline, QwenImagePipeline, ZImagePipeline
from PIL import Image

from library.errors import UserError
from library.models.registry import lora_targets
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from tests.tiny_flux2 import save_flux2_files, tiny_flux2_pipeline, tiny_flux2_transformer
from tests.tiny_krea2 import save_krea2_split_files, tiny_krea2_pipeline, tiny_krea2_transformer
from tests.tiny_qwen import SplitFiles, save_split_files, tiny_qwen_pipeline, tiny_qwen_transformer
from tests.tiny_z_image import save_z_split_files, tiny_z_pipeline, tiny_z_transformer
from tools.generate import image, parser


def flags_of(kind: str, files: SplitFiles, folder: Path) -> list[str]:
    return [
        *("image", "--model", str(files.transformer), "--model_type", kind, "--vae", str(files.vae)),
        *("--text_encoder", str(files.text_encoder), "--qwen_tokenizer", str(files.tokenizer)),
        *("--lora", f"{folder / 'lora.safetensors'}:0.5", "--prompt", "a red disc", "--n", "large"),
        *("--w", "64", "--h", "48", "--s", "3", "--d", "5", "--l", "3", "--save_to", str(folder / "out")),
    ]


def negative_text(pipeline: Any) -> dict[str, Any]:
    return {"negative_prompt": "large"}


@torch.no_grad()
def negative_embeds(pipeline: Any) -> dict[str, Any]:
    return {"negative_prompt_embeds": pipeline.encode_prompt("large")[0]}


@dataclass(frozen=True)
class Row:
    """A family's tiny model, and how diffusers' pipeline is asked for what ``--l 3 --n large`` asks for.

    ``lora_on``: beginnings of the layers that get a LoRA, in ``save_format``, which diffusers must read.
    """

    pipeline: Any
    folder: Callable[[Path], Path]
    files: Callable[[Path, Path], SplitFiles]
    transformer: Callable[[], torch.nn.Module]
    guidance: dict[str, float]
    negative: Callable[[Any], dict[str, Any]] = negative_text
    lora_on: str | tuple[str, ...] = ""
    save_format: str = "kohya"


FROM_ZERO = {"guidance_scale": 2.0}  # the pipeline's own count of 3
ROWS = {
    "qwen_image": Row(
        QwenImagePipeline, tiny_qwen_pipeline, save_split_files, tiny_qwen_transformer, {"true_cfg_scale": 3.0}
    ),
    "z_image": Row(
        ZImagePipeline, tiny_z_pipeline, save_z_split_files, tiny_z_transformer, FROM_ZERO, lora_on="layers."
    ),
    "flux2_klein": Row(
        Flux2KleinPipeline,
        tiny_flux2_pipeline,
        save_flux2_files,
        tiny_flux2_transformer,
        {"guidance_scale": 3.0},
        negative_embeds,
        ("transformer_b", "single_tr"),
    ),
    "krea2": Row(
        Krea2Pipeline,
        tiny_krea2_pipeline,
        save_krea2_split_files,
        tiny_krea2_transformer,
        FROM_ZERO,
        save_format="diffusers",
    ),
}


def write_lora(path: Path, kind: str, row: Row) -> None:
    """Write a random LoRA on the layers of the family that the row names."""
    targets, random = lora_targets()[kind], torch.Generator().manual_seed(1)
    weights = {
        name: LoraWeights(
            torch.randn(4, module.in_features, generator=random) * 0.2,
            torch.randn(module.out_features, 4, generator=random) * 0.2,
            2.0,
        )
        for name, module in row.transformer().named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith(row.lora_on) and targets.group_of(name)
    }
    save_adapter(path, weights, targets, row.save_format)


@pytest.mark.parametrize("kind", ROWS)
def test_split_files_with_a_lora_draw_what_diffusers_draws(kind: str, tmp_path: Path) -> None:
    row = ROWS[kind]
    base = row.folder(tmp_path / "base")
    files, pipeline = row.files(base, tmp_path / "files"), row.pipeline.from_pretrained(base)
    write_lora(tmp_path / "lora.safetensors", kind, row)
    flags = flags_of(kind, files, tmp_path)
    (path,) = image(parser().parse_args(flags))

    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(str(tmp_path / "lora.safetensors"), adapter_name="lora")
    pipeline.set_adapters(["lora"], [0.5])
    theirs = pipeline(
        prompt="a red disc",
        **row.negative(pipeline),
        **row.guidance,
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
