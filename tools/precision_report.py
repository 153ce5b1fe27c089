"""Explain what fp8 does to a model with a LoRA: layer by layer, step by step, along the seam of a filled region.

    python tools/precision_report.py --model FLUX.1-Fill-dev --model_type flux_fill --deploy fill-fp8.safetensors \\
        --lora mine.safetensors --dataset_config dataset.toml --save_to report
    python tools/precision_report.py --model flux1-dev.safetensors --ae ae.safetensors --clip_l clip_l.safetensors \\
        --t5xxl t5xxl_fp16.safetensors --deploy cast+all --deploy_lora stochastic --activations unit --paste pixels \\
        --lora mine.safetensors --dataset_config dataset.toml

The reference is ``--model`` with the LoRA beside it, as it was trained. The deployment is described by the other flags;
each of them is one cause, and each is also looked at alone. Both run on the same images, noise, noise levels and masks.
``report.html`` holds words, images and tables, ``report.json`` every number.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from library.config.kinds import likely_type
from library.config.markers import MOST_STEPS
from library.config.model_types import BLANKS, IMAGE_MODELS, MODEL_TYPES
from library.console import Console
from library.errors import UserError, exit_on_user_error
from library.fidelity import FIXES, MERGES, SERVERS
from library.precision.names import ActivationRounding
from tools.command import (
    add_calibration_images,
    add_model_parts,
    answer_early,
    calibration_plan,
    count,
    guidance,
    lora_source,
    number,
    seed_number,
    strength,
    tool_parser,
    whole,
)

FLAGS = {"blank": "blank", "guidance": "deploy_guidance", "t5_tokens": "deploy_t5_tokens"}
TEXT_FILES = ("clip_l", "t5xxl", "text_encoder")


def _guidance_or_ignored(text: str) -> float | str:
    return text if text == "ignored" else guidance(text)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = tool_parser(__doc__)
    model = top.add_argument_group("the reference")
    model.add_argument("--model", required=True, help="bf16 model: diffusers folder, or transformer file")
    model.add_argument("--model_type", choices=IMAGE_MODELS, help="default: as the model says")
    add_model_parts(model)
    model.add_argument("--lora", nargs="+", default=[], metavar="FILE[:STRENGTH]", help="LoRAs, of any layout")
    model.add_argument(
        "--reference_lora",
        nargs="+",
        default=[],
        metavar="FILE[:STRENGTH]",
        help="the original, where --lora is what was refitted to the deployment (default: --lora)",
    )
    deployment = top.add_argument_group("the deployment, a cause a flag")
    deployment.add_argument(
        "--deploy",
        metavar="FILE|FOLDER|RECIPE",
        help="the model that is served, or a recipe (cast, tensor, int8_convrot, ...); :e5m2 and +all may follow",
    )
    deployment.add_argument("--deploy_merged", action="store_true", help="the LoRA is in that file already")
    deployment.add_argument(
        "--server",
        choices=SERVERS,
        help="the program: how it applies the LoRA, and which files "
        "it multiplies as stored (default: what such files are usually run by)",
    )
    deployment.add_argument(
        "--deploy_lora",
        choices=["beside", *MERGES],
        help="beside the weights, rounded into them, or added at every use (default: as the server does)",
    )
    deployment.add_argument("--deploy_strength", type=strength, default=1.0, metavar="X", help="of the LoRA")
    deployment.add_argument(
        "--activations",
        choices=["none", "auto", *get_args(ActivationRounding)],
        metavar="HOW",
        help="rounded before products: none, auto (as the file says and the server heeds), "
        "row, tensor, unit, static (fp8), int8, nvfp4, mxfp8 (default: auto)",
    )
    deployment.add_argument(
        "--deploy_lora_without",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="LoRA layers that are not served: text_encoder, single_transformer, ...",
    )
    deployment.add_argument("--attention", choices=["fp8"], help="q, k and v rounded to fp8")
    for name in TEXT_FILES:
        deployment.add_argument(f"--deploy_{name}", metavar="PATH", help="another file or folder of that encoder")
    deployment.add_argument(
        "--deploy_text_dtype",
        choices=["fp8", "fp8_block64", "fp16", "bf16"],
        help="of the text encoders; fp8: a plain cast",
    )
    deployment.add_argument("--deploy_t5_tokens", type=count, metavar="N", help="tokens of a caption that T5 is given")
    deployment.add_argument("--deploy_vae", metavar="PATH", help="another VAE")
    deployment.add_argument("--deploy_vae_dtype", choices=["fp8", "fp16", "bf16"], help="of the VAE; fp8: a plain cast")
    deployment.add_argument("--deploy_guidance", type=_guidance_or_ignored, metavar="X|ignored", help="guidance input")
    deployment.add_argument(
        "--deploy_shift", type=number(above=0, most=1000), metavar="X", help="static shift of the sampler"
    )
    deployment.add_argument(
        "--timestep", choices=["fp32", "bf16", "fp16", "fp8"], default="fp32", help="dtype of timesteps"
    )
    distilled = top.add_argument_group("the LoRA on a distilled model of the reference, instead of --deploy")
    distilled.add_argument("--distilled", metavar="FILE|FOLDER", help="Z-Image-Turbo for Z-Image, schnell for dev, ...")
    distilled.add_argument(
        "--distilled_lora",
        nargs="+",
        default=[],
        metavar="FILE[:STRENGTH]",
        help="LoRAs that are used there (default: those of --lora)",
    )
    distilled.add_argument(
        "--distilled_steps",
        type=whole(least=1, most=MOST_STEPS),
        metavar="N",
        help="sampling steps there (default: 8 of Z-Image, 16 of FLUX.3, else 4)",
    )
    given = top.add_argument_group("what the server makes of picture and mask, a cause a flag")
    given.add_argument("--mask_invert", action="store_true", help="known and filled are swapped")
    given.add_argument(
        "--mask_grow", type=whole(least=-512, most=512), default=0, metavar="PX", help="negative: shrunk"
    )
    given.add_argument(
        "--mask_snap",
        type=whole(least=2, most=128),
        nargs="?",
        const=8,
        default=0,
        metavar="PX",
        help="grown to whole cells (default: of 8 pixels, a latent; 16 is a token)",
    )
    given.add_argument(
        "--mask_blur",
        type=number(least=0, most=256),
        default=0.0,
        metavar="PX",
        help="standard deviation of a Gaussian",
    )
    given.add_argument("--blank", choices=BLANKS, help="what is under the mask")
    given.add_argument("--latents_dtype", choices=["bf16", "fp16", "fp8"], help="of the given picture's latents")
    given.add_argument(
        "--paste",
        choices=["pixels", "latents"],
        help="known region put back into the finished picture, or at each step (ComfyUI's noise mask)",
    )
    eval_set = top.add_argument_group("what they run on")
    add_calibration_images(eval_set, required=True, prefix="")
    top.set_defaults(statistics_gb=4.0)
    eval_set.add_argument(
        "--steps",
        type=whole(least=0, most=MOST_STEPS),
        default=12,
        help="of a sampling run; 0 for none (default: %(default)s)",
    )
    server = top.add_argument_group("what a server really painted")
    server.add_argument(
        "--server_image",
        nargs="+",
        default=[],
        metavar="FILE[=NAME]",
        help="pictures that it painted; NAME: the dataset's image it was painted from (default: of FILE's name)",
    )
    server.add_argument(
        "--server_seed",
        type=seed_number,
        nargs="+",
        default=[],
        metavar="N",
        help="seed of their noise: one, or one for each",
    )
    server.add_argument("--server_steps", type=whole(least=1, most=MOST_STEPS), metavar="N", help="its sampler's steps")
    fix = top.add_argument_group("fixes")
    fix.add_argument(
        "--fix",
        nargs="*",
        choices=FIXES,
        metavar="NAME",
        help=f"try fixes and name the cheapest that does; all, or some of {', '.join(FIXES)}",
    )
    top.add_argument("--save_to", type=Path, default=Path("output/precision_report"), help="folder")
    return top


answer_early(__name__, lambda: parser().parse_args())

import torch

from library.config.model_layouts import is_lora
from library.fidelity.conditioning import as_program_gives
from library.fidelity.deployed import DeployedWeights, parse_deployment
from library.fidelity.deployed_parts import complete, fields, settle
from library.fidelity.distilled import compare_distilled
from library.fidelity.fixes import FixOptions, fix_table, try_fixes
from library.fidelity.page import write_distilled, write_report
from library.fidelity.remedies import of_distilled
from library.fidelity.report import measure, with_remedies, with_server
from library.fidelity.runs import prepare_eval_set
from library.fidelity.server_image import ServerPicture, explain_server
from library.fidelity.servers import BY_NAME, Merge, Merging, dora_error
from library.fidelity.serving import CONDITIONING, REFERENCE, Models, PartDtype, Served, Variant, numbers
from library.safetensors_io import read_safetensors_header
from library.training.sampling.generate import read_loras
from networks.files.adapters import load_trainable
from networks.files.layouts import PRECISIONS
from networks.files.metadata import weight_file
from networks.files.weights import AddedWeights, DoraWeights
from networks.merging.merge import LoraSource


def variant_of(options: argparse.Namespace) -> Variant:
    """Return the deployment that the command line describes."""
    merge = None if options.deploy_lora in (None, "beside") else options.deploy_lora
    if merge and options.deploy_merged:
        raise UserError("--deploy_lora: the LoRA is in the file already (--deploy_merged); remove one of the two")
    if options.deploy_strength != 1.0 and options.deploy_merged:
        raise UserError("--deploy_strength: a merged file has its strength in it; remove one of the two flags")
    if not options.lora and (merge or options.deploy_merged or options.deploy_strength != 1.0):
        raise UserError("--deploy_lora, --deploy_merged, --deploy_strength: there is no LoRA; give --lora")
    model_type = options.model_type or likely_type(str(options.model))
    row = MODEL_TYPES[model_type]
    parts = {name: getattr(options, f"deploy_{name}") for name in TEXT_FILES}
    for name in (name for name, path in parts.items() if path and name not in row.files):
        raise UserError(f"--deploy_{name}: {model_type} has no such file; it has {', '.join(row.files)}")
    if options.deploy_t5_tokens and "t5xxl" not in row.files:
        raise UserError(f"--deploy_t5_tokens: {model_type} has no T5; remove it")
    vae = {"ae" if "ae" in row.files else "vae": options.deploy_vae}
    return Variant(
        weights=True,
        merge=merge,
        activations=None if options.activations in (None, "none") else options.activations,
        lora_without=tuple(options.deploy_lora_without),
        text=_served(parts, options.deploy_text_dtype),
        vae=_served(vae, options.deploy_vae_dtype),
        timestep=(PRECISIONS | {"fp8": torch.float8_e4m3fn})[options.timestep],
        **{name: getattr(options, name) for name in ("attention", "paste", *CONDITIONING)},
        **{name: getattr(options, f"deploy_{name}") for name in ("strength", "guidance", "shift", "t5_tokens")},
    )


def as_served(options: argparse.Namespace, models: Models, declared: Variant) -> tuple[Variant, list[Merging]]:
    """Return ``declared`` with what the server does where no flag says otherwise, and its ways to merge."""
    if options.activations is None and models.roundings(replace(declared, activations="auto")):
        declared = replace(declared, activations="auto")
    if options.deploy_lora is not None or options.deploy_merged or not models.transformer_lora:
        return declared, []
    merges = list(models.server.merges)
    return (replace(declared, merge=merges[-1].how) if merges else declared), merges


def _served(files: Mapping[str, object], dtype: PartDtype | None) -> Served | None:
    """Return the part that the flags describe; None where they say nothing of it."""
    given = tuple((option, value) for option, value in files.items() if value is not None)
    return Served(given, dtype) if given or dtype else None


def server_pictures(options: argparse.Namespace) -> list[ServerPicture]:
    """Return the pictures that the command line names."""
    files, seeds = options.server_image, options.server_seed
    if not files:
        if seeds or options.server_steps:
            raise UserError("--server_seed, --server_steps: there is no picture; give --server_image")
        return []
    if not seeds or not options.server_steps:
        raise UserError(
            "--server_image: a picture does not say what noise it began from; give --server_seed and --server_steps"
        )
    if len(seeds) not in (1, len(files)):
        raise UserError(f"--server_seed: {len(seeds)} for {len(files)} pictures; give one, or one for each")
    seeds = seeds * len(files) if len(seeds) == 1 else seeds
    found = []
    for text, seed in zip(files, seeds, strict=True):
        path, _, name = (text, "", "") if Path(text).exists() else text.rpartition("=")
        if not Path(path or text).is_file():
            raise UserError(f"--server_image {path or text}: no such file; check the path")
        found.append(ServerPicture(Path(path), seed, name))
    return found


def _check_fix(options: argparse.Namespace) -> None:
    """Refuse what fixes cannot be tried on."""
    join = "write it into one file first: tools/merge_lora.py --lora a.safetensors:0.8 --save_to one.safetensors"
    if len(options.lora) != 1 or lora_source(options.lora[0]).ratio != 1.0:
        raise UserError(f"--fix: refits one LoRA at strength 1; {join}")
    if options.deploy_merged:
        raise UserError(
            "--fix: refits a LoRA beside the weights, and --deploy_merged has it inside; deploy the fp8 base"
        )
    if not options.steps:
        raise UserError("--fix: judges by finished images; give --steps 4 or more")


def _loras(files: Sequence[str], models: Models, console: Console) -> dict[str, dict[str, AddedWeights]] | None:
    """Return component -> layer -> weights of LoRA files; None of no file."""
    sources = [lora_source(text) for text in files]
    for source in sources:
        if any(key.endswith(DoraWeights.marks) for key in read_safetensors_header(weight_file(source.path))):
            _refuse_dora(source, models)
    return read_loras(sources, models.family, console) if sources else None


def _refuse_dora(source: LoraSource, models: Models) -> None:
    """Raise a UserError that says what ComfyUI makes of a DoRA: the report attaches and merges LoRAs only."""
    found = load_trainable(source.path, models.targets).weights
    doras = models.targets.by_component({n: w for n, w in found.items() if isinstance(w, DoraWeights)})
    model = models.base(deployed=False)

    def error(how: Merge) -> float:
        layers = cast(Mapping[str, DoraWeights], doras.get(models.targets.file_prefix, {}))
        return dora_error(layers, lambda name: numbers(model.get_submodule(name)), source.ratio, how)

    raise UserError(
        f"{source.path}: is a DoRA, which the report compares only when it is merged. ComfyUI with dynamic VRAM merges "
        f"it in bf16, {error('unrounded'):.0%} of its update off, with --disable-dynamic-vram in fp16, "
        f"{error('stochastic_fp16'):.1%} off, and Bypass leaves its magnitude out; start it with that flag, or "
        "serve a merged model (tools/merge_lora.py) and report on that with --deploy_merged"
    )


def _report_distilled(options: argparse.Namespace, console: Console) -> None:
    """Compare base and distilled model; write the report.

    Raises:
        UserError: there is no such model, or no LoRA, or a flag is of a deployment.
    """
    if not options.lora:
        raise UserError("--distilled: compares the effect of a LoRA; give --lora")
    path = Path(options.distilled).expanduser()
    if not path.exists():
        raise UserError(f"--distilled {options.distilled}: no such file or folder; check the path")
    if path.suffix == ".safetensors" and is_lora(read_safetensors_header(path)):
        raise UserError(
            f"--distilled {path}: a LoRA, not a model; merge it into the model first (tools/merge_lora.py), give that"
        )
    flags = [f"the flags of {name}" for name in variant_of(options).changes() if name != "weights"]
    flags += [f"--{name}" for name in ("deploy", "server", "server_image") if getattr(options, name)]
    if flags or options.fix is not None:
        raise UserError(f"{[*flags, '--fix'][0]}: only with --deploy; leave out --distilled, or make two reports")
    plan = calibration_plan(options, options.model)
    models = Models(plan.config, DeployedWeights(path.name, path, None), {}, plan.dtype, plan.device)
    models.loras = _loras(options.lora, models, console) or {}
    eval_set = prepare_eval_set(models, plan.prepare(console), REFERENCE, options.steps)
    served = _loras(options.distilled_lora, models, Console(quiet=True))
    found = compare_distilled(models, eval_set, options.distilled_steps, console, served)
    sources = [lora_source(text) for text in options.lora]
    can_mend = found.alarm and found.share and len(sources) == 1 and sources[0].ratio == 1
    remedies = of_distilled(found.equal, sources[0].path) if can_mend else []
    paths = write_distilled(found, f"{Path(options.model).name}, served as {found.name}", options.save_to, remedies)
    console.print(found.sentence(), *(each.words for each in remedies), sep="\n")
    console.print(*map(str, paths), sep="\n")


@exit_on_user_error
def main() -> None:
    """Parse the command line, measure, write the report."""
    options = parser().parse_args()
    console = Console(highlight=False, soft_wrap=True, markup=False, width=None if sys.stdout.isatty() else 120)
    if options.distilled is not None:
        _report_distilled(options, console)
        return
    if options.distilled_lora or options.distilled_steps:
        raise UserError("--distilled_lora, --distilled_steps: have no effect without --distilled; give it")
    if options.deploy is None:
        raise UserError("--deploy: say what is served: a file, a folder or a recipe; or give --distilled")
    declared, pictures = variant_of(options), server_pictures(options)
    deployed = parse_deployment(options.deploy, options.deploy_merged)
    plan = calibration_plan(options, options.model)
    models = Models(plan.config, deployed, {}, plan.dtype, plan.device)
    if options.server:
        models.server = BY_NAME[options.server]
    models.loras = _loras(options.lora, models, console) or {}
    models.check(declared, options.steps, options.masked_loss)
    declared, merges = as_served(options, models, declared)
    console.print(f"server: {models.describe_server(declared)}")
    variant = complete(models, declared)
    models.check(variant, options.steps, options.masked_loss)
    if options.fix is not None:
        _check_fix(options)
    calibration = plan.prepare(console)
    given = as_program_gives(models, variant, calibration)
    by_itself = given.changes().keys() - variant.changes().keys()
    variant, same = settle(models, given, calibration, options.steps)
    for cause in variant.changes().keys() - declared.changes().keys() - by_itself:
        what = "; ".join([models.words(cause, getattr(variant, cause)), *fields(models, variant, cause)])
        console.print(f"note: {models.deployed.name} differs in more than weights: {what}")
    for cause in variant.changes().keys() & by_itself:
        says = f"{models.server.words}: by itself it gives {models.words(cause, getattr(variant, cause))}"
        console.print(f"note: {says} of training; --{FLAGS[cause]} says what yours does")
    report = measure(
        models,
        [(replace(variant, merge=each.how), each) for each in merges] or [(variant, None)],
        calibration,
        console,
        steps=options.steps,
        reference_loras=_loras(options.reference_lora, models, Console(quiet=True)),
    )
    files = [lora_source(text).path for text in options.lora]
    report = with_remedies(replace(report, same=same), models, plan.options, files, sys.argv[1:])
    if options.fix is not None:
        wanted = FixOptions(
            folder=options.save_to / "fixes",
            lora=lora_source(options.lora[0]).path,
            calibration=plan.options,
            names=tuple(options.fix or FIXES),
        )
        fixes = try_fixes(models, report.variant, report.eval_set, report.reference, wanted, console)
        report = replace(report, fixes=fixes)
    if pictures:
        server = explain_server(models, report.variant, calibration, pictures, options.server_steps, console)
        report = with_server(report, server)
    paths = write_report(report, options.save_to)
    console.print(*report.lines(), sep="\n")
    if report.fixes:
        console.print(fix_table(report.fixes, report.full))
    console.print(*map(str, paths), sep="\n")


if __name__ == "__main__":
    main()
