"""A LoRA step on an fp8 base beside the same step on bf16: Tandem's, and diffusers + peft's as the kohya trainers run.

One FLUX-shaped transformer of random numbers (1 double and 2 single blocks), rank-16 LoRA in fp32 on every
linear layer of the blocks, bf16 autocast, 512 image and 128 text tokens, AdamW. The cases:

    tandem bf16, tandem fp8 cast / tensor / row / block64      Fp8Linear, weights in fp8 as each granularity has them
    peers bf16                                                 diffusers + peft
    peers fp8                                                  the same with the base's weights cast to fp8; autocast
                                                               casts them up for each product and keeps the
                                                               copies

How time and memory are taken: ``bench/measure.py``. `weights` is the size of the base.

    python bench/fp8_step.py [--json PATH] [--widths 1536,3072] [--rounds 8] [--checkpointing]
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from bench.families import (
    FAMILIES,
    LoraStep,
    build_transformer,
    call_transformer,
    peft_lora,
    quantise_for_cpu,
    tandem_lora,
)
from bench.measure import benchmark_parser, finish, measure_memory, measure_time
from library.errors import exit_on_user_error

CASES = (
    "tandem bf16",
    "tandem fp8 cast",
    "tandem fp8 tensor",
    "tandem fp8 row",
    "tandem fp8 block64",
    "peers bf16",
    "peers fp8",
)
RANK = 16


def build(case: str, width: int, checkpointing: bool) -> LoraStep:
    """Load ``case``."""
    family = FAMILIES["flux"]
    sizes = replace(family.full, width=width, blocks=family.few_blocks, image_sides=(16, 32), text_tokens=128)
    transformer: Any = build_transformer(family, sizes, torch.bfloat16)
    if case.startswith("peers"):
        trained = peft_lora("flux", transformer, RANK, fp8_cast="fp8" in case)
    else:
        trained = _tandem(transformer, case)
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    return LoraStep(transformer, trained, call_transformer, family.inputs(sizes, torch.device("cpu")), autocast=True)


def _tandem(transformer: nn.Module, case: str) -> list[nn.Parameter]:
    FAMILIES["flux"].optimise_forward(transformer)
    if "fp8" in case:
        quantise_for_cpu(transformer, case.split()[-1])
    return tandem_lora("flux", transformer, RANK)


def ratios(rows: list[dict]) -> dict[str, float]:
    """Return the worst ratio over widths and granularities, as DESIGN §6 names them."""
    time_own, memory_own, time_peers, total = [], [], [], []
    for width in {row["width"] for row in rows}:
        by_case = {row["case"]: row for row in rows if row["width"] == width}
        bf16, peer = by_case["tandem bf16"], by_case["peers fp8"]
        for case, row in by_case.items():
            if case.startswith("tandem fp8"):
                time_own.append(row["step_s"] / bf16["step_s"])
                memory_own.append(row["added_mib"] / bf16["added_mib"])
                time_peers.append(row["step_s"] / peer["step_s"])
                total.append((bf16["peak_mib"] - row["peak_mib"]) / (bf16["weights_mib"] - row["weights_mib"]))
    return {
        "time_fp8_over_bf16": max(time_own),
        "memory_fp8_over_bf16": max(memory_own),
        "time_fp8_over_peers_fp8": max(time_peers),
        "peak_saved_over_weights_saved": min(total),
    }


@exit_on_user_error
def main() -> None:
    """Measure, print a table, write JSON if asked."""
    parser = benchmark_parser(__doc__, rounds=8)
    parser.add_argument("--widths", default="1536,3072", help="transformer widths, multiples of 128")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    cases = options.cases.split(",")
    rows: list[dict] = []
    print(f"{'width':>5}  {'case':<20} {'step, CPU s':>11}  {'adds MiB':>8}  {'peak MiB':>8}  {'weights MiB':>11}")
    for width in map(int, options.widths.split(",")):
        steps = {case: (build, (case, width, options.checkpointing)) for case in cases}
        memory = {case: measure_memory(case, step) for case, step in steps.items()}
        seconds = measure_time(steps, options.rounds)
        for case in cases:
            step = statistics.median(seconds[case])
            row = {"width": width, "case": case, "step_s": step, "step_min_s": min(seconds[case]), **memory[case]}
            rows.append(row)
            sizes = f"{row['added_mib']:8.0f}  {row['peak_mib']:8.0f}  {row['weights_mib']:11.0f}"
            print(f"{width:>5}  {case:<20} {step:11.3f}  {sizes}", flush=True)
    found = ratios(rows) if set(CASES) >= set(cases) >= {"tandem bf16", "tandem fp8 cast", "peers fp8"} else {}
    finish(rows, found, options.json)


if __name__ == "__main__":
    main()
