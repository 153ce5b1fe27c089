"""Make the tiny trained FLUX, the tiny FLUX Fill and the demo images for tests, demo and documentation.

    python dev/make_tiny_models.py                                     # two hours on two CPU cores
    python dev/make_tiny_models.py --smoke --out /tmp/tiny --state /tmp/tiny-training

The stages, in order; one whose file is in <state> already is read from there:
    encode   paint the captioned scenes and encode them                       latents.pt
    dit      train transformer, T5 and CLIP together on them                  dit.pt
    distill  teach the transformer guidance, as FLUX.1-dev was                distill.pt, <out>/tiny-flux
    demo     paint the demo's images, a subject that the model never saw      <out>/demo_dataset/images
    fill_encode  blank a region of freshly painted scenes and encode them     fill_pool.pt
    fill     go on from the transformer with blanked image and mask           fill.pt, <out>/tiny-flux-fill

The autoencoder and the tokenizers are those in the assets (assets/README.md says how they were made). The committed
model: 5,000 steps on scenes whose places and sizes still varied, then 2,100 with a fresh learning rate on the scenes as
they are now; 500 steps of distillation. The fill model: 2,300 steps on 12,000 scenes, of which the first 1,000 weighed
the region four times instead of twice and the first 1,500 trained the first layer with AdamW. It continues backgrounds
without a seam and keeps places and colours, but draws outlines softly, those of known shapes too: it was still
learning.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dev.tiny_models.fill import build_fill_pipeline, fill_loss, random_mask, widened
from dev.tiny_models.latent_pool import TINY_FLUX, paint_and_encode
from dev.tiny_models.scenes import write_demo_images
from dev.tiny_models.training import (
    FlowTraining,
    flow_loss,
    guided_loss,
    train_transformer,
)
from dev.tiny_models.transformer import (
    TinySizes,
    build_pipeline,
    build_text_to_image,
    load_pipeline,
    save_pipeline,
    text_to_image_of,
)
from library.files import atomic_folder, atomic_path

ASSETS = Path(__file__).resolve().parents[1] / "assets"
STATE = ASSETS.parent / "output/tiny-flux-training"


@dataclass(frozen=True)
class Plan:
    """How large and how long: one for real, one for smoke tests."""

    sizes: TinySizes
    scenes: int
    dit: FlowTraining
    distill: FlowTraining
    fill_scenes: int
    fill: FlowTraining


FULL = Plan(
    sizes=TinySizes(),
    scenes=16000,
    dit=FlowTraining(),
    distill=FlowTraining(steps=500, warmup=50, muon_rate=1e-3, adam_rate=3e-4, longest_share=0.02),
    fill_scenes=12000,
    fill=FlowTraining(
        steps=2300,
        batch=28,
        warmup=100,
        muon_rate=2e-3,
        embedder_rate=3e-2,
        empty_share=0.15,
        longest_share=0.02,
        average_decay=0.998,
        compile=False,
    ),
)
_FEW: dict[str, Any] = {"batch": 6, "warmup": 0, "compile": False}
SMOKE = Plan(
    sizes=TinySizes(double_blocks=1, single_blocks=1, heads=2),
    scenes=150,
    dit=replace(FULL.dit, steps=3, **_FEW),
    distill=replace(FULL.distill, steps=2, muon_rate=3e-3, adam_rate=1e-3, **_FEW),
    fill_scenes=150,
    fill=replace(FULL.fill, steps=2, **_FEW),
)


def main(arguments: list[str] | None = None) -> None:
    """Make everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS, help="gets the three folders (default: %(default)s)")
    parser.add_argument("--state", type=Path, default=STATE, help="what each stage made (default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a smaller model")
    options = parser.parse_args(arguments)
    make(SMOKE if options.smoke else FULL, options.out, options.state)


def make(plan: Plan, out: Path, state: Path) -> None:
    """Make everything by ``plan``."""

    def stage(name: str, made: Callable[[], Any]) -> Any:
        path = state / f"{name}.pt"
        if not path.exists():
            with atomic_path(path) as temporary:
                torch.save(made(), temporary)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)

    vae = load_pipeline(TINY_FLUX).vae
    pool = stage("latents", lambda: paint_and_encode(vae, plan.scenes, np.random.default_rng([0, 77])))

    torch.manual_seed(0)
    model = build_text_to_image(plan.sizes)
    model.load_state_dict(stage("dit", lambda: train_transformer("dit", model, flow_loss, pool, plan.dit)))
    loss = guided_loss(copy.deepcopy(model).eval().requires_grad_(False))
    model.load_state_dict(stage("distill", lambda: train_transformer("distill", model, loss, pool, plan.distill)))
    save_pipeline(build_pipeline(model, vae), out / "tiny-flux")
    with atomic_folder(out / "demo_dataset/images") as temporary:
        write_demo_images(temporary)

    base = load_pipeline(out / "tiny-flux")  # as it was saved, in bf16
    rng = np.random.default_rng([0, 78])
    pool = stage("fill_pool", lambda: paint_and_encode(base.vae, plan.fill_scenes, rng, random_mask))
    fill = widened(text_to_image_of(base))
    fill.load_state_dict(stage("fill", lambda: train_transformer("fill", fill, fill_loss, pool, plan.fill)))
    save_pipeline(build_fill_pipeline(base, fill), out / "tiny-flux-fill")


if __name__ == "__main__":
    main()
