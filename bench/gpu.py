"""Full-size training steps on one CUDA GPU: language models, then LoRAs on image models beside diffusers + peft.

Language models climb the ladder of ``bench/gpu_llm.py``, from fp32 to everything that makes them fast.

LoRAs are trained in every precision and memory policy. Published depth and width, random weights, 1024 x 1024 pixels
and 512 text tokens, rank 16 on every layer that is trained by default, LoRA weights in fp32 under bf16 autocast, AdamW.
Each case runs in a process of its own with a time limit: one that fails or runs out of memory is a row that says so.
Reported are the median seconds of a step, the peak of allocated device memory, and the model FLOP utilisation: what a
step needs (no weight gradients, no recomputation) over what the card's bf16 matrix products, measured first, would do
in that time. At last come steps in each layout of several GPUs, or of one and the CPU (``bench/gpu_layouts.py``).

    python bench/gpu.py [--json PATH] [--minutes 10] [--families llm,flux,qwen_image] [--only TEXT]
    python bench/gpu.py --device cpu --tiny        # does every case run?
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import bench.gpu_llm as gpu_llm
from bench.families import FAMILIES
from bench.gpu_cases import GpuCase, build, cases, sizes_of
from bench.gpu_layouts import layouts_for, measure_layout, processes_of
from bench.measure import machine_name, run_with_limit, time_steps, wait_for, write_report
from library.errors import UserError, did_you_mean, exit_on_user_error

_LLM = "llm"
_CASE_SECONDS = 150  # of which compilation takes up to a minute
_LADDER_SECONDS = 120  # both together stay near three minutes


def measure(case: GpuCase, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Return step seconds and peak bytes of ``case``; call it in a fresh process."""
    step = build(case, device, tiny)
    seconds, peak = time_steps(step.loss, device, once=tiny)
    return {"step_s": seconds, "peak_gib": peak / 2**30, "weights_gib": step.base_bytes / 2**30}


def matmul_rate(device: torch.device, tiny: bool) -> float:
    """Return the FLOP/s of bf16 matrix products, 8192 a side."""
    side = 256 if tiny else 8192
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    b = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    repeats, seconds = 20, float("inf")
    for _ in range(3):  # the first warms up
        wait_for(device)
        begun = time.perf_counter()
        for _ in range(repeats):
            a @ b
        wait_for(device)
        seconds = min(seconds, time.perf_counter() - begun)
    return 2.0 * side**3 * repeats / seconds


class Children:
    """Processes that measure, each with a time limit; none begins after the end.

    Attributes:
        place: the flags that say where, and how large models are.
    """

    def __init__(self, device: str, tiny: bool, minutes: float) -> None:
        self.place = ["--device", device, *(["--tiny"] if tiny else [])]
        self._end = time.monotonic() + 60 * minutes

    def rows(self, case: dict[str, Any], seconds: float, processes: int = 1) -> list[dict[str, Any]]:
        """Return what the process that measures ``case`` printed; the last is {"error": why} if it did not end well."""
        limit = min(seconds, self._end - time.monotonic())
        if limit <= 0:
            return [{"error": "left out: the time was up"}]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *(launcher if processes > 1 else []), __file__]
        command += ["--case", json.dumps(case), *self.place]
        try:
            done = run_with_limit(command, limit)
        except subprocess.TimeoutExpired as late:
            return [*_rows(late.stdout), {"error": f"stopped after {limit:.0f} s"}]
        if done.returncode == 0:
            return _rows(done.stdout)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        why = "out of memory" if "OutOfMemoryError" in done.stderr else f"exit code {done.returncode}: {last}"
        return [*_rows(done.stdout), {"error": why}]

    def rate(self) -> float | None:
        """Measure the card's matrix products, print their FLOP/s and return them; None if that failed."""
        found = self.rows({"rate": True}, _CASE_SECONDS)[-1]
        rate = found.get("rate")
        print(f"bf16 matrix products: {f'{rate / 1e12:.1f} TFLOP/s' if rate else found['error']}", flush=True)
        return rate


def _rows(printed: str) -> list[dict[str, Any]]:
    """Return the rows among the lines, which libraries may have added to; a last one cut short is left out."""
    whole = printed[: printed.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]


def run_ladders(models: list[str], children: Children, rate: float | None) -> list[dict[str, Any]]:
    """Let language models climb, each in a process of its own; print each row, and return them."""
    print(gpu_llm.HEADING, flush=True)
    rows = []
    for model in models:
        for found in children.rows({"ladder": model}, _LADDER_SECONDS):
            row = {"case": f"{model}, the rest", "model": model} | found
            if "step_s" in row:
                row["mfu"] = row["flops_per_s"] / rate if rate else None
            rows.append(row)
            gpu_llm.show(row)
    return rows


def run_all(chosen: list[GpuCase], children: Children, rate: float | None, tiny: bool) -> list[dict[str, Any]]:
    """Run every case in a process of its own, print each row as it comes, and return them."""
    print(f"{'case':<48} {'s/step':>8} {'peak GiB':>9} {'weights':>8} {'MFU':>6}", flush=True)
    rows = []
    for case in chosen:
        row = {"case": case.name(), **asdict(case), **children.rows(asdict(case), _CASE_SECONDS)[-1]}
        if "step_s" in row:
            flops = FAMILIES[case.family].step_flops(sizes_of(case, tiny))
            row["mfu"] = flops / row["step_s"] / rate if rate else None
            figures = f"{row['step_s']:8.3f} {row['peak_gib']:9.1f} {row['weights_gib']:8.1f} {row['mfu'] or 0:6.1%}"
        else:
            figures = row["error"]
        rows.append(row)
        print(f"{row['case']:<48} {figures}", flush=True)
    return rows


def run_layouts(chosen: list[tuple[str, str]], children: Children, device: torch.device) -> list[dict[str, Any]]:
    """Run each (family, layout) in as many processes as it takes; print each row, and return them."""
    print(f"{'layout':<48} {'s/step':>8} {'peak GiB':>9} {'images':>8}", flush=True)
    rows = []
    for family, layout in chosen:
        asked = {"layout": layout, "family": family}
        found = children.rows(asked, _CASE_SECONDS, processes_of(layout, device))[-1]
        row = asked | {"case": f"{family}, {layout}"} | found
        figures = f"{row['step_s']:8.3f} {row['peak_gib']:9.1f} {row['images']:8}" if "step_s" in row else row["error"]
        rows.append(row)
        print(f"{row['case']:<48} {figures}", flush=True)
    return rows


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return Tandem over peft with checkpointing at batch 1, each policy over the same without it, and the ladders'."""
    by_name = {row["case"]: row for row in rows if "step_s" in row}
    found = gpu_llm.ratios(rows)
    for family in FAMILIES:
        saved = f"{family}, b1, tandem, bf16, checkpointing"
        pairs = {
            "over_peft": (saved, f"{family}, b1, peft, bf16, checkpointing"),
            "fp8_scaled_mm_over_bf16": (f"{family}, b1, tandem, fp8 scaled_mm, checkpointing", saved),
            "fp8_dequant_over_bf16": (f"{family}, b1, tandem, fp8 dequant, checkpointing", saved),
            "swap_16_over_none": (f"{family}, b1, tandem, bf16, checkpointing, swap 16", saved),
            "keep_8192_over_none": (f"{family}, b1, tandem, bf16, checkpointing, keep 8192", saved),
            "offload_over_none": (f"{family}, b1, tandem, bf16, checkpointing, offload", saved),
            "compiled_over_eager": (f"{family}, b1, tandem, bf16, checkpointing, compiled", saved),
        }
        for name, (one, other) in pairs.items():
            if one in by_name and other in by_name:
                found[f"{family}_time_{name}"] = by_name[one]["step_s"] / by_name[other]["step_s"]
                found[f"{family}_memory_{name}"] = by_name[one]["peak_gib"] / by_name[other]["peak_gib"]
    return found


def serve(case: dict[str, Any], device: torch.device, tiny: bool) -> None:
    """Print what a parent process asks for, a row a line."""
    if "ladder" in case:
        for row in gpu_llm.climb(case["ladder"], device, tiny):
            print(json.dumps(row), flush=True)  # at once: what is measured is kept if time runs out
    elif "layout" in case:
        row = measure_layout(case["family"], case["layout"], device, tiny)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(row), flush=True)
    elif "rate" in case:
        print(json.dumps({"rate": matmul_rate(device, tiny)}))
    else:
        print(json.dumps(measure(GpuCase(**case), device, tiny)))


@exit_on_user_error
def main() -> None:
    """Measure all cases, or the one that a parent process asks for."""
    families = [_LLM, *FAMILIES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--families", default=",".join(families), help="default: %(default)s")
    parser.add_argument("--only", default="", help="run the cases, and the language models, whose name holds this text")
    parser.add_argument("--minutes", type=float, default=9.5, help="no case begins after that")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that every case runs")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("bench/gpu.py: needs a CUDA GPU; --device cpu --tiny runs every case, tiny, on the CPU")
    if options.device == "cpu" and not options.tiny:
        raise UserError("--device: published sizes would take hours on a CPU; add --tiny")
    if options.case:
        serve(json.loads(options.case), torch.device(options.device), options.tiny)
        return
    asked = options.families.split(",")
    for family in asked:
        if family not in families:
            raise UserError(f"--families: no {family!r}{did_you_mean(family, families)}; choose {', '.join(families)}")
    ladders = [model for model in gpu_llm.LADDERS if _LLM in asked and options.only in model]
    chosen = [case for case in cases([f for f in asked if f != _LLM]) if options.only in case.name()]
    device = torch.device(options.device)
    pairs = [(family, layout) for family in asked if family != _LLM for layout in layouts_for(device)]
    layouts = [pair for pair in pairs if options.only in ", ".join(pair)]
    if not ladders and not chosen and not layouts:
        raise UserError(f"--only: no case's name holds {options.only!r}; leave it out to see the names")
    children = Children(options.device, options.tiny, options.minutes)
    rate = children.rate()
    rows = run_ladders(ladders, children, rate) if ladders else []
    rows += run_all(chosen, children, rate, options.tiny) if chosen else []
    rows += run_layouts(layouts, children, device) if layouts else []
    found = ratios(rows)
    for name, value in found.items():
        print(f"{name:<40} {value:.3f}")
    if options.json:
        machine = f"{torch.cuda.get_device_name()}, {machine_name()}" if options.device == "cuda" else machine_name()
        write_report(options.json, rows, found, machine)


if __name__ == "__main__":
    main()
