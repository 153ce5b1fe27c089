"""A LoRA training step of Tandem beside the same step of diffusers + peft, on a CPU.

The published width, few blocks (FLUX: 1 double and 2 single; Qwen-Image: 2), rank 16 on every layer that is trained by
default, LoRA weights in fp32, 512 image and 128 text tokens, AdamW. ``bf16``: base in bf16 under autocast; ``fp32``:
all in fp32; ``fp8``: autocast on a base in fp8, Tandem's ``fp8_scaled`` in runs of 64, and beside it the kohya
trainers' way, a plain cast that autocast undoes for each product (``bench/fp8_step.py`` has the other granularities).
How time and memory are taken: ``bench/measure.py``.

    python bench/train_step.py [--json PATH] [--families flux,qwen_image] [--widths 1536,3072] [--dtypes bf16,fp32,fp8]
                               [--rounds 8] [--checkpointing] [--beside NAME=ADAPTER.py]

Another trainer joins with ``--beside``: a Python file of yours that imports that trainer's model and LoRA classes
and defines

    def build(sizes, dtype, rank): ...    # -> (model, list of trained parameters)
    def forward(model, inputs): ...       # -> velocity [B, tokens, 64]; inputs: see bench/families.py

It is run in a process of its own with its folder first on the path and Tandem's own packages out of the way, so that
it may import another project's ``library`` or ``networks``.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.families import (
    FAMILIES,
    LoraStep,
    Sizes,
    build_transformer,
    call_transformer,
    peft_lora,
    quantise_for_cpu,
    tandem_lora,
)
from bench.measure import Case, benchmark_parser, finish, measure_memory, measure_time
from library.errors import UserError, exit_on_user_error

RANK = 16
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}


def build_step(
    trainer: str, family_name: str, sizes: Sizes, dtype: str, checkpointing: bool, rank: int = RANK
) -> LoraStep:
    """Load a case: ``trainer`` is tandem, peft, or the path of an adapter file."""
    family = FAMILIES[family_name]
    inputs = family.inputs(sizes, torch.device("cpu"))
    if trainer not in ("tandem", "peft"):
        adapter = _load_adapter(Path(trainer))
        model, trained = adapter.build(sizes, DTYPES[dtype], rank)
        return LoraStep(model, trained, adapter.forward, inputs, dtype != "fp32")
    transformer: Any = build_transformer(family, sizes, torch.float32 if dtype == "fp32" else torch.bfloat16)
    if trainer == "tandem":
        family.optimise_forward(transformer)
        if dtype == "fp8":
            quantise_for_cpu(transformer, "block64")
        trained = tandem_lora(family_name, transformer, rank)
    else:
        trained = peft_lora(family_name, transformer, rank, fp8_cast=dtype == "fp8")
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    return LoraStep(transformer, trained, call_transformer, inputs, dtype != "fp32")


def _load_adapter(path: Path) -> Any:
    """Import an adapter file, with Tandem's packages hidden from its imports."""
    for name in [n for n in sys.modules if n.split(".")[0] in ("library", "networks")]:
        del sys.modules[name]
    root = str(Path(__file__).resolve().parent.parent)
    sys.path[:] = [str(path.resolve().parent), *(entry for entry in sys.path if entry != root)]
    spec = importlib.util.spec_from_file_location("beside", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trainers(beside: list[str]) -> dict[str, str]:
    """Return name -> what ``build_step`` takes.

    Raises:
        UserError: a ``--beside`` is not NAME=PATH of an existing file.
    """
    result = {"tandem": "tandem", "peft": "peft"}
    for text in beside:
        name, _, path = text.partition("=")
        if not Path(path).is_file():
            raise UserError(f"--beside {text}: write NAME=ADAPTER.py with the path of a Python file")
        result[name] = path
    return result


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the worst ratio of Tandem over peft, those of an fp8 base by themselves."""
    cases = {(r["family"], r["width"], r["dtype"]) for r in rows}
    found: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        own = {r["trainer"]: r for r in rows if (r["family"], r["width"], r["dtype"]) == case}
        of_fp8 = "_fp8" if case[2] == "fp8" else ""
        found[f"time_over_peft{of_fp8}"].append(own["tandem"]["step_s"] / own["peft"]["step_s"])
        found[f"memory_over_peft{of_fp8}"].append(own["tandem"]["added_mib"] / own["peft"]["added_mib"])
    return {name: max(values) for name, values in sorted(found.items())}


@exit_on_user_error
def main() -> None:
    """Measure, print a table, write JSON if asked."""
    parser = benchmark_parser(__doc__, rounds=8)
    parser.add_argument("--families", default=",".join(FAMILIES), help="default: %(default)s")
    parser.add_argument("--widths", default="1536,3072", help="transformer widths, multiples of 128")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="default: %(default)s")
    parser.add_argument("--image-sides", default="16,32", help="image tokens down and across")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--beside", action="append", default=[], metavar="NAME=ADAPTER.py")
    options = parser.parse_args()
    chosen = trainers(options.beside)
    down, across = map(int, options.image_sides.split(","))
    rows: list[dict[str, Any]] = []
    print(f"{'family':<10} {'width':>5} {'dtype':<5} {'trainer':<12} {'step, CPU s':>11} {'adds MiB':>9}  over peft")
    for name in options.families.split(","):
        few = replace(
            FAMILIES[name].full, blocks=FAMILIES[name].few_blocks, image_sides=(down, across), text_tokens=128
        )
        for width in map(int, options.widths.split(",")):
            for dtype in options.dtypes.split(","):
                arguments = (name, replace(few, width=width), dtype, options.checkpointing)
                cases: dict[str, Case] = {t: (build_step, (how, *arguments)) for t, how in chosen.items()}
                found = _measure(cases, options.rounds)
                rows += [{"family": name, "width": width, "dtype": dtype, "trainer": t, **f} for t, f in found.items()]
                _print(rows[-len(found) :])
    finish(rows, ratios(rows), options.json)


def _measure(cases: dict[str, Case], rounds: int) -> dict[str, dict[str, float]]:
    memory = {trainer: measure_memory(trainer, case) for trainer, case in cases.items()}
    seconds = measure_time(cases, rounds)
    return {t: {"step_s": statistics.median(s), "step_min_s": min(s), **memory[t]} for t, s in seconds.items()}


def _print(rows: list[dict[str, Any]]) -> None:
    peft = next(row for row in rows if row["trainer"] == "peft")
    for row in rows:
        over = f"{row['step_s'] / peft['step_s']:.3f} {row['added_mib'] / peft['added_mib']:.3f}"
        figures = f"{row['step_s']:11.3f} {row['added_mib']:9.0f}  {over}"
        print(f"{row['family']:<10} {row['width']:>5} {row['dtype']:<5} {row['trainer']:<12} {figures}", flush=True)


if __name__ == "__main__":
    main()
