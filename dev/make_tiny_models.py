"""Make the tiny trained FLUX, the tiny FLUX Fill and the demo images for tests, demo and documentation.

    python dev/make_tiny_models.py --stage all                 # everything: three hours on two CPU cores
    python dev/make_tiny_models.py --stage dit --resume        # go on where a stage was stopped
    python dev/make_tiny_models.py --stage all --smoke --out /tmp/tiny-flux --fill_out /tmp/fill --demo_out /tmp/demo

The stages, in order:
    vae      train the autoencoder on painted images                       → <state>/vae.pt
    decoder  make its decoder robust against noise on the latents            → <state>/decoder.pt
    encode   paint the captioned scenes and encode them                      → <state>/latents.pt
    dit      train transformer, T5 and CLIP together on them                 → <state>/dit.pt
    distill  teach the transformer guidance, as FLUX.1-dev was               → <state>/distill.pt
    export   write the pipeline and a sheet from the last states             → <out>
    demo     paint the demo dataset (a subject that the model never saw) and
             let the model paint regularisation images                       → <demo_out>
    fill_encode  blank a region of freshly painted scenes and encode them    → <state>/fill_pool.pt
    fill     go on from <out>'s transformer with blanked image and mask    → <state>/fill.pt, <fill_out>
`dit`, `distill` and `fill` write their pipeline and a sheet of samples to <state>/sheets at every snapshot.

The committed model: 4,000 VAE steps; 5,000 steps on scenes whose places and sizes still varied, then 2,100 with a
fresh learning rate on the scenes as they are now; 500 steps of distillation. The fill model: 2,300 steps on 12,000
scenes, of which the first 1,000 weighed the region four times instead of twice and the first 1,500 trained the first
layer with AdamW. It continues backgrounds without a seam and keeps places and colours, but draws outlines softly, those
of known shapes too: it was still learning, and `--stage fill --resume --steps 6000` would go on.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dev.tiny_models.fill import (
    build_fill_pipeline,
    fill_losses,
    random_mask,
    text_to_image_of,
    widened,
    write_fill_sheet,
)
from dev.tiny_models.latent_pool import load_pool, paint_and_encode
from dev.tiny_models.scenes import write_demo_dataset
from dev.tiny_models.training import (
    FlowTraining,
    VaeTraining,
    flow_losses,
    guided_losses,
    train_transformer,
    train_vae,
    trained_model,
    trained_vae,
)
from dev.tiny_models.transformer import (
    TextToImage,
    TinySizes,
    build_pipeline,
    build_text_to_image,
    build_vae,
    load_pipeline,
    save_pipeline,
    write_samples,
)
from library.files import atomic_folder

ASSETS = Path(__file__).resolve().parents[1] / "assets"
STATE = ASSETS.parent / "output/tiny-flux-training"
SHEET_CFG = 3.0  # true guidance on phase "dit"'s sheets: that model has none of its own yet


@dataclass(frozen=True)
class Plan:
    """How large and how long: one for real, one for smoke tests."""

    sizes: TinySizes
    vae: VaeTraining
    decoder: VaeTraining
    scenes: int
    dit: FlowTraining
    distill: FlowTraining
    fill_scenes: int
    fill: FlowTraining
    fill_shown: int  # held-out scenes on a sheet
    sample_steps: int


FULL = Plan(
    sizes=TinySizes(),
    vae=VaeTraining(),
    decoder=VaeTraining(steps=300, learning_rate=5e-4, latent_noise=0.25, pool=2000, full_share=1.0),
    scenes=16000,
    dit=FlowTraining(),
    distill=FlowTraining(steps=500, warmup=50, muon_rate=1e-3, adam_rate=3e-4, longest_share=0.02, sheet_every=250),
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
        sheet_every=500,
        compile=False,
    ),
    fill_shown=24,
    sample_steps=20,
)
_FEW: dict[str, Any] = {"batch": 6, "warmup": 0, "compile": False}
SMOKE = Plan(
    sizes=TinySizes(vae_channels=(8, 8, 8, 8), double_blocks=1, single_blocks=1, heads=2),
    vae=VaeTraining(steps=4, batch=4, pool=16),
    decoder=VaeTraining(steps=2, batch=4, pool=16, latent_noise=0.25),
    scenes=500,
    dit=replace(FULL.dit, steps=3, **_FEW),
    distill=replace(FULL.distill, steps=2, muon_rate=3e-3, adam_rate=1e-3, **_FEW),
    fill_scenes=500,
    fill=replace(FULL.fill, steps=2, **_FEW),
    fill_shown=3,
    sample_steps=2,
)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    plan = planned(options)
    for name in STAGES if options.stage == "all" else [options.stage]:
        print(f"== {name}", flush=True)
        STAGES[name](options, plan)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--stage", choices=["all", *STAGES], default="all")
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-flux", help="the pipeline's folder")
    parser.add_argument("--demo_out", type=Path, default=ASSETS / "demo_dataset", help="the demo images")
    parser.add_argument("--fill_out", type=Path, default=ASSETS / "tiny-flux-fill", help="the fill pipeline's folder")
    parser.add_argument("--state", type=Path, default=STATE, help="resumable states and sample sheets")
    parser.add_argument("--steps", type=int, help="training steps, of one training stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on from the stage's saved state")
    parser.add_argument("--no_compile", action="store_true", help="train without torch.compile")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a smaller model")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.stage not in TRAINING_STAGES:
        parser.error(f"--steps: name the training stage it is for: --stage {' or '.join(TRAINING_STAGES)}")
    return options


def planned(options: argparse.Namespace) -> Plan:
    plan = SMOKE if options.smoke else FULL
    changes: dict[str, Any] = {"seed": options.seed} | ({} if options.steps is None else {"steps": options.steps})
    if options.no_compile:
        plan = replace(plan, dit=replace(plan.dit, compile=False), distill=replace(plan.distill, compile=False))
    return replace(plan, **{name: replace(getattr(plan, name), **changes) for name in TRAINING_STAGES})


def make_vae(options: argparse.Namespace, plan: Plan) -> None:
    torch.manual_seed(options.seed)
    train_vae("vae", build_vae(plan.sizes), plan.vae, options.state / "vae.pt", options.resume)


def make_decoder(options: argparse.Namespace, plan: Plan) -> None:
    vae = trained_vae(plan.sizes, options.state / "vae.pt")
    train_vae("decoder", vae, plan.decoder, options.state / "decoder.pt", options.resume)


def make_latents(options: argparse.Namespace, plan: Plan) -> None:
    vae = trained_vae(plan.sizes, options.state / "vae.pt")
    paint_and_encode(
        "encode", vae, plan.scenes, np.random.default_rng([options.seed, 77]), options.state / "latents.pt"
    )


def make_dit(options: argparse.Namespace, plan: Plan) -> None:
    torch.manual_seed(options.seed)
    model, pool = build_text_to_image(plan.sizes), load_pool(options.state / "latents.pt")
    snapshot = snapshot_writer(options, plan, "dit", SHEET_CFG)
    train_transformer("dit", model, flow_losses, pool, plan.dit, options.state / "dit.pt", options.resume, snapshot)


def make_distilled(options: argparse.Namespace, plan: Plan) -> None:
    model = trained_model(plan.sizes, options.state / "dit.pt").train().requires_grad_(True)
    losses = guided_losses(trained_model(plan.sizes, options.state / "dit.pt"))
    pool, state = load_pool(options.state / "latents.pt"), options.state / "distill.pt"
    snapshot = snapshot_writer(options, plan, "distill")
    train_transformer("distill", model, losses, pool, plan.distill, state, options.resume, snapshot)


def export(options: argparse.Namespace, plan: Plan) -> None:
    model = trained_model(plan.sizes, options.state / "distill.pt")
    snapshot_writer(options, plan, "export")(model, plan.distill.steps)


def make_demo(options: argparse.Namespace, plan: Plan) -> None:
    with atomic_folder(options.demo_out) as temporary:
        count = write_demo_dataset(temporary)
    print(f"demo: {count} images in {options.demo_out}", flush=True)


def make_fill_latents(options: argparse.Namespace, plan: Plan) -> None:
    vae = AutoencoderKL.from_pretrained(options.out / "vae", torch_dtype=torch.float32).eval()
    rng, pool = np.random.default_rng([options.seed, 78]), options.state / "fill_pool.pt"
    paint_and_encode("fill_encode", vae, plan.fill_scenes, rng, pool, random_mask)


def make_fill(options: argparse.Namespace, plan: Plan) -> None:
    def snapshot(model: TextToImage, step: int) -> None:
        size = save_pipeline(build_fill_pipeline(options.out, model), options.fill_out)
        sheet = options.state / "sheets" / f"fill_{step:06d}.png"
        errors = write_fill_sheet(load_pipeline(options.fill_out), sheet, plan.fill_shown, plan.sample_steps)
        found = ", ".join(f"{name} {value:.4f}" for name, value in errors.items())
        print(f"fill: error in the region: {found}; {sheet}, {options.fill_out} ({size / 2**20:.1f} MiB)", flush=True)

    model, pool = widened(text_to_image_of(options.out)), load_pool(options.state / "fill_pool.pt")
    train_transformer("fill", model, fill_losses, pool, plan.fill, options.state / "fill.pt", options.resume, snapshot)


def snapshot_writer(
    options: argparse.Namespace, plan: Plan, phase: str, cfg: float = 1.0
) -> Callable[[TextToImage, int], None]:
    polished = options.state / "decoder.pt"
    vae = trained_vae(plan.sizes, polished if polished.exists() else options.state / "vae.pt")

    def write(model: TextToImage, step: int) -> None:
        sheet = options.state / "sheets" / f"{phase}_{step:06d}.png"
        size = save_pipeline(build_pipeline(model, vae), options.out)
        write_samples(options.out, sheet, cfg, plan.sample_steps)
        print(f"{phase}: {sheet}, {options.out} ({size / 2**20:.1f} MiB)", flush=True)

    return write


STAGES: dict[str, Callable[[argparse.Namespace, Plan], None]] = {
    "vae": make_vae,
    "decoder": make_decoder,
    "encode": make_latents,
    "dit": make_dit,
    "distill": make_distilled,
    "export": export,
    "demo": make_demo,
    "fill_encode": make_fill_latents,
    "fill": make_fill,
}
TRAINING_STAGES = ("vae", "decoder", "dit", "distill", "fill")

if __name__ == "__main__":
    main()
