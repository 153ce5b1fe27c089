"""Full-size training steps on one CUDA GPU: LoRAs on image models beside diffusers + peft, then language models.

LoRAs are trained in every precision and memory policy. Published depth and width, random weights, 1024 x 1024 pixels
and 512 text tokens, rank 16 on every layer that is trained by default, LoRA weights in fp32 under bf16 autocast, AdamW.
Each case runs in a process of its own with a time limit: one that fails, runs out of memory or needs a package that is
not there is a row that says so. The cases that tell most come first, a family at a time: a run that is out of time ends
in the middle. Reported are the median seconds of a step, the peak of allocated device memory, and the utilisation of
model FLOPs (MFU): what a step needs, without weight gradients and recomputation, over what the card's bf16 matrix
products, measured first, would do in that time. Rows with "graph" capture forward and backward as one CUDA graph and
replay it.

Then language models climb the ladder of ``bench/llm_ladder.py``, from fp32 to everything that makes them fast.

Besides torch, transformers, accelerate and peft this needs what requirements/gpu.txt lists; ``make gpu-bundle`` packs
it for a machine that has a card and no network.

    python bench/gpu.py [--json PATH] [--minutes 8] [--families flux,qwen_image,llm] [--only TEXT]
    python bench/gpu.py --device cpu --tiny        # does every case run?
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import bench.llm_ladder as llm_ladder
from bench.families import (
    FAMILIES,
    LoraStep,
    Sizes,
    build_transformer,
    example_inputs,
    peft_lora,
    tandem_network,
)
from bench.measure import Table, benchmark_parser, finish, machine_name, reason, start, time_steps, wait_for
from library.config.schema import TrainingConfig
from library.errors import UserError, did_you_mean, exit_on_user_error
from library.models.family_by_name import family_class
from library.nn.checkpointing import neighbours
from library.precision.files.fp8 import loaded_scheme
from library.precision.recipe import Recipe, quantize_model
from library.training.memory.block_swap import swap_blocks
from library.training.memory.budget import recompute_blocks

_LLM = "llm"
_CASE_SECONDS = 150  # of which compilation takes up to a minute
_LADDER_SECONDS = 120
_WARM_STEPS = 3  # before a graph is captured
_END_SECONDS = 10  # in which a process that has sent all ends


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


class Job(NamedTuple):
    """What one process measures."""

    name: str
    case: dict[str, Any]  # what :func:`measured` takes
    seconds: float = _CASE_SECONDS


class Children:
    """Processes that measure, each job with a time limit; none begins after the end.

    Attributes:
        method: how a process starts. Forked from one that has imported the libraries it saves seconds a case.
    """

    def __init__(self, device: str, tiny: bool, minutes: float) -> None:
        self.method = "forkserver"
        self._device, self._tiny = torch.device(device), tiny
        self._end = time.monotonic() + 60 * minutes

    def rows(self, job: Job) -> list[dict[str, Any]]:
        """Return what the job's process found; the last is {"error": why} if it did not end well."""
        limit = min(job.seconds, self._end - time.monotonic())
        if limit <= 0:
            return [{"error": "left out: the time was up"}]
        rows, end = list[dict[str, Any]](), time.monotonic() + limit
        process, connection = start(_send, job.case, self._device, self._tiny, method=self.method)
        try:
            while connection.poll(max(0.0, end - time.monotonic())):
                said = _said(connection, process)
                if isinstance(said, str):
                    return [*rows, {"error": said}]
                if said is None:
                    process.join(_END_SECONDS)
                    return rows
                rows.append(said)
            return [*rows, {"error": f"stopped after {limit:.0f} s"}]
        finally:
            if process.is_alive():
                with suppress(ProcessLookupError):  # it has no group yet
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()


def _send(connection: Connection, case: dict[str, Any], device: torch.device, tiny: bool) -> None:
    """Send each row as it is measured, then None; or, in words, why there is none if it fails."""
    os.setsid()  # with the processes that compile for it in one group, to be stopped together
    try:
        for row in measured(case, device, tiny):
            connection.send(row)
    except Exception as error:  # whatever it is, the other cases are worth having
        connection.send(reason(error))
    else:
        connection.send(None)


def _said(connection: Any, process: Any) -> dict[str, Any] | str | None:
    try:
        return connection.recv()
    except EOFError:
        process.join(_END_SECONDS)
        return f"exit code {process.exitcode}, its error is above"


def run(jobs: list[Job], children: Children) -> list[dict[str, Any]]:
    """Measure the card's matrix products, then every job; print each row as it comes, and return them."""
    products = Job("bf16 matrix products", {"rate": True})
    found = children.rows(products)[-1]
    if "error" in found:  # a library may have touched the card as it was imported, which no fork survives
        children.method = "spawn"
        found = children.rows(products)[-1]
    rate = found.get("rate")
    print(f"bf16 matrix products: {f'{rate / 1e12:.1f} TFLOP/s' if rate else found['error']}", flush=True)
    sizes = {"step_s": "8.3f", "peak_gib": "8.1f", "weights_gib": "11.1f", "tokens_per_s": "12,.0f"}
    table = Table({"case": "<64", **sizes, "mfu": "6.1%"})
    for job in jobs:
        for found in children.rows(job):
            row = {"case": job.name} | job.case | found
            if rate and "flops_per_s" in row:
                row["mfu"] = row["flops_per_s"] / rate
            table.add(row)
    return table.rows


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return Tandem over peft with checkpointing at batch 1, each policy over the same without it, and the ladders'."""
    by_name = {row["case"]: row for row in rows if "step_s" in row}
    found = llm_ladder.ratios(rows)
    for family in FAMILIES:
        saved = GpuCase(family, checkpointing=True)
        pairs = {
            "over_peft": (saved, replace(saved, trainer="peft")),
            "compiled_over_peft": (replace(saved, compiled=True), replace(saved, trainer="peft")),
            "fp8_scaled_mm_over_bf16": (replace(saved, base="fp8 scaled_mm"), saved),
            "fp8_dequant_over_bf16": (replace(saved, base="fp8 dequant"), saved),
            "swap_16_over_none": (replace(saved, swapped=16), saved),
            "keep_8192_over_none": (replace(saved, kept_mb=8192), saved),
            "compiled_over_eager": (replace(saved, compiled=True), saved),
            "graph_over_compiled": (replace(saved, compiled=True, graph=True), replace(saved, compiled=True)),
        }
        for name, pair in pairs.items():
            one, other = (by_name.get(case.name()) for case in pair)
            if one and other:
                found[f"{family}_time_{name}"] = one["step_s"] / other["step_s"]
                found[f"{family}_memory_{name}"] = one["peak_gib"] / other["peak_gib"]
    return found


def measured(case: dict[str, Any], device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of a job as they are measured; call it in a fresh process."""
    if "ladder" in case:
        yield from llm_ladder.climb(case["ladder"], device, tiny)
    elif "rate" in case:
        yield {"rate": matmul_rate(device, tiny)}
    else:
        yield measure(GpuCase(**case), device, tiny)


@exit_on_user_error
def main() -> None:
    """Measure all cases."""
    families = [*FAMILIES, _LLM]
    # Asking the driver instead would make processes that are forked after an import that asks unable to use the card.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    parser = benchmark_parser(__doc__)
    parser.add_argument("--families", default=",".join(families), help="default: %(default)s")
    parser.add_argument("--only", default="", help="run the cases, and the language models, whose name holds this text")
    parser.add_argument("--minutes", type=float, default=8, help="all ends then (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that every case runs")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("bench/gpu.py: needs a CUDA GPU; --device cpu --tiny runs every case, tiny, on the CPU")
    if options.device == "cpu" and not options.tiny:
        raise UserError("--device: published sizes would take hours on a CPU; add --tiny")
    asked = options.families.split(",")
    for family in asked:
        if family not in families:
            raise UserError(f"--families: no {family!r}{did_you_mean(family, families)}; choose {', '.join(families)}")
    jobs = [job for job in all_jobs(asked) if options.only in job.name]
    if not jobs:
        raise UserError(f"--only: no case's name holds {options.only!r}; leave it out to see the names")
    rows = run(jobs, Children(options.device, options.tiny, options.minutes))
    machine = f"{torch.cuda.get_device_name()}, {machine_name()}" if options.device == "cuda" else machine_name()
    finish(rows, ratios(rows), options.json, machine)


def all_jobs(asked: list[str]) -> list[Job]:
    """Return LoRAs, then language models."""
    ladders = [Job(model, {"ladder": model}, _LADDER_SECONDS) for model in llm_ladder.LADDERS if _LLM in asked]
    families = [family for family in asked if family != _LLM]
    return [Job(case.name(), asdict(case)) for case in cases(families)] + ladders


Base = Literal["bf16", "fp8 dequant", "fp8 scaled_mm"]


@dataclass(frozen=True)
class GpuCase:
    """One row.

    Attributes:
        family: a key of ``FAMILIES``.
        trainer: tandem or peft (diffusers + peft, which cannot train with cuDNN's attention: flash takes its place).
        batch: images a step.
        base: the frozen weights and how they are multiplied.
        checkpointing: every block is recomputed in backward.
        kept_mb: with it, activation_budget_mb.
        swapped: blocks whose weights wait in host memory.
        compiled: regional compilation.
        graph: forward and backward as one CUDA graph; a plain step on a CPU.
    """

    family: str
    trainer: str = "tandem"
    batch: int = 1
    base: Base = "bf16"
    checkpointing: bool = False
    kept_mb: int = 0
    swapped: int = 0
    compiled: bool = False
    graph: bool = False

    def name(self) -> str:
        """Return the row's name."""
        memory = [
            "checkpointing" if self.checkpointing else "",
            f"keep {self.kept_mb}" if self.kept_mb else "",
            f"swap {self.swapped}" if self.swapped else "",
            "compiled" if self.compiled else "",
            "graph" if self.graph else "",
        ]
        parts = [self.family, f"b{self.batch}", self.trainer, self.base, *filter(None, memory)]
        return ", ".join(parts)


def cases(families: list[str]) -> list[GpuCase]:
    """Return the rows: of each family those that tell most, then the others of all families in turn."""
    first, others = [], []
    for family in families:
        plain = GpuCase(family)
        saved = replace(plain, checkpointing=True)
        scaled_mm = replace(saved, base="fp8 scaled_mm")
        first += [
            saved,
            replace(saved, compiled=True),
            replace(saved, trainer="peft"),
            replace(saved, compiled=True, graph=True),
            replace(scaled_mm, compiled=True),
            replace(scaled_mm, compiled=True, graph=True),
            replace(saved, base="fp8 dequant"),
            scaled_mm,
            replace(saved, base="fp8 dequant", compiled=True),
        ]
        rest = [
            plain,
            replace(saved, swapped=16),
            replace(saved, kept_mb=8192),
            replace(saved, base="fp8 dequant", swapped=16),
            replace(saved, batch=4),
            replace(scaled_mm, batch=4),
        ]
        others.append(rest)
    return first + [case for same in zip(*others, strict=True) for case in same]


def sizes_of(family_name: str, tiny: bool, batch: int = 1) -> Sizes:
    """Return the published model at 1024 x 1024, or something tiny with as many kinds of blocks."""
    full = replace(FAMILIES[family_name], batch=batch)
    if not tiny:
        return full
    few = (4, 8)[-len(full.blocks) :]
    return replace(full, width=256, head_dim=64, blocks=few, image_sides=(4, 4), text_tokens=8)


def measure(case: GpuCase, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Return seconds of a step, and its memory; call it in a fresh process."""
    sizes = sizes_of(case.family, tiny, case.batch)
    step = build(case, sizes, device, tiny)
    replayed, captured = graphed(step) if case.graph and device.type == "cuda" else (step.loss, 0)
    seconds, peak = time_steps(replayed, device, once=tiny)
    found = {"step_s": seconds, "peak_gib": max(peak, captured) / 2**30, "weights_gib": step.base_bytes / 2**30}
    return found | {"flops_per_s": sizes.step_flops() / seconds}


def graphed(step: LoraStep) -> tuple[Callable[[], Tensor], int]:
    """Capture forward and backward of ``step`` as one CUDA graph.

    Returns:
        What replays it and lets the optimizer take its step, and the peak bytes of the capture: a replay, whose memory
        is the graph's, allocates nothing.
    """
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    # A random state cannot be read during a capture; a step of a transformer draws nothing.
    with patch("library.nn.checkpointing.checkpoint", functools.partial(checkpoint, preserve_rng_state=False)):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_STEPS):  # choose kernels, compile
                step.backward()
                step.optimizer.zero_grad(set_to_none=True)  # a gradient that is there would be added to
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.reset_peak_memory_stats()
        with torch.cuda.graph(graph):
            loss = step.backward()

    def replay() -> Tensor:
        graph.replay()  # writes the same gradients again
        step.optimizer.step()
        return loss

    return replay, torch.cuda.max_memory_allocated()


def build(case: GpuCase, sizes: Sizes, device: torch.device, tiny: bool) -> LoraStep:
    """Return the loaded case: a transformer, and the LoRA in it, as a run loads them."""
    transformer = build_transformer(case.family, sizes, torch.bfloat16, str(device))
    if case.trainer == "peft":
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward is wrong for views, and the run ends in an error
        trained = peft_lora(case.family, transformer)
        if case.checkpointing:
            transformer.enable_gradient_checkpointing()
    else:
        family = family_class(case.family)
        transformer = family.optimise_forward(transformer)
        if case.base == "fp8 dequant":
            quantize_model(transformer, Recipe(loaded_scheme("block64")), compute="dequant")
        elif case.base == "fp8 scaled_mm":
            quantize_model(transformer, Recipe(loaded_scheme("row")), compute="quantised")
        if case.swapped:  # made on the device, which is faster, and swapped from host memory
            transformer.to("cpu")
        trained, blocks = tandem_network(case.family, transformer).parameters(), family.blocks(transformer)
        training = TrainingConfig(
            gradient_checkpointing=case.checkpointing,
            activation_budget_mb=case.kept_mb,
        )
        pairs = {} if case.swapped or case.compiled else neighbours(blocks)
        recompute_blocks(transformer, len(blocks), training, device, pairs, family.chained_args)
        if case.swapped:
            swap_blocks(transformer, blocks, min(case.swapped, 3) if tiny else case.swapped, device)
    if case.compiled:
        transformer.compile_repeated_blocks(backend="eager" if tiny else "inductor")
    return LoraStep(transformer, trained, example_inputs(case.family, sizes, device))


if __name__ == "__main__":
    main()
