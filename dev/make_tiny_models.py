"""Make the tiny trained FLUX, the tiny FLUX Fill and the demo images for tests, demo and documentation.

    python dev/make_tiny_models.py --stage all                 # everything: three hours on two CPU cores
    python dev/make_tiny_models.py --stage dit --resume        # go on where a stage was stopped
    python dev/make_tiny_models.py --stage all --smoke --out /tmp/tiny-flux --fill_out /tmp/fill --demo_out /tmp/demo

The stages, in order:
    vae      train the autoencoder on painted pictures                       → <state>/vae.pt
    decoder  make its decoder robust against noise on the latents            → <state>/decoder.pt
    encode   paint the captioned scenes and encode them                      → <state>/latents.pt
    dit      train transformer, T5 and CLIP together on them                 → <state>/dit.pt
    distill  teach the transformer guidance, as FLUX.1-dev was               → <state>/distill.pt
    export   write the pipeline and a sheet from the last states             → <out>
    demo     paint the demo dataset (a subject that the model never saw)     → <demo_out>
    fill_encode  blank a region of freshly painted scenes and encode them    → <state>/fill_pool.pt
    fill     go on from <out>'s transformer with blanked picture and mask    → <state>/fill.pt, <fill_out>
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

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dev.tiny_models.fill import (
    FillTraining,
    load_fill_pipeline,
    load_fill_pool,
    paint_fill_pool,
    save_fill_pipeline,
    text_to_image_of,
    train_fill,
    write_fill_sheet,
)
from dev.tiny_models.latent_pool import build_clip_tokenizer, build_t5_tokenizer, load_pool, paint_and_encode, tokenize
from dev.tiny_models.scenes import scene_words, write_demo_dataset
from dev.tiny_models.training import (
    DitTraining,
    VaeTraining,
    flow_target,
    guided_target,
    train_transformer,
    train_vae,
    trained_model,
    trained_vae,
)
from dev.tiny_models.transformer import (
    TextToImage,
    TinySizes,
    build_text_to_image,
    build_vae,
    move_into_place,
    parameter_count,
    save_pipeline,
    write_sheet,
)

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
    dit: DitTraining
    distill: DitTraining
    fill_scenes: int
    fill: FillTraining
    fill_shown: int  # held-out scenes on a sheet
    sample_steps: int


FULL = Plan(
    sizes=TinySizes(),
    vae=VaeTraining(),
    decoder=VaeTraining(steps=300, learning_rate=5e-4, latent_noise=0.25, pool=2000, whole_share=1.0),
    scenes=16000,
    dit=DitTraining(),
    distill=DitTraining(steps=500, muon_rate=1e-3, adam_rate=3e-4, sheet_every=250),
    fill_scenes=12000,
    fill=FillTraining(),
    fill_shown=24,
    sample_steps=20,
)
SMOKE = Plan(
    sizes=TinySizes(vae_channels=(8, 8, 8, 8), double_blocks=1, single_blocks=1, heads=2),
    vae=VaeTraining(steps=4, batch=4, pool=16),
    decoder=VaeTraining(steps=2, batch=4, pool=16, latent_noise=0.25),
    scenes=500,
    dit=DitTraining(steps=3, batch=6, sheet_every=3, compile=False),
    distill=DitTraining(steps=2, batch=6, sheet_every=2, compile=False),
    fill_scenes=500,
    fill=FillTraining(steps=2, batch=6, save_every=2, sheet_every=2),
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
    changes = {"seed": options.seed} | ({} if options.steps is None else {"steps": options.steps})
    dit_changes = changes | ({"compile": False} if options.no_compile else {})
    return replace(
        plan,
        vae=replace(plan.vae, **changes),
        decoder=replace(plan.decoder, **changes),
        dit=replace(plan.dit, **dit_changes),
        distill=replace(plan.distill, **dit_changes),
        fill=replace(plan.fill, **changes),
    )


def make_vae(options: argparse.Namespace, plan: Plan) -> None:
    torch.manual_seed(options.seed)
    vae = train_vae("vae", build_vae(plan.sizes), plan.vae, options.state / "vae.pt", options.resume)
    print(f"vae: {parameter_count(vae):,} parameters, scaling {vae.config.scaling_factor}", flush=True)


def make_decoder(options: argparse.Namespace, plan: Plan) -> None:
    vae = trained_vae(plan.sizes, options.state / "vae.pt")
    train_vae("decoder", vae, plan.decoder, options.state / "decoder.pt", options.resume)


def make_latents(options: argparse.Namespace, plan: Plan) -> None:
    vae = trained_vae(plan.sizes, options.state / "vae.pt")
    paint_and_encode(vae, plan.scenes, options.seed, options.state / "latents.pt")


def make_dit(options: argparse.Namespace, plan: Plan) -> None:
    torch.manual_seed(options.seed)
    model = build_text_to_image(plan.sizes, *vocabularies())
    print(f"dit: {parameter_count(model):,} parameters with text encoders", flush=True)
    snapshot = snapshot_writer(options, plan, "dit", cfg=SHEET_CFG)
    pool = load_pool(options.state / "latents.pt")
    train_transformer("dit", model, flow_target, pool, plan.dit, options.state / "dit.pt", options.resume, snapshot)


def make_distilled(options: argparse.Namespace, plan: Plan) -> None:
    model = trained_model(plan.sizes, vocabularies(), options.state / "dit.pt").train().requires_grad_(True)
    teacher = trained_model(plan.sizes, vocabularies(), options.state / "dit.pt")
    snapshot = snapshot_writer(options, plan, "distill", cfg=None)
    target = guided_target(teacher, tokenize([""]))
    pool = load_pool(options.state / "latents.pt")
    train_transformer(
        "distill", model, target, pool, plan.distill, options.state / "distill.pt", options.resume, snapshot
    )


def export(options: argparse.Namespace, plan: Plan) -> None:
    model = trained_model(plan.sizes, vocabularies(), options.state / "distill.pt")
    snapshot_writer(options, plan, "export", cfg=None)(model, plan.distill.steps)


def make_demo(options: argparse.Namespace, plan: Plan) -> None:
    partial = options.demo_out.with_name(options.demo_out.name + ".partial")
    count = write_demo_dataset(partial)
    move_into_place(partial, options.demo_out)
    print(f"demo: {count} images in {options.demo_out}", flush=True)


def make_fill_latents(options: argparse.Namespace, plan: Plan) -> None:
    vae = AutoencoderKL.from_pretrained(options.out / "vae", torch_dtype=torch.float32).eval()
    paint_fill_pool(vae, plan.fill_scenes, options.seed, options.state / "fill_pool.pt")


def make_fill(options: argparse.Namespace, plan: Plan) -> None:
    def snapshot(transformer: FluxTransformer2DModel, step: int) -> None:
        size = save_fill_pipeline(options.out, transformer, options.fill_out)
        sheet = options.state / "sheets" / f"fill_{step:06d}.png"
        errors = write_fill_sheet(load_fill_pipeline(options.fill_out), sheet, plan.fill_shown, plan.sample_steps)
        told = ", ".join(f"{name} {value:.4f}" for name, value in errors.items())
        print(f"fill: error in the region: {told}; {sheet}, {options.fill_out} ({size / 2**20:.1f} MiB)", flush=True)

    base, pool = text_to_image_of(options.out), load_fill_pool(options.state / "fill_pool.pt")
    train_fill(base, pool, plan.fill, options.state / "fill.pt", options.resume, snapshot)


def vocabularies() -> tuple[int, int]:
    """(T5's, CLIP's) number of pieces."""
    words = scene_words()
    return len(build_t5_tokenizer(words)), len(build_clip_tokenizer(words))


def snapshot_writer(
    options: argparse.Namespace, plan: Plan, phase: str, cfg: float | None
) -> Callable[[TextToImage, int], None]:
    polished = options.state / "decoder.pt"
    vae = trained_vae(plan.sizes, polished if polished.exists() else options.state / "vae.pt")

    def write(model: TextToImage, step: int) -> None:
        sheet = options.state / "sheets" / f"{phase}_{step:06d}.png"
        write_sheet(model, vae, sheet, cfg=cfg, steps=plan.sample_steps)
        size = save_pipeline(model, vae, options.out)
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
