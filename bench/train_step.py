"""A LoRA training step of Tandem beside the same step of diffusers + peft, on a CPU.

The published width, few blocks (FLUX: 1 double and 2 single; Qwen-Image: 2), rank 16 on every layer that is trained by
default, LoRA weights in fp32, 512 image and 128 text tokens, AdamW. ``bf16``: base in bf16 under autocast; ``fp32``:
all in fp32; ``fp8``: autocast on a base in fp8, Tandem's ``fp8_scaled`` in runs of 64, and beside it the kohya
trainers' way, a plain cast that autocast undoes for each product and keeps copies of. ``--dtypes`` also takes the names
of Tandem's other formats (``ALONE``), which have nobody beside them. All that lies on a quantised base stands beside
the same trainer's step on bf16 as well.

How time and memory are taken: ``bench/measure.py``; `weights` is the size of the base.

    python bench/train_step.py [--json PATH] [--families flux,qwen_image] [--widths 1536,3072] [--dtypes bf16,fp32,fp8]
                               [--rounds 8] [--checkpointing]
    python bench/train_step.py --families flux --dtypes quantised      # bf16 and all that is quantised
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.families import (
    FAMILIES,
    FEW_BLOCKS,
    LoraStep,
    Sizes,
    build_transformer,
    example_inputs,
    peft_lora,
    tandem_network,
)
from bench.measure import KEEPING, SAME, WAITING, Case, Table, benchmark_parser, both_ways, finish, measure
from library.errors import exit_on_user_error
from library.models.family_by_name import family_class
from library.precision.recipe import Recipe, quantize_model, scheme_named

TRAINERS, DTYPES = ("tandem", "peft"), ("bf16", "fp32", "fp8")
ALONE = ("cast", "tensor", "row", "int8_row", "int8_convrot", "nvfp4")


def build_step(trainer: str, family_name: str, sizes: Sizes, dtype: str, checkpointing: bool) -> LoraStep:
    """Load a case.

    Args:
        trainer: of ``TRAINERS``.
        dtype: of ``DTYPES``; for Tandem also the name of a scheme (``ALONE``), and "fp8" is "block64".
    """
    inputs, autocast = example_inputs(family_name, sizes, torch.device("cpu")), dtype != "fp32"
    transformer = build_transformer(family_name, sizes, torch.bfloat16 if autocast else torch.float32)
    if trainer == "tandem":
        family_class(family_name).optimise_forward(transformer)
        if dtype not in ("bf16", "fp32"):  # as training on a CPU does, computing in bf16
            quantize_model(transformer, Recipe(scheme_named("block64" if dtype == "fp8" else dtype)))
        trained = tandem_network(family_name, transformer).parameters()
    else:
        trained = peft_lora(family_name, transformer, fp8_cast=dtype == "fp8")
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    return LoraStep(transformer, trained, inputs, autocast)


def over(name: str, row: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """Return the time and memory of ``row`` over those of ``other``, which is called ``name``."""
    keys = {f"time_over_{name}": "step_s", f"memory_over_{name}": "added_mib"}
    return {ratio: row[key] / other[key] for ratio, key in keys.items()}


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return Tandem's worst ratios over peft, as it comes and with the same settings, fp8 by itself; and over bf16."""
    found: dict[str, list[float]] = defaultdict(list)
    apart = {"peft": ("fp8",), "same": ("fp8",), "bf16": ("fp8", *ALONE)}
    for row in (row for row in rows if row["trainer"] == "tandem"):
        for other, dtypes in apart.items():
            for name in (f"time_over_{other}", f"memory_over_{other}"):
                if name in row:
                    found[name + (f"_{row['dtype']}" if row["dtype"] in dtypes else "")].append(row[name])
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
    options = parser.parse_args()
    down, across = map(int, options.image_sides.split(","))
    dtypes = ["bf16", "fp8", *ALONE] if options.dtypes == "quantised" else options.dtypes.split(",")
    numbers = {"step_s": "8.3f", "added_mib": "9.0f", "weights_mib": "11.0f"}
    numbers |= {"time_over_peft": "14.3f", "time_over_same": "14.3f", "memory_over_peft": "16.3f"}
    numbers |= {"time_over_bf16": "14.3f", "memory_over_bf16": "16.3f"}
    table = Table({"family": "<10", "width": "6", "dtype": "<12", "trainer": "<19"} | numbers)
    for family, width in itertools.product(options.families.split(","), map(int, options.widths.split(","))):
        sizes = Sizes(width, FEW_BLOCKS[family], (down, across), text_tokens=128)
        cases: dict[tuple[str, str], Case] = {}
        for dtype in dtypes:
            own = {
                trainer: Case(build_step, (trainer, family, sizes, dtype, options.checkpointing))
                for trainer in (TRAINERS if dtype in DTYPES else ["tandem"])
            }
            cases |= {(dtype, trainer): case for trainer, case in both_ways(own, WAITING | KEEPING).items()}
        found = measure(cases, options.rounds)
        for (dtype, trainer), row in found.items():
            row = {"family": family, "width": width, "dtype": dtype, "trainer": trainer} | row
            if (dtype, "peft") in found:
                row |= over("peft", row, found[dtype, "peft"])
                row |= over("same", row, found[dtype, "peft" + SAME])
            if dtype not in ("bf16", "fp32") and ("bf16", trainer) in found:
                row |= over("bf16", row, found["bf16", trainer])
            table.add(row)
    finish(table.rows, ratios(table.rows), options.json)


if __name__ == "__main__":
    main()
