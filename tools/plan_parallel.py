"""Which layout fits: what each GPU would hold under each, and the lines of ``[parallel]`` to paste.

    python tools/plan_parallel.py --model flux --gpu_memory 24 --gpus 4
    python tools/plan_parallel.py --model qwen_image --gpu_memory 24 --gpus 16 --gpus_per_machine 8 --batch_size 2
    python tools/plan_parallel.py --model llama3-8b --train all --gpu_memory 80 --gpus 8 --tokens 4096
    python tools/plan_parallel.py --model models/flux1-dev.safetensors --gpu_memory 16 --gpus 2

The model is a published one by name, a diffusers or language model's folder, or a FLUX or Qwen-Image file, whose
headers are read. Nothing is loaded and no GPU is needed: the table is by a formula, which may be off by 20 %. What is
recommended is the first that fits, in the order of the table: copies
before split weights before shared layers before a pipeline before ZeRO, which takes another package; without
checkpointing before with; the base as it is before fp8. Where every process has an image model in full, a step is
traced as tools/plan_memory.py does before it is recommended, which takes a minute.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.table import Table

from library.config import load_config
from library.config.markers import MOST_SIDE
from library.config.schema import ParallelConfig
from library.console import Console
from library.errors import UserError, exit_on_user_error
from tools.command import answer_early, count, number, tool_parser, whole


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = tool_parser(__doc__)
    parser.add_argument(
        "--model",
        required=True,
        help="file, folder, name on the hub, or a known one: flux, llama3-8b, ...",
    )
    parser.add_argument("--gpu_memory", type=number(above=0), required=True, help="GiB of a GPU")
    parser.add_argument("--gpus", type=count, default=1, help="how many there are in all")
    parser.add_argument("--gpus_per_machine", type=count, help="default: all in one")
    parser.add_argument(
        "--batch_size", type=count, default=1, help="of each process that has images or texts of its own"
    )
    parser.add_argument("--resolution", type=whole(most=MOST_SIDE), default=1024, help="side of an image in pixels")
    parser.add_argument("--tokens", type=count, help="tokens of a language model's text; default 2048 or its context")
    parser.add_argument("--network_dim", type=count, default=16, help="rank of the LoRA")
    parser.add_argument(
        "--train", choices=("lora", "all"), default="lora", help="all: every weight of a language model"
    )
    options = parser.parse_args()
    within = options.gpus_per_machine or options.gpus
    if options.gpus % within:
        raise UserError(f"--gpus {options.gpus}: not machines of {within}; give a multiple of --gpus_per_machine")
    return options


answer_early(__name__, arguments)

import torch

from library.models.family_by_name import family_class
from library.models.llm.spec import LMConfig
from library.training.memory.budget import GIB
from library.training.memory.dry_run import TEXT_TOKENS, plan_memory
from library.training.memory.dummy_checkpoint import write_dataset
from library.training.memory.formula import ModelNumbers, ModelShape, StepOptions, model_numbers, shape_of, step_parts
from library.training.memory.policy import PARTS, RESERVE, MemoryPlan, room_in
from library.training.tasks.image_lora import ImageLora

_TOKEN_SIDE = 16  # pixels of a token's side: 8 of the VAE times 2 of a patch


@dataclass(frozen=True)
class Row:
    """A layout with its options, and what a process holds: bytes by part."""

    layout: ParallelConfig
    options: StepOptions
    parts: dict[str, int]
    fits: bool

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())


def layouts(
    model: ModelNumbers, gpus: int, in_machine: int, batch: int, full: bool = False
) -> Iterator[ParallelConfig]:
    """Yield the layouts that ``gpus`` processes can have, simple ones first; ``full``: all weights are trained.

    Groups that exchange much (``shard``, ``tp``) lie within a machine; ``shard`` may take all there are instead. A
    pipeline's microbatches are full images or texts: one of a batch of one, which leaves all stages but one idle.
    ``zero`` comes last: it takes another package.
    """
    yield ParallelConfig(dp=gpus)
    if gpus == 1:
        return
    inside = min(gpus, in_machine)
    splits = sorted({n for n in range(2, inside + 1) if inside % n == 0} | {gpus})
    for shard in splits:
        yield ParallelConfig(dp=gpus // shard, shard=shard)
    for tp in (n for n in splits if n <= inside and n in model.weights_by_tp):
        yield ParallelConfig(dp=gpus // tp, tp=tp)
    for pp in (n for n in splits if model.can_be_cut and n <= sum(kind.count for kind in model.blocks)):
        count = max(n for n in range(1, pp + 1) if batch % n == 0)
        yield ParallelConfig(dp=gpus // pp, pp=pp, microbatches=count)
    if not full:
        yield from (ParallelConfig(dp=gpus, zero=stage) for stage in (2, 3))


def rows_of(
    model: ModelNumbers, gpus: int, in_machine: int, limit: int, full: bool = False, batch: int = 1
) -> list[Row]:
    """Return all rows in the order in which they are to be preferred; ``limit`` in bytes a GPU."""
    rows = []
    for fp8 in (False,) if full else (False, True):
        for layout in layouts(model, gpus, in_machine, batch, full):
            if fp8 and layout.zero == 3:  # refused
                continue
            for checkpointing in (False, True):
                options = StepOptions(full, fp8, checkpointing, batch)
                parts = step_parts(model, options, layout)
                rows.append(Row(layout, options, parts, sum(parts.values()) <= room_in(limit)))
    return rows


def traced(options: argparse.Namespace, shape: ModelShape, row: Row) -> MemoryPlan:
    """Return what a process that has the whole model takes."""
    with tempfile.TemporaryDirectory() as folder:
        data = write_dataset(
            Path(folder), family_class(shape.name).conditioning, options.resolution, options.batch_size
        )
        path = Path(options.model).expanduser()
        model = str(path) if path.exists() else f"{folder}/{shape.name}"
        flags = {
            "model_type": shape.name,
            "pretrained_model_name_or_path": model,
            "dataset_config": data,
            "network_dim": options.network_dim,
            "mixed_precision": "bf16",
            "output_dir": folder,
            "max_train_steps": 2,
        }
        words = [f"--{key}={value}" for key, value in flags.items()]
        words += ["--gradient_checkpointing"] * row.options.checkpointing + ["--fp8_scaled"] * row.options.fp8
        return plan_memory(ImageLora, load_config(words))


def settings(row: Row) -> Iterator[str]:
    """Yield the lines of the training file that make ``row``."""
    if chosen := settings_of(row.layout):
        yield from ("[parallel]", *(f"{key} = {value}" for key, value in chosen.items()), "")
    if row.options.checkpointing:
        yield from ("[training]", "gradient_checkpointing = true", "")
    if row.options.fp8:
        yield from ("[precision]", "fp8_scaled = true", "")


def settings_of(layout: ParallelConfig) -> dict[str, str]:
    """Return the keys of ``[parallel]`` that make a layout, as they are written."""
    values = {key: getattr(layout, key) for key in ("dp", "shard", "tp", "pp", "microbatches", "zero")}
    return {key: str(value) for key, value in values.items() if (value or 0) > 1}


def described(layout: ParallelConfig) -> str:
    """Return a layout as the keys that make it."""
    keys = (f"{key} = {value}" for key, value in settings_of(layout).items() if key != "microbatches")
    return ", ".join(keys) or "one process"


def table(rows: list[Row], best: Row | None) -> Table:
    """Return the rows for the terminal, in GiB of a process."""
    shown = Table(box=None, header_style="bold")
    for name in ("layout", "base", *PARTS[1:], "in all", ""):
        shown.add_column(name, justify="left" if name in ("layout", "base", "") else "right", no_wrap=True)
    for row in rows:
        numbers = [*(row.parts[part] for part in PARTS[1:]), row.total]
        mark = "<- recommended" if row is best else "fits" if row.fits else ""
        shown.add_row(described(row.layout), row.options.describe(), *(f"{n / GIB:.2f}" for n in numbers), mark)
    return shown


@exit_on_user_error
def main() -> None:
    """Print the table, the recommendation and its settings."""
    options = arguments()
    gpus, within = options.gpus, options.gpus_per_machine or options.gpus
    shape, full = shape_of(options.model), options.train == "all"
    language = shape.arguments if isinstance(shape.arguments, LMConfig) else None
    if full and language is None:
        raise UserError("--train all: Tandem trains LoRAs on image models; leave it out")
    tokens = (options.resolution // _TOKEN_SIDE) ** 2
    if language is not None:
        tokens = min(options.tokens or 2048, language.context)
    dtype = torch.float32 if full else torch.bfloat16
    model = model_numbers(shape, tokens, TEXT_TOKENS, 0 if full else options.network_dim, dtype)
    limit = round(options.gpu_memory * GIB)
    rows = rows_of(model, gpus, within, limit, full, options.batch_size)
    console = Console(markup=False, highlight=False, width=140)
    best, source = None, ""
    for row in rows:
        if not row.fits:
            continue
        if language or row.layout.splits_model or row.layout.zero:
            best, source = row, "by a formula, which may be off by 20 %"
            break
        with console.status(f"counting {described(row.layout)}, {row.options.describe()}: a minute"):
            found = traced(options, shape, row)
        taken = sum(found.step.values()) + row.parts["gradients"] - found.step["gradients"]  # more where they are sent
        if taken <= room_in(limit):
            best, source = row, f"its step takes {taken / GIB:.2f} GiB, source: {found.source}"
            break
    weights = model.weights_by_tp[1]
    seen = f"{tokens} tokens" if language else f"{options.resolution} x {options.resolution} pixels"
    batch = f"a batch of {options.batch_size} at {seen}, AdamW"
    console.print(f"{options.model}: {weights / 1e9:.2f} billion weights; {batch}")
    console.print(
        f"GiB of each of {gpus} GPUs, by a formula, which may be off by 20 %; of {options.gpu_memory:g} GiB "
        f"{RESERVE / GIB:g} is left for CUDA itself",
        end="\n\n",
    )
    console.print(table(rows, best))
    if best is None:
        least = min(rows, key=lambda row: row.total)
        needed = f"{described(least.layout)} with {least.options.describe()} needs {least.total / GIB:.1f} GiB"
        raise UserError(f"nothing fits: {needed}; lower --resolution, --tokens or --batch_size, or take more GPUs")
    lines = list(settings(best)) or ["# nothing to set"]
    script = "train_llm.py" if full else "train_lora.py"
    nodes = f"--nnodes {gpus // within} --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
    start = f"torchrun {nodes if gpus > within else ''}--nproc-per-node {within}"
    console.print(f"recommended: {described(best.layout)}, {best.options.describe()}; {source}")
    console.print("", *lines, sep="\n")
    console.print(f"{start if gpus > 1 else 'python'} {script} --config_file ...")


if __name__ == "__main__":
    main()
