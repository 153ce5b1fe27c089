"""Full-size LoRA training steps on one CUDA GPU: Tandem in every precision and memory policy, beside diffusers + peft.

Published depth and width, random weights, 1024 x 1024 pixels and 512 text tokens, rank 16 on every layer that is
trained by default, LoRA weights in fp32 under bf16 autocast, AdamW. Each case runs in a process of its own with a time
limit: one that fails or runs out of memory is a row that says so. Reported are the median seconds of a step, the peak
of allocated device memory, and the model FLOP utilisation: what a step needs (no weight gradients, no recomputation)
over what the card's bf16 matrix products, measured first, would do in that time.

    python bench/gpu.py [--json PATH] [--minutes 10] [--only TEXT]
    python bench/gpu.py --smoke                    # tiny and on the CPU: does every case run?
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.families import FAMILIES
from bench.gpu_cases import GpuCase, build, cases, sizes_of
from bench.measure import machine_name, reset_peak, resident, write_report
from library.errors import UserError, exit_on_user_error

_CASE_SECONDS = 150  # of which compilation takes up to a minute
_WARM_STEPS, _TIMED_STEPS = 2, 5


def measure(case: GpuCase, smoke: bool) -> dict[str, Any]:
    """Return step seconds and peak bytes of ``case``; call it in a fresh process."""
    device = torch.device("cpu" if smoke else "cuda")
    step = build(case, device, smoke)
    for _ in range(_WARM_STEPS):  # choose kernels, compile
        loss = step.loss()
    _forget_peak(device)
    seconds = []
    for _ in range(1 if smoke else _TIMED_STEPS):
        _wait(device)
        begun = time.perf_counter()
        loss = step.loss()
        _wait(device)
        seconds.append(time.perf_counter() - begun)
    if not torch.isfinite(loss):
        raise RuntimeError(f"loss is {loss.item()}")
    peak = resident("VmHWM") if smoke else torch.cuda.max_memory_allocated()
    return {"step_s": statistics.median(seconds), "peak_gib": peak / 2**30, "weights_gib": step.base_bytes / 2**30}


def matmul_rate(smoke: bool) -> float:
    """Return the FLOP/s of bf16 matrix products, 8192 a side."""
    device, side = torch.device("cpu" if smoke else "cuda"), 256 if smoke else 8192
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    b = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    repeats, seconds = 20, float("inf")
    for _ in range(3):  # the first warms up
        _wait(device)
        begun = time.perf_counter()
        for _ in range(repeats):
            a @ b
        _wait(device)
        seconds = min(seconds, time.perf_counter() - begun)
    return 2.0 * side**3 * repeats / seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak()


def run_all(chosen: list[GpuCase], smoke: bool, minutes: float) -> list[dict[str, Any]]:
    """Run every case in a process of its own, print each row as it comes, and return them."""
    end = time.monotonic() + 60 * minutes
    rate = _child({"rate": True}, smoke, end).get("rate")
    print(f"bf16 matrix products: {(rate or 0) / 1e12:.1f} TFLOP/s")
    print(f"{'case':<48} {'s/step':>8} {'peak GiB':>9} {'weights':>8} {'MFU':>6}")
    rows = []
    for case in chosen:
        found = _child(asdict(case), smoke, end)
        row = {"case": case.name(), **asdict(case), **found}
        if "step_s" in row:
            flops = FAMILIES[case.family].step_flops(sizes_of(case, smoke))
            row["mfu"] = flops / row["step_s"] / rate if rate else None
            figures = f"{row['step_s']:8.3f} {row['peak_gib']:9.1f} {row['weights_gib']:8.1f} {row['mfu'] or 0:6.1%}"
        else:
            figures = row["error"]
        rows.append(row)
        print(f"{row['case']:<48} {figures}", flush=True)
    return rows


def _child(case: dict[str, Any], smoke: bool, end: float) -> dict[str, Any]:
    """Return what the process that measures ``case`` printed, or {"error": why there is nothing}."""
    limit = min(_CASE_SECONDS, end - time.monotonic())
    if limit <= 0:
        return {"error": "left out: the time was up"}
    command = [sys.executable, __file__, "--case", json.dumps(case), *(["--smoke"] if smoke else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {limit:.0f} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if "OutOfMemoryError" in done.stderr:
        return {"error": "out of memory"}
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"error": f"exit code {done.returncode}: {last}"}


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return Tandem over peft with checkpointing at batch 1, and each policy over the same without it."""
    by_name = {row["case"]: row for row in rows if "step_s" in row}
    found: dict[str, float] = {}
    for family in FAMILIES:
        saved = f"{family}, b1, tandem, bf16, checkpointing"
        pairs = {
            "over_peft": (saved, f"{family}, b1, peft, bf16, checkpointing"),
            "fp8_scaled_mm_over_bf16": (f"{family}, b1, tandem, fp8 scaled_mm, checkpointing", saved),
            "fp8_dequant_over_bf16": (f"{family}, b1, tandem, fp8 dequant, checkpointing", saved),
            "swap_16_over_none": (f"{family}, b1, tandem, bf16, checkpointing, swap 16", saved),
            "compiled_over_eager": (f"{family}, b1, tandem, bf16, checkpointing, compiled", saved),
        }
        for name, (one, other) in pairs.items():
            if one in by_name and other in by_name:
                found[f"{family}_time_{name}"] = by_name[one]["step_s"] / by_name[other]["step_s"]
                found[f"{family}_memory_{name}"] = by_name[one]["peak_gib"] / by_name[other]["peak_gib"]
    return found


@exit_on_user_error
def main() -> None:
    """Measure all cases, or the one that a parent process asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--only", default="", help="run the cases whose name holds this text")
    parser.add_argument("--minutes", type=float, default=9.5, help="no case begins after that")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        raise UserError("bench/gpu.py: needs a CUDA GPU; --smoke runs every case, tiny, on the CPU")
    if options.case:
        case = json.loads(options.case)
        rate = "rate" in case
        print(json.dumps({"rate": matmul_rate(options.smoke)} if rate else measure(GpuCase(**case), options.smoke)))
        return
    chosen = [case for case in cases(options.families.split(",")) if options.only in case.name()]
    rows = run_all(chosen, options.smoke, options.minutes)
    found = ratios(rows)
    for name, value in found.items():
        print(f"{name:<40} {value:.3f}")
    if options.json:
        machine = machine_name() if options.smoke else f"{torch.cuda.get_device_name()}, {machine_name()}"
        write_report(options.json, rows, found, machine)


if __name__ == "__main__":
    main()
