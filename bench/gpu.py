"""Is training right on a card, how fast, in how much memory: one script for a machine that is lent for minutes.

Parts, in this order (``--parts`` names some of them):

    checks    side by side, no time is measured: 5 steps of tiny models on the card beside the CPU's, which come first;
              steps as one graph and compiled beside eager ones; every attention kernel; fp8 and int8 products
    flux      FLUX.1 in bf16 and fp8, eager, compiled and as one graph, with diffusers + peft beside them. How far the
              losses and gradients of two steps are from those in bf16, eager, stands beside the times: a full model's
              steps on a CPU take too long to compare with
    families  Qwen-Image, Z-Image, Krea 2 and FLUX.2 klein 9B, compiled and as one graph

A step is that of ``train_lora.py`` (``bench/card_step.py``): published depth and width, random weights, 1024 x 1024
pixels, 512 text tokens, rank 16, every block recomputed. Each case runs in a process of its own with a time limit: one
that fails, runs out of memory or needs a package that is not there is a row that says so. A part that takes too long
ends at its own limit. Reported are the median seconds of a step and the peak of allocated memory; tools/plan_memory.py
counts memory without a card.

Besides torch, transformers, accelerate and peft this needs what requirements/gpu.txt lists; ``make gpu-bundle`` packs
it for a machine that has a card and no network.

    python bench/gpu.py [--json PATH] [--minutes 9.5] [--parts checks flux] [--only TEXT]
    python bench/gpu.py --device cpu --tiny        # does every case run?
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import torch

from bench.card_step import StepCase, measured, reset, timing
from bench.families import FAMILIES, LoraStep, build_transformer, example_inputs, peft_lora
from bench.measure import Children, Job, Table, benchmark_parser, finish, machine_name
from library.errors import UserError, exit_on_user_error
from library.nn.attention import KernelName

FLUX, FP8 = StepCase("flux"), StepCase("flux", "row")
OTHERS = ("qwen_image", "z_image", "krea2", "flux2_klein")
FASTEST = [StepCase(family, compiled=True, graph=True) for family in OTHERS]
PEFT = "flux, bf16, diffusers + peft"
PARTS = ("checks", "flux", "families")
_ERRORS = {"loss_error": "10.1e", "gradient_error": "14.1e", "graph_error": "11.1e"}
_CHECK_COLUMNS = {"case": "<50", **_ERRORS, "limit": "6.2f", "verdict": "<8"}
_STEP_COLUMNS = {"case": "<40", "first_s": "8.1f", "step_s": "7.3f", "peak_gib": "8.1f", **_ERRORS}
_CASE_SECONDS, _LONG_SECONDS = 120, 150  # a first compiled step takes a minute; less with what is cached on disk
_CHECKED_STEPS, _FULL_STEPS, _TIMED_STEPS = 5, 2, 5
_SIDE_BY_SIDE = max(2, (os.cpu_count() or 2) - 2)  # processes


class Part(NamedTuple):
    """Jobs, the columns of their table, how many run side by side, and the seconds that they have."""

    title: str
    jobs: list[Job]
    columns: dict[str, str]
    seconds: float
    together: int = 1


class Check(NamedTuple):
    """A case beside a reference, and how far its losses and gradients may be off."""

    case: StepCase
    reference: str
    limit: float

    def job_name(self) -> str:
        """Return the name of its row."""
        return f"{self.case.name()} on the card"


@exit_on_user_error
def main() -> None:
    """Measure all parts."""
    # Asking the driver instead would make processes that are forked after an import that asks unable to use the card.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    parser = benchmark_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--only", default="", help="run the cases whose name holds this text")
    parser.add_argument("--minutes", type=float, default=9.5, help="all ends then (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that every case runs")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("bench/gpu.py: needs a CUDA GPU; --device cpu --tiny runs every case, tiny, on the CPU")
    if options.device == "cpu" and not options.tiny:
        raise UserError("--device: published sizes would take hours on a CPU; add --tiny")
    every = [part for part in parts(options.tiny) if part.title in options.parts]
    chosen = [part._replace(jobs=[job for job in part.jobs if options.only in job.name]) for part in every]
    if not any(part.jobs for part in chosen):
        raise UserError(f"--only: no case's name holds {options.only!r}; leave it out to see the names")
    rows = run(chosen, Children(options.device, options.minutes), options.tiny)
    machine = f"{torch.cuda.get_device_name()}, {machine_name()}" if options.device == "cuda" else machine_name()
    finish(rows, ratios(rows), options.json, machine)


def parts(tiny: bool) -> list[Part]:
    """Return all that is measured; what is compared with comes before."""
    return [
        Part("checks", reference_jobs(), {"case": "<50"}, 80, _SIDE_BY_SIDE),
        Part("checks", check_jobs(), _CHECK_COLUMNS, 120, _SIDE_BY_SIDE),
        Part("flux", flux_jobs(tiny), _STEP_COLUMNS, 240),
        Part("families", [step_job(case, tiny) for case in FASTEST], _STEP_COLUMNS, 240),
    ]


def checks() -> list[Check]:
    """Return what is compared: on tiny models, of FLUX.1 every way to compute a step, of others the step.

    Limits: fp32 has 24 bits, of which products in TF32, which training leaves off, would lose 13. bf16 has 8; a step of
    some dozen layers is a few percent off, kernels that add in another order are too. A graph runs the same kernels.
    """
    exact, int8 = replace(FLUX, mixed_precision="no"), StepCase("flux", "int8_row")
    found = [Check(case, case.name(), limit) for case, limit in ((exact, 1e-3), (FLUX, 0.05), (FP8, 0.1), (int8, 0.1))]
    kernels = [replace(FLUX, attention=name) for name in get_args(KernelName) if name != "auto"]
    found += [Check(case, FLUX.name(), 0.05) for case in kernels]
    fused = [replace(case, compiled=True, graph=True) for case in (FLUX, FP8, int8)]
    found += [Check(case, replace(case, compiled=False, graph=False).name(), 0.05) for case in fused]
    found += [Check(replace(case, graph=True), case.name(), 0.05) for case in (FLUX, FP8)]
    return found + [Check(StepCase(name, graph=True), StepCase(name).name(), 0.05) for name in OTHERS]


def reference_jobs() -> list[Job]:
    """Return the steps that :func:`checks` compare with, on the CPU."""
    cases = {check.reference: check.case for check in checks()}.values()
    plain = [replace(case, compiled=False, graph=False, attention="auto") for case in cases]
    steps = (_CHECKED_STEPS, 0, True, ())
    return [Job(f"{case.name()} on a CPU", measured, (case, *steps), _LONG_SECONDS, on_cpu=True) for case in plain]


def check_jobs() -> list[Job]:
    """Return the steps of :func:`checks` on the card."""
    steps = (_CHECKED_STEPS, 0, True, ())
    return [Job(check.job_name(), measured, (check.case, *steps), _LONG_SECONDS) for check in checks()]


def flux_jobs(tiny: bool) -> list[Job]:
    """Return FLUX.1 in six rows, first the one that others are compared with."""
    one, other = (step_job(replace(case, compiled=True, graph=True), tiny) for case in (FLUX, FP8))
    return [step_job(FLUX, tiny), one, other, Job(PEFT, peft, (tiny,), _CASE_SECONDS), step_job(FP8, tiny)]


def step_job(case: StepCase, tiny: bool) -> Job:
    """Return what measures ``case``; of one with a graph both without and with it."""
    steps, timed = (_FULL_STEPS, 1 if tiny else _TIMED_STEPS)
    return Job(case.name(), measured, (case, steps, timed, tiny, ()), _CASE_SECONDS)


def peft(tiny: bool, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a step of diffusers + peft on FLUX.1, every block recomputed.

    It cannot train with cuDNN's attention, whose backward is wrong for views: flash takes its place.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    few = {"width": 256, "head_dim": 64, "blocks": (2, 4), "image_sides": (8, 8), "text_tokens": 64} if tiny else {}
    sizes = replace(FAMILIES["flux"], **few)
    transformer = build_transformer("flux", sizes, torch.bfloat16, str(device))
    trained = peft_lora("flux", transformer)
    transformer.enable_gradient_checkpointing()
    step = LoraStep(transformer, trained, example_inputs("flux", sizes, device))
    reset(device)
    yield {"weights_gib": step.base_bytes / 2**30} | timing(step, 1 if tiny else _TIMED_STEPS, device)


def run(chosen: list[Part], children: Children, tiny: bool) -> list[dict[str, Any]]:
    """Run the parts; print each row as it comes, and return all."""
    rows, steps = list[dict[str, Any]](), dict[str, tuple[Any, Any]]()
    for part in chosen:
        print(f"\n{part.title}", flush=True)
        table, end = Table(part.columns), time.monotonic() + (math.inf if tiny else part.seconds)
        with ThreadPoolExecutor(part.together) as pool:
            began = {pool.submit(children.rows, job, end): job for job in part.jobs}
            for done in as_completed(began):
                for found in done.result():
                    name = began[done].name
                    name = name if found.get("graphed", True) else name.replace(", graph", "")
                    table.add({"case": name} | compared(name, found, steps))
        rows += table.rows
    return rows


def compared(name: str, row: dict[str, Any], steps: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Return a row with how far its losses and gradients are off its reference's; of a check, what that means.

    ``steps``: losses and gradients of the cases so far, by name; those of ``row`` are added.
    """
    named = {check.job_name(): check for check in checks()}
    check = ({each.replace(", graph", ""): check for each, check in named.items()} | named).get(name)
    own = None
    if "gradients" in row:
        own = steps[name] = np.array(row.pop("losses")), row.pop("gradients")
    reference = FLUX.name() if name.startswith("flux, ") and not name.endswith("on a CPU") else None
    if check is not None:
        reference = f"{check.reference} on a CPU"
        row |= {"limit": check.limit, "verdict": "failed" if "error" in row else "?"}
    if own is None or reference not in steps:
        return row
    (losses, gradients), (right, wanted) = own, steps[reference]
    row["loss_error"] = float(np.abs(losses / right - 1).max())
    row["gradient_error"] = float(np.linalg.norm(gradients - wanted) / np.linalg.norm(wanted))
    if check is not None:
        worst = max(row["loss_error"], row["gradient_error"], row.get("graph_error", 0.0))
        row["verdict"] = "right" if worst <= check.limit else "WRONG"
    return row


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return how many checks failed, and steps of FLUX.1: fp8 over bf16, and both over diffusers + peft."""
    seconds = {row["case"]: row["step_s"] for row in rows if "step_s" in row}
    verdicts = [row["verdict"] for row in rows if "verdict" in row]
    found = {"checks_not_right": float(len(verdicts) - verdicts.count("right"))} if verdicts else {}
    ways = {"eager": {}, "compiled": {"compiled": True}, "graph": {"compiled": True, "graph": True}}
    for way, changes in ways.items():
        bf16, fp8 = (replace(case, **changes).name() for case in (FLUX, FP8))
        for name, one, other in (("fp8_over_bf16", fp8, bf16), ("bf16_over_peft", bf16, PEFT)):
            if {one, other} <= seconds.keys():
                found[f"{name}_{way}"] = seconds[one] / seconds[other]
    return found


if __name__ == "__main__":
    main()
