"""Write the trained parts as a diffusers folder in bf16."""

import copy
import os
import shutil
from pathlib import Path

from diffusers import AutoencoderKL, FluxPipeline

from tools.tiny_models.architecture import build_scheduler
from tools.tiny_models.scenes import scene_words
from tools.tiny_models.text_to_image import TextToImage
from tools.tiny_models.vocabulary import build_clip_tokenizer, build_t5_tokenizer


def save_pipeline(model: TextToImage, vae: AutoencoderKL, folder: Path) -> int:
    """Save as FluxPipeline, all weights in bf16; returns the folder's size in bytes.

    Everything is written beside `folder` first and each file then renamed into place, so that a program that
    loads the folder meanwhile finds whole files.
    """
    words = scene_words()
    pipeline = FluxPipeline(
        scheduler=build_scheduler(),
        vae=copy.deepcopy(vae).bfloat16(),
        text_encoder=copy.deepcopy(model.clip).bfloat16(),
        tokenizer=build_clip_tokenizer(words),
        text_encoder_2=copy.deepcopy(model.t5).bfloat16(),
        tokenizer_2=build_t5_tokenizer(words),
        transformer=copy.deepcopy(model.transformer).bfloat16(),
    )
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    pipeline.save_pretrained(partial)
    move_into_place(partial, folder)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def move_into_place(partial: Path, folder: Path) -> None:
    """Rename every file of `partial` to the same place in `folder`, then remove what is left of `partial`."""
    for path in sorted(partial.rglob("*")):
        if path.is_file():
            target = folder / path.relative_to(partial)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    shutil.rmtree(partial)
