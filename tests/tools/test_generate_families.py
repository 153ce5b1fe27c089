"""tools/generate.py with the other families: split files and a LoRA, against diffusers' pipelines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline, Krea2Pipeline, QwenImagePipeline, ZImagePipeline
from PIL import Image

from library.errors import UserError
from library.models.registry import lora_targets
from networks.files.adapters import save_adapter
from networks.files.weights import LoraWeights
from tests.tiny_flux2 import save_flux2_files, tiny_flux2_pipeline, tiny_flux2_transformer
from tests.tiny_krea2 import save_krea2_split_files, tiny_krea2_pipeline, tiny_krea2_transformer
from tests.tiny_qwen import SplitFiles, save_split_files, tiny_qwen_pipeline, tiny_qwen_transformer
from tests.tiny_z_image import save_z_split_files, tiny_z_pipeline, tiny_z_transformer
from tools.generate import image, parser


def write_lora(path: Path, kind: str, transformer: torch.nn.Module, prefix: str | tuple[str, ...] = "") -> None:
    """Write a random LoRA on the layers of the family whose names begin with ``prefix``."""
    targets, random = lora_targets()[kind], torch.Generator().manual_seed(1)
    weights = {
        name: LoraWeights(
            torch.randn(4, module.in_features, generator=random) * 0.2,
            torch.randn(module.out_features, 4, generator=random) * 0.2,
            2.0,
        )
        for name, module in transformer.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith(prefix) and targets.group_of(name)
    }
    save_adapter(path, weights, targets, "diffusers" if kind == "krea2" else "kohya")  # diffusers reads no other of it


def flags_of(kind: str, files: SplitFiles, folder: Path) -> list[str]:
    return [
        *("image", "--model", str(files.transformer), "--model_type", kind, "--vae", str(files.vae)),
        *("--text_encoder", str(files.text_encoder), "--qwen_tokenizer", str(files.tokenizer)),
        *("--lora", f"{folder / 'lora.safetensors'}:0.5", "--prompt", "a red disc", "--n", "large"),
        *("--w", "64", "--h", "48", "--s", "3", "--d", "5", "--l", "3", "--save_to", str(folder / "out")),
    ]


@pytest.mark.parametrize("kind", ["qwen_image", "z_image", "flux2_klein", "krea2"])
def test_split_files_with_a_lora_draw_what_diffusers_draws(kind: str, tmp_path: Path) -> None:
    negative: dict[str, object] = {"negative_prompt": "large"}
    if kind == "flux2_klein":
        base = tiny_flux2_pipeline(tmp_path / "base")
        files = save_flux2_files(base, tmp_path / "files")
        pipeline, cfg = Flux2KleinPipeline.from_pretrained(base), {"guidance_scale": 3.0}
        with torch.no_grad():
            negative = {"negative_prompt_embeds": pipeline.encode_prompt("large")[0]}
        write_lora(tmp_path / "lora.safetensors", kind, tiny_flux2_transformer(), ("transformer_b", "single_tr"))
    elif kind == "qwen_image":
        base = tiny_qwen_pipeline(tmp_path / "base")
        files = save_split_files(base, tmp_path / "files")
        pipeline, cfg = QwenImagePipeline.from_pretrained(base), {"true_cfg_scale": 3.0}
        write_lora(tmp_path / "lora.safetensors", kind, tiny_qwen_transformer())
    elif kind == "krea2":
        base = tiny_krea2_pipeline(tmp_path / "base")
        files = save_krea2_split_files(base, tmp_path / "files")
        pipeline, cfg = Krea2Pipeline.from_pretrained(base), {"guidance_scale": 2.0}  # which counts from 0: --l 3
        write_lora(tmp_path / "lora.safetensors", kind, tiny_krea2_transformer())
    else:
        base = tiny_z_pipeline(tmp_path / "base")
        files = save_z_split_files(base, tmp_path / "files")
        pipeline, cfg = ZImagePipeline.from_pretrained(base), {"guidance_scale": 2.0}  # which counts from 0: --l 3
        write_lora(tmp_path / "lora.safetensors", kind, tiny_z_transformer(), "layers.")
    flags = flags_of(kind, files, tmp_path)
    (path,) = image(parser().parse_args(flags))

    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(str(tmp_path / "lora.safetensors"), adapter_name="lora")
    pipeline.set_adapters(["lora"], [0.5])
    theirs = pipeline(
        prompt="a red disc",
        **negative,
        **cfg,
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
