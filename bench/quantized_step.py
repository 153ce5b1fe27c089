"""A LoRA step on a quantised base beside the same step on bf16: Tandem's, and diffusers + peft's as kohya trainers run.

One FLUX-shaped transformer of random numbers (1 double and 2 single blocks), rank-16 LoRA in fp32 on every
linear layer of the blocks, bf16 autocast, 512 image and 128 text tokens, AdamW. The cases:

    tandem bf16
    tandem cast / tensor / row / block64        fp8
    tandem int8_row / int8_convrot / nvfp4
    tandem Q8_0 / Q4_K / Q6_K / nf4             GGUF and bitsandbytes
    peers bf16                                  diffusers + peft
    peers fp8                                   the same with the base's weights cast to fp8; autocast casts them up for
                                                each product and keeps the copies

How time and memory are taken: ``bench/measure.py``. `weights` is the size of the base.

    python bench/quantized_step.py [--json PATH] [--widths 1536,3072] [--rounds 8] [--cases NAMES] [--checkpointing]
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.families import FEW_BLOCKS, Sizes
from bench.measure import Case, Table, benchmark_parser, finish, measure
from bench.train_step import build_step
from library.errors import exit_on_user_error

FP8, OTHERS = ("cast", "tensor", "row", "block64"), ("int8_row", "int8_convrot", "nvfp4", "Q8_0", "Q4_K", "Q6_K", "nf4")
CASES = {  # case: arguments of build_step
    "tandem bf16": ("tandem", "bf16"),
    **{f"tandem {scheme}": ("tandem", scheme) for scheme in (*FP8, *OTHERS)},
    "peers bf16": ("peft", "bf16"),
    "peers fp8": ("peft", "fp8"),
}


def ratios(rows: list[dict]) -> dict[str, float]:
    """Return the worst ratios over widths: of fp8 over its granularities, of the others each."""
    found: dict[str, list[float]] = defaultdict(list)
    for width in {row["width"] for row in rows}:
        by_case = {row["case"]: row for row in rows if row["width"] == width}
        bf16, peer = by_case["tandem bf16"], by_case.get("peers fp8")
        for scheme in (*FP8, *OTHERS):
            if (row := by_case.get(f"tandem {scheme}")) is None:
                continue
            kind = "fp8" if scheme in FP8 else scheme
            found[f"time_{kind}_over_bf16"].append(row["step_s"] / bf16["step_s"])
            found[f"memory_{kind}_over_bf16"].append(row["added_mib"] / bf16["added_mib"])
            if kind == "fp8" and peer is not None:
                found["time_fp8_over_peers_fp8"].append(row["step_s"] / peer["step_s"])
    return {name: max(values) for name, values in found.items()}


@exit_on_user_error
def main() -> None:
    """Measure, print a table, write JSON if asked."""
    parser = benchmark_parser(__doc__, rounds=8)
    parser.add_argument("--widths", default="1536,3072", help="transformer widths, multiples of 128")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    chosen = options.cases.split(",")
    sizes = {"step_s": "8.3f", "added_mib": "9.0f", "peak_mib": "9.0f", "weights_mib": "11.0f"}
    table = Table({"width": "6", "case": "<20"} | sizes)
    for width in map(int, options.widths.split(",")):
        shape = Sizes(width, FEW_BLOCKS["flux"], (16, 32), text_tokens=128)
        cases: dict[str, Case] = {}
        for case in chosen:
            trainer, dtype = CASES[case]
            cases[case] = build_step, (trainer, "flux", shape, dtype, options.checkpointing)
        for case, found in measure(cases, options.rounds).items():
            table.add({"width": width, "case": case, **found})
    finish(table.rows, ratios(table.rows) if "tandem bf16" in chosen else {}, options.json)


if __name__ == "__main__":
    main()
