"""Full-size training steps on one CUDA GPU: LoRAs on image models beside diffusers + peft, then language models.

LoRAs are trained in every precision and memory policy. Published depth and width, random weights, 1024 x 1024 pixels
and 512 text tokens, rank 16 on every layer that is trained by default, LoRA weights in fp32 under bf16 autocast, AdamW.
Each case runs in a process of its own with a time limit: one that fails, runs out of memory or needs a package that is
not there is a row that says so. The cases that tell most come first, a family at a time: a run that is out of time ends
in the middle. Reported are the median seconds of a step, the peak of allocated device memory, and two utilisations,
both over what the card's bf16 matrix products, measured first, would do in that time: of model FLOPs (MFU, what a step
needs: no weight gradients, no recomputation) and of hardware FLOPs (HFU, with recomputation).

Then steps in each layout of several GPUs, set up by the functions that a training run calls, in as many processes as
there are GPUs: ``dp`` copies the model, ``shard`` splits its weights (FSDP2), ``pp`` its depth, ``tp`` its layers;
``device_map`` is one process with a run of the blocks on each GPU, or on one GPU and the CPU, then of few blocks.
``dp`` and ``shard`` train an image a GPU, ``pp`` as many in one batch, the others one image a step.

Last, language models climb the ladder of ``bench/llm_ladder.py``, from fp32 to everything that makes them fast.

Besides torch, transformers, accelerate and peft this needs what requirements/gpu.txt lists; ``make gpu-bundle`` packs
it for a machine that has a card and no network.

    python bench/gpu.py [--json PATH] [--minutes 8] [--families flux,qwen_image,llm] [--only TEXT]
    python bench/gpu.py --device cpu --tiny        # does every case run?
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.elastic.utils.distributed import get_free_port

import bench.llm_ladder as llm_ladder
from bench.families import (
    FAMILIES,
    LoraStep,
    Sizes,
    build_transformer,
    call_transformer,
    example_inputs,
    peft_lora,
    tandem_network,
    target_of,
)
from bench.measure import Table, benchmark_parser, finish, machine_name, reason, start, time_steps, wait_for
from library.accelerator import build_accelerator
from library.config.schema import AccelerateConfig, LoggingConfig, ParallelConfig, SavingConfig, TrainingConfig
from library.errors import UserError, did_you_mean, exit_on_user_error
from library.models.family import split_plan
from library.models.family_by_name import family_class
from library.nn.checkpointing import neighbours
from library.precision.files.fp8 import loaded_scheme
from library.precision.recipe import Recipe, quantize_model
from library.training.memory.block_swap import swap_blocks
from library.training.memory.budget import recompute_blocks
from library.training.parallel.device_map import place_blocks
from library.training.parallel.parallelize import ParallelSpec, parallelize
from library.training.parallel.pipeline import transformer_split_points
from library.training.parallel.step import average_gradients
from networks.network import AdapterNetwork

_LLM = "llm"
_CASE_SECONDS = 150  # of which compilation takes up to a minute
_LADDER_SECONDS = 120
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
    """What one process measures, or several together."""

    name: str
    case: dict[str, Any]  # what :func:`measured` takes
    seconds: float = _CASE_SECONDS
    processes: int = 1


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
        """Return what the job's processes found; the last is {"error": why} if one of them did not end well."""
        limit = min(job.seconds, self._end - time.monotonic())
        if limit <= 0:
            return [{"error": "left out: the time was up"}]
        rows, end = list[dict[str, Any]](), time.monotonic() + limit
        workers = [
            start(_send, job.case, self._device, self._tiny, environment, method=self.method)
            for environment in _environments(job.processes)
        ]
        waiting: dict[Any, Any] = {connection: process for process, connection in workers}
        try:
            while waiting:
                ready = wait([*waiting], max(0.0, end - time.monotonic()))
                if not ready:
                    return [*rows, {"error": f"stopped after {limit:.0f} s"}]
                for connection in ready:
                    said = _said(connection, waiting[connection])
                    if isinstance(said, str):
                        return [*rows, {"error": said}]
                    if said is None:
                        waiting.pop(connection).join(_END_SECONDS)
                    else:
                        rows.append(said)
            return rows
        finally:
            for process in (process for process, _ in workers if process.is_alive()):
                with suppress(ProcessLookupError):  # it has no group yet
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()


def _environments(processes: int) -> list[dict[str, str]]:
    """Return what a launcher would put into the environment of each of ``processes``; of one alone nothing."""
    if processes == 1:
        return [{}]
    group = {"WORLD_SIZE": f"{processes}", "LOCAL_WORLD_SIZE": f"{processes}"}
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{get_free_port()}"}
    return [group | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(processes)]


def _send(
    connection: Connection, case: dict[str, Any], device: torch.device, tiny: bool, environment: dict[str, str]
) -> None:
    """Send each row as it is measured, then None; or, in words, why there is none if it fails."""
    os.setsid()  # with the processes that compile for it in one group, to be stopped together
    os.environ |= environment
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
    table = Table({"case": "<56", **sizes, "images": "6", "mfu": "6.1%", "hfu": "6.1%"})
    for job in jobs:
        for found in children.rows(job):
            row = {"case": job.name} | job.case | found
            for utilisation, speed in (("mfu", "flops_per_s"), ("hfu", "hardware_flops_per_s")):
                if rate and row.get(speed):
                    row[utilisation] = row[speed] / rate
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
            "over_peft_both_compiled": (replace(saved, compiled=True), replace(saved, trainer="peft", compiled=True)),
            "fp8_scaled_mm_over_bf16": (replace(saved, base="fp8 scaled_mm"), saved),
            "fp8_dequant_over_bf16": (replace(saved, base="fp8 dequant"), saved),
            "swap_16_over_none": (replace(saved, swapped=16), saved),
            "keep_8192_over_none": (replace(saved, kept_mb=8192), saved),
            "offload_over_none": (replace(saved, offloaded=True), saved),
            "compiled_over_eager": (replace(saved, compiled=True), saved),
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
    elif "layout" in case:
        row = measure_layout(case["family"], case["layout"], device, tiny)
        if os.environ.get("RANK", "0") == "0":
            yield row
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
    jobs = [job for job in all_jobs(asked, torch.device(options.device)) if options.only in job.name]
    if not jobs:
        raise UserError(f"--only: no case's name holds {options.only!r}; leave it out to see the names")
    rows = run(jobs, Children(options.device, options.tiny, options.minutes))
    machine = f"{torch.cuda.get_device_name()}, {machine_name()}" if options.device == "cuda" else machine_name()
    finish(rows, ratios(rows), options.json, machine)


def all_jobs(asked: list[str], device: torch.device) -> list[Job]:
    """Return LoRAs, then layouts (one GPU has nobody to share with but its CPU), then language models."""
    ladders = [Job(model, {"ladder": model}, _LADDER_SECONDS) for model in llm_ladder.LADDERS if _LLM in asked]
    families = [family for family in asked if family != _LLM]
    alone = device.type == "cuda" and torch.cuda.device_count() < 2
    layouts = [layout_job(f, layout, device) for f in families for layout in (() if alone else LAYOUTS)]
    layouts += [layout_job(family, "device_map", device) for family in families]
    return [Job(case.name(), asdict(case)) for case in cases(families)] + layouts + ladders


def layout_job(family: str, layout: str, device: torch.device) -> Job:
    """Return the job of ``layout``: a process a GPU, two to try it on a CPU; device_map is one."""
    every = torch.cuda.device_count() if device.type == "cuda" else 2
    processes = 1 if layout == "device_map" else every
    return Job(f"{family}, {layout}", {"layout": layout, "family": family}, processes=processes)


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
    """Return the rows: of each family those that tell most, then the others of all families in turn."""
    first, others = [], []
    for family in families:
        plain = GpuCase(family)
        saved = replace(plain, checkpointing=True)
        peft = replace(saved, trainer="peft")
        first += [
            saved,
            replace(saved, compiled=True),
            peft,
            replace(saved, base="fp8 dequant"),
            replace(saved, base="fp8 scaled_mm"),
            replace(saved, base="fp8 dequant", compiled=True),
            replace(saved, base="fp8 scaled_mm", compiled=True),
        ]
        rest = [
            replace(peft, compiled=True),
            replace(peft, base="fp8 cast"),
            plain,
            replace(plain, trainer="peft"),
            replace(saved, swapped=16),
            replace(saved, kept_mb=8192),
            replace(saved, offloaded=True),
            replace(saved, base="fp8 dequant", swapped=16),
            replace(saved, batch=4),
            replace(peft, batch=4),
            replace(saved, batch=4, base="fp8 scaled_mm"),
            replace(plain, swapped=16),
            replace(saved, every=2),
            replace(saved, base="fp8 dequant", swapped=16, offloaded=True),
            replace(plain, base="fp8 dequant"),
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
    seconds, peak = time_steps(step.loss, device, once=tiny)
    found = {"step_s": seconds, "peak_gib": peak / 2**30, "weights_gib": step.base_bytes / 2**30}
    found["flops_per_s"] = sizes.step_flops() / seconds
    if not case.kept_mb:  # what is kept of a budget is found as it runs, and not counted
        recomputed = sizes.recomputed_flops(case.every) if case.checkpointing else 0.0
        found["hardware_flops_per_s"] = (sizes.step_flops() + recomputed) / seconds
    return found


def build(case: GpuCase, sizes: Sizes, device: torch.device, tiny: bool) -> LoraStep:
    """Return the loaded case."""
    if case.trainer == "peft":
        transformer = build_transformer(case.family, sizes, torch.bfloat16, str(device))
        trained = peft_lora(case.family, transformer, fp8_cast=case.base == "fp8 cast")
        if case.checkpointing:
            transformer.enable_gradient_checkpointing()
    else:
        transformer, blocks, network = _tandem(case, sizes, device, fetched=bool(case.swapped))
        trained = network.parameters()
        if case.swapped:
            swap_blocks(transformer, blocks, min(case.swapped, 3) if tiny else case.swapped, device)
    if case.compiled:
        transformer.compile_repeated_blocks(backend="eager" if tiny else "inductor")
    return LoraStep(transformer, trained, example_inputs(case.family, sizes, device))


def _tandem(
    case: GpuCase, sizes: Sizes, device: torch.device, fetched: bool
) -> tuple[Any, list[nn.Module], AdapterNetwork]:
    """Return a transformer, its blocks and the LoRA in it, as a run loads them.

    ``fetched``: made on ``device``, which is faster, and put into host memory, from where its blocks are swapped or
    placed.
    """
    family = family_class(case.family)
    transformer = family.optimise_forward(build_transformer(case.family, sizes, torch.bfloat16, str(device)))
    if case.base == "fp8 dequant":
        quantize_model(transformer, Recipe(loaded_scheme("block64")), compute="dequant")
    elif case.base == "fp8 scaled_mm":
        quantize_model(transformer, Recipe(loaded_scheme("row")), compute="quantised")
    if fetched:
        transformer.to("cpu")
    network, blocks = tandem_network(case.family, transformer), family.blocks(transformer)
    training = TrainingConfig(
        gradient_checkpointing=case.checkpointing,
        checkpoint_every_n_blocks=case.every,
        activation_budget_mb=case.kept_mb,
        cpu_offload_checkpointing=case.offloaded,
    )
    pairs = {} if fetched or case.compiled else neighbours(blocks)
    recompute_blocks(transformer, len(blocks), training, device, pairs, family.chained_args)
    return transformer, blocks, network


LAYOUTS = ("dp", "shard", "pp", "tp")
_FEW_BLOCKS = 2  # a kind, where a CPU has half of them


@dataclass
class Images:
    """A batch as a pipeline takes it: it has a length and can be cut."""

    inputs: dict[str, Any]
    target: Tensor

    def __len__(self) -> int:
        return len(self.target)

    def chunk(self, count: int) -> list[Images]:
        """Return ``count`` pieces; what all images have in common (positions) goes to each."""
        size = -(-len(self) // count)
        return [
            Images(
                {key: value if key.endswith("_ids") else value[i : i + size] for key, value in self.inputs.items()},
                self.target[i : i + size],
            )
            for i in range(0, len(self), size)
        ]


def measure_layout(family_name: str, layout: str, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Return seconds and images of a step and the fullest GPU's peak.

    Call it in a fresh process, for all but ``device_map`` in each of the layout's.
    """
    if layout == "device_map":
        return _measure_device_map(family_name, device, tiny)
    world = int(os.environ["WORLD_SIZE"])
    parallel = ParallelConfig(**({} if layout == "dp" else {layout: world}))
    training, saving = TrainingConfig(mixed_precision="bf16"), SavingConfig()
    accelerator = build_accelerator(AccelerateConfig(), training, saving, LoggingConfig(), parallel)
    sizes = sizes_of(family_name, tiny, world if layout == "pp" else 1)
    step = _step_of(accelerator, parallel, family_name, sizes)
    seconds, peak = time_steps(step, accelerator.device, once=tiny)
    peaks: list[float] = [0.0] * world
    dist.all_gather_object(peaks, peak)
    return {"step_s": seconds, "images": 1 if layout == "tp" else world, "peak_gib": max(peaks) / 2**30}


def _measure_device_map(family_name: str, device: torch.device, tiny: bool) -> dict[str, Any]:
    """One process with all GPUs; with one GPU, or none, the CPU has the other half of a few blocks."""
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if device.type == "cuda" else [device]
    sizes = sizes_of(family_name, tiny)
    if len(devices) < 2:
        devices.append(torch.device("cpu"))
        sizes = replace(sizes, blocks=tuple(min(_FEW_BLOCKS, blocks) for blocks in sizes.blocks))
    transformer, blocks, network = _tandem(GpuCase(family_name, checkpointing=True), sizes, devices[0], fetched=True)
    placed = place_blocks(transformer, blocks, devices)
    step = LoraStep(transformer, network.parameters(), example_inputs(family_name, sizes, devices[0]))
    seconds, peak = time_steps(step.loss, devices[0], once=tiny)
    return {"step_s": seconds, "images": 1, "peak_gib": peak / 2**30, "placed": placed}


def _step_of(
    accelerator: Accelerator, parallel: ParallelConfig, family_name: str, sizes: Sizes
) -> Callable[[], Tensor]:
    """Return what takes a training step and returns its loss."""
    family, device = family_class(family_name), accelerator.device
    case = GpuCase(family_name, checkpointing=True)
    transformer, blocks, network = _tandem(case, sizes, device, fetched=parallel.splits_model)
    trained = network.parameters()
    inputs = example_inputs(family_name, sizes, device)
    batch = Images(inputs, target_of(inputs))
    spec = ParallelSpec(
        transformer,
        family.repeated_blocks,
        lambda: transformer_split_points(transformer, blocks, family.tail),
        lambda processes: split_plan(type(transformer), transformer.config, processes),
        network,
    )
    made = parallelize(accelerator, parallel, spec, torch.optim.AdamW(trained, lr=1e-4))
    made.model.train()

    def compute(images: Images) -> tuple[Tensor, Tensor]:
        with accelerator.autocast():
            output = call_transformer(made.model, images.inputs)
        loss = (output.float() - images.target).square().mean()
        return loss, loss.detach()

    def step() -> Tensor:
        if made.pipeline is not None:
            loss, _ = made.pipeline.forward_backward(batch, compute)
        else:
            loss, _ = compute(batch)
            accelerator.backward(loss)
        average_gradients(accelerator, trained)
        made.optimizer.step()
        made.optimizer.zero_grad()
        return loss.detach()

    return step


if __name__ == "__main__":
    main()
