"""Full-size training steps on one CUDA GPU: language models, then LoRAs on image models beside diffusers + peft.

Language models climb the ladder of ``bench/gpu_llm.py``, from fp32 to everything that makes them fast.

LoRAs are trained in every precision and memory policy. Published depth and width, random weights, 1024 x 1024 pixels
and 512 text tokens, rank 16 on every layer that is trained by default, LoRA weights in fp32 under bf16 autocast, AdamW.
Each case runs in a process of its own with a time limit: one that fails or runs out of memory is a row that says so.
Reported are the median seconds of a step, the peak of allocated device memory, and the model FLOP utilisation: what a
step needs (no weight gradients, no recomputation) over what the card's bf16 matrix products, measured first, would do
in that time.

At last come steps in each layout of several GPUs, set up by the functions that a training run calls, in as many
processes as there are GPUs: ``dp`` copies the model, ``shard`` splits its weights (FSDP2), ``pp`` its depth, ``tp`` its
layers; ``device_map`` is one process with a run of the blocks on each GPU, or on one GPU and the CPU, then of few
blocks. ``dp`` and ``shard`` train an image a GPU, ``pp`` as many in one batch, the others one image a step.

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
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

import bench.gpu_llm as gpu_llm
from bench.families import (
    FAMILIES,
    LoraStep,
    Sizes,
    build_transformer,
    call_transformer,
    peft_lora,
    tandem_lora,
    tandem_network,
    target_of,
)
from bench.measure import benchmark_parser, finish, machine_name, run_with_limit, time_steps, wait_for
from library.accelerator import build_accelerator
from library.config.schema import AccelerateConfig, LoggingConfig, ParallelConfig, SavingConfig, TrainingConfig
from library.errors import UserError, did_you_mean, exit_on_user_error
from library.models.family import split_plan
from library.nn.checkpointing import ActivationCheckpointing
from library.training.parallel.device_map import place_blocks
from library.training.parallel.parallelize import parallelize
from library.training.parallel.pipeline.schedule import Pipeline
from library.training.parallel.spec import ParallelSpec, transformer_split_points
from library.training.parallel.step import average_gradients

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
    parser = benchmark_parser(__doc__)
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
    machine = f"{torch.cuda.get_device_name()}, {machine_name()}" if options.device == "cuda" else machine_name()
    finish(rows, ratios(rows), options.json, machine)


RANK = 16
Base = Literal["bf16", "fp8 dequant", "fp8 scaled_mm", "fp8 cast"]


@dataclass(frozen=True)
class GpuCase:
    """One row.

    Attributes:
        family: a key of ``FAMILIES``.
        trainer: tandem or peft (diffusers + peft).
        batch: images a step.
        base: the frozen weights and how they are multiplied; ``fp8 cast`` is what the kohya trainers do, weights
            cast to fp8 without scales, cast up for each product.
        checkpointing: every block is recomputed in backward.
        every, kept_mb, offloaded: with it, checkpoint_every_n_blocks, activation_budget_mb, cpu_offload_checkpointing.
        swapped: blocks whose weights wait in host memory.
        compiled: regional compilation.
    """

    family: str
    trainer: str = "tandem"
    batch: int = 1
    base: Base = "bf16"
    checkpointing: bool = False
    every: int = 1
    kept_mb: int = 0
    offloaded: bool = False
    swapped: int = 0
    compiled: bool = False

    def name(self) -> str:
        """Return the row's name."""
        memory = [
            "checkpointing" if self.checkpointing else "",
            f"every {self.every}" if self.every > 1 else "",
            f"keep {self.kept_mb}" if self.kept_mb else "",
            "offload" if self.offloaded else "",
            f"swap {self.swapped}" if self.swapped else "",
            "compiled" if self.compiled else "",
        ]
        parts = [self.family, f"b{self.batch}", self.trainer, self.base, *filter(None, memory)]
        return ", ".join(parts)


def cases(families: list[str]) -> list[GpuCase]:
    """Return the rows, the most telling first: a run that is out of time ends in the middle."""
    by_family = []
    for family in families:
        plain = GpuCase(family)
        saved = replace(plain, checkpointing=True)
        rows = [
            saved,
            replace(saved, trainer="peft"),
            replace(saved, base="fp8 scaled_mm"),
            replace(saved, base="fp8 dequant"),
            plain,
            replace(plain, trainer="peft"),
            replace(saved, swapped=16),
            replace(saved, kept_mb=8192),
            replace(saved, offloaded=True),
            replace(saved, compiled=True),
            replace(saved, trainer="peft", compiled=True),
            replace(saved, base="fp8 scaled_mm", compiled=True),
            replace(saved, trainer="peft", base="fp8 cast"),
            replace(saved, base="fp8 dequant", swapped=16),
            replace(saved, batch=4),
            replace(saved, batch=4, trainer="peft"),
            replace(saved, batch=4, base="fp8 scaled_mm"),
            replace(plain, swapped=16),
            replace(saved, every=2),
            replace(saved, base="fp8 dequant", swapped=16, offloaded=True),
            replace(saved, base="fp8 dequant", compiled=True),
            replace(plain, base="fp8 dequant"),
        ]
        by_family.append(rows)
    return [case for same in zip(*by_family, strict=True) for case in same]


def sizes_of(case: GpuCase, tiny: bool) -> Sizes:
    """Return the published model at 1024 x 1024, or something tiny with as many kinds of blocks."""
    full = replace(FAMILIES[case.family].full, batch=case.batch)
    if not tiny:
        return full
    few = (4, 8)[-len(full.blocks) :]
    return replace(full, width=256, head_dim=64, blocks=few, image_sides=(4, 4), text_tokens=8)


def build(case: GpuCase, device: torch.device, tiny: bool) -> LoraStep:
    """Return the loaded case."""
    family, sizes = FAMILIES[case.family], sizes_of(case, tiny)
    transformer: Any = build_transformer(family, sizes, torch.bfloat16, str(device))
    if case.trainer == "peft":
        trained = peft_lora(case.family, transformer, RANK, fp8_cast=case.base == "fp8 cast")
    else:
        trained = _tandem(case, transformer, device, tiny)
    if case.checkpointing:
        transformer.enable_gradient_checkpointing(_checkpointing(case, transformer, device))
    if case.compiled:
        transformer.compile_repeated_blocks(backend="eager" if tiny else "inductor")
    return LoraStep(transformer, trained, call_transformer, family.inputs(sizes, device), autocast=True)


def _checkpointing(case: GpuCase, transformer: Any, device: torch.device) -> Any:
    """Return what calls the blocks; None for what diffusers does."""
    if case.trainer == "peft":
        return None
    from library.nn.checkpointing import ActivationCheckpointing, HostOffload

    blocks = len(FAMILIES[case.family].blocks(transformer))
    offload = HostOffload(device) if case.offloaded else None
    return ActivationCheckpointing(blocks, case.every, case.kept_mb * 2**20, offload)


def _tandem(case: GpuCase, transformer: Any, device: torch.device, tiny: bool) -> list[torch.nn.Parameter]:
    from library.precision.recipe import Fp8Recipe, quantize_model
    from library.training.memory.block_swap import swap_blocks

    FAMILIES[case.family].optimise_forward(transformer)
    if case.base == "fp8 dequant":
        quantize_model(transformer, Fp8Recipe("block64"), compute="dequant")
    elif case.base == "fp8 scaled_mm":
        quantize_model(transformer, Fp8Recipe("row"), compute="scaled_mm", fp8_input_gradient=True)
    if case.swapped:
        transformer.to("cpu")  # random numbers are made faster on the GPU, but a swapped model comes from the host
    trained = tandem_lora(case.family, transformer, RANK)
    if case.swapped:
        blocks = FAMILIES[case.family].blocks(transformer)
        swap_blocks(transformer, blocks, min(case.swapped, 3) if tiny else case.swapped, device)
    return trained


LAYOUTS = ("dp", "shard", "pp", "tp")
_BEHIND_BLOCKS = ("norm_out", "proj_out")  # of FLUX and Qwen-Image
_FEW_BLOCKS = 2  # a kind, where a CPU has half of them


@dataclass
class Images:
    """A batch as a pipeline takes it: it has a length and can be cut."""

    inputs: dict[str, Tensor]
    target: Tensor

    def __len__(self) -> int:
        return len(self.target)

    def chunk(self, count: int) -> list[Images]:
        """Return ``count`` pieces; what all images have in common (positions) goes to each."""
        targets, many = self.target.chunk(count), len(self)
        shared = {name for name, tensor in self.inputs.items() if tensor.ndim == 2 and "ids" in name}
        assert all(len(tensor) == many for name, tensor in self.inputs.items() if name not in shared)
        cut = {name: tensor.chunk(count) for name, tensor in self.inputs.items() if name not in shared}
        kept = {name: self.inputs[name] for name in shared}
        return [Images(kept | {name: parts[i] for name, parts in cut.items()}, targets[i]) for i in range(count)]


def processes_of(layout: str, device: torch.device) -> int:
    """Return in how many processes ``layout`` is measured: one a GPU; two to try it on a CPU."""
    if layout == "device_map":
        return 1
    return torch.cuda.device_count() if device.type == "cuda" else 2


def layouts_for(device: torch.device) -> list[str]:
    """Return the rows that ``device``'s machine has: one GPU has nobody to share with but its CPU."""
    alone = device.type == "cuda" and torch.cuda.device_count() < 2
    return ["device_map"] if alone else [*LAYOUTS, "device_map"]


def measure_layout(family_name: str, layout: str, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Return seconds and images of a step and the fullest GPU's peak.

    Call it in a fresh process, for all but ``device_map`` in each of ``processes_of`` processes of a launcher.
    """
    if layout == "device_map":
        return _measure_device_map(family_name, device, tiny)
    world = int(os.environ["WORLD_SIZE"])
    parallel = ParallelConfig(**({} if layout == "dp" else {layout: world}))
    training, saving = TrainingConfig(mixed_precision="bf16"), SavingConfig()
    accelerator = build_accelerator(AccelerateConfig(), training, saving, LoggingConfig(), parallel)
    sizes = sizes_of(GpuCase(family_name, batch=world if layout == "pp" else 1), tiny)
    step = _step_of(layout, accelerator, parallel, family_name, sizes)
    seconds, peak = time_steps(step, accelerator.device, once=tiny)
    peaks: list[float] = [0.0] * world
    dist.all_gather_object(peaks, peak)
    return _row(seconds, 1 if layout == "tp" else world, max(peaks))


def _measure_device_map(family_name: str, device: torch.device, tiny: bool) -> dict[str, Any]:
    """One process with all GPUs; with one GPU, or none, the CPU has the other half of a few blocks."""
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if device.type == "cuda" else [device]
    sizes = sizes_of(GpuCase(family_name), tiny)
    if len(devices) < 2:
        devices.append(torch.device("cpu"))
        sizes = replace(sizes, blocks=tuple(min(_FEW_BLOCKS, blocks) for blocks in sizes.blocks))
    family = FAMILIES[family_name]
    transformer: Any = build_transformer(family, sizes, torch.bfloat16, str(devices[0]))
    network = tandem_network(family_name, family.optimise_forward(transformer), RANK)
    blocks = family.blocks(transformer)
    transformer.enable_gradient_checkpointing(ActivationCheckpointing(len(blocks)))
    placed = place_blocks(transformer, blocks, devices)
    inputs = family.inputs(sizes, devices[0])
    step = LoraStep(transformer, network.parameters(), call_transformer, inputs, autocast=True)
    seconds, peak = time_steps(step.loss, devices[0], once=tiny)
    return _row(seconds, 1, peak) | {"placed": placed}


def _row(seconds: float, images: int, peak: float) -> dict[str, Any]:
    return {"step_s": seconds, "images": images, "peak_gib": peak / 2**30}


def _step_of(
    layout: str, accelerator: Accelerator, parallel: ParallelConfig, family_name: str, sizes: Sizes
) -> Callable[[], Tensor]:
    """Return what takes a training step and returns its loss."""
    family, device = FAMILIES[family_name], accelerator.device
    transformer: Any = build_transformer(family, sizes, torch.bfloat16, str(device))
    if layout != "dp":
        transformer.to("cpu")  # made faster on the GPU, but a run splits what lies in host memory
    network = tandem_network(family_name, family.optimise_forward(transformer), RANK)
    blocks = family.blocks(transformer)
    transformer.enable_gradient_checkpointing(ActivationCheckpointing(len(blocks)))
    trained = network.parameters()
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    inputs = family.inputs(sizes, device)
    batch = Images(inputs, target_of(inputs))
    kinds = sorted({type(block).__name__ for block in blocks})
    spec = ParallelSpec(
        transformer,
        kinds,
        lambda: transformer_split_points(transformer, blocks, _BEHIND_BLOCKS),
        lambda processes: split_plan(type(transformer), transformer.config, processes),
        network,
    )
    model, optimizer, _, _, pipeline = parallelize(accelerator, parallel, spec, optimizer)
    return lambda: _step(accelerator, model.train(), pipeline, batch, trained, optimizer)


def _step(
    accelerator: Accelerator,
    model: nn.Module,
    pipeline: Pipeline | None,
    batch: Images,
    trained: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> Tensor:
    def compute(images: Images) -> tuple[Tensor, Tensor]:
        with accelerator.autocast():
            output = call_transformer(model, images.inputs)
        loss = (output.float() - images.target).square().mean()
        return loss, loss.detach()

    if pipeline is not None:
        loss, _ = pipeline.forward_backward(batch, compute)
    else:
        loss, _ = compute(batch)
        accelerator.backward(loss)
    average_gradients(accelerator, trained)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


if __name__ == "__main__":
    main()
