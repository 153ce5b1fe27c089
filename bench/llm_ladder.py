"""How fast a language model trains, one known speed-up after the other: a ladder from the textbook to the fastest.

    textbook -> blocks -> TF32 -> bf16 -> SDPA flash -> compile -> fused AdamW -> padded vocabulary -> larger batch

A GPT-2 and a Llama, random weights, random tokens, all weights trained, clipping at 1, AdamW: on a GPU of the published
sizes of 124M and Llama 3.2 1B with 1024 tokens a row, on a CPU of 13 million weights with 256. Each rung keeps what the
rungs before it brought. "textbook" is the walk-through's model (``walkthrough/``), "blocks" Tandem's with the same
attention, also in fp32. Before "SDPA flash" that is PyTorch's plain kernel, which writes all scores to memory; before
"fused AdamW" it is the ``foreach`` one. On a CPU flash attention comes before bf16. Compilation is ``train_llm.py``'s:
block by block. What a model or device has no use for is left out: TF32 on a CPU, padding of a vocabulary that is a
multiple of 64. On a GPU transformers' model of the same size stands beside the rung of bf16 and flash attention.

Reported are tokens/s (median step), the peak of allocated memory, and MFU: what the model needs, counted as
``library.training.tasks.pretraining`` does and the same on every rung, over the bf16 matrix products of this card.

A ladder is one process: a process a rung would spend more time on starting than on measuring. A rung that fails or
runs out of memory is a row that says so, and the next one begins with an empty card.

    python bench/llm_ladder.py [--models gpt2-tiny llama-tiny] [--json PATH]     # here; bench/gpu.py runs it on a card
    python bench/roofline.py --ladder                                             # what cards would need
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from accelerate.utils import compile_regions
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.llm_train import IMPLEMENTATIONS, LMStepper
from bench.measure import Table, benchmark_parser, finish, reason, time_steps
from library.errors import exit_on_user_error
from library.models.llm.model import TransformerLM
from library.models.llm.spec import LMConfig, gpt2, llama, preset
from library.training.tasks.pretraining import flops_per_token

LADDERS = {"gpt2-124m": (8, 32), "llama3.2-1b": (4, 8)}  # rows of a batch, and of the larger one: fit into 80 GB
CPU_LADDERS = {"gpt2-tiny": (8, 32), "llama-tiny": (8, 32)}
_TINY = {
    "gpt2-124m": gpt2(64, 2, 2, vocab_size=250, context=32),
    "llama3.2-1b": llama(64, 2, 4, 2, 128, vocab_size=256, context=32, tied=True),
}
_CONTEXT = 1024
_OURS, _PEER = "tandem", "transformers"


@dataclass(frozen=True)
class Rung:
    """One row.

    Attributes:
        step: what is new.
        batch: rows of a step.
        who: of ``bench.llm_train.IMPLEMENTATIONS``.
        tf32, bf16: of matrix products; bf16 by autocast, weights stay fp32.
        flash: PyTorch's flash attention, and not its plain one.
        compiled, fused, padded: blocks by inductor, AdamW as one kernel, vocabulary to a multiple of 64.
    """

    step: str
    batch: int
    who: str = _OURS
    tf32: bool = False
    bf16: bool = False
    flash: bool = False
    compiled: bool = False
    fused: bool = False
    padded: bool = False


def rungs(model: str, tiny: bool = False) -> list[Rung]:
    """Return the ladder of ``model``, and transformers' row behind the one that it compares with."""
    batch, larger = (1, 2) if tiny else (LADDERS | CPU_LADDERS)[model]
    attention = [("SDPA flash", {"flash": True})]
    changes: list[tuple[str, dict[str, Any]]] = [
        ("blocks", {"who": _OURS}),
        ("TF32", {"tf32": True}),
        *(attention if model in CPU_LADDERS else []),  # in bf16 a CPU has Tandem's own
        ("bf16", {"bf16": True}),
        *(attention if model in LADDERS else []),
        ("compile", {"compiled": True}),
        ("fused AdamW", {"fused": True}),
        ("padded vocabulary", {"padded": True}),
        (f"batch {larger}", {"batch": larger}),
    ]
    useless = {"padded"} if config_of(model, tiny).vocab_size % 64 == 0 else set()
    useless |= {"tf32"} if model in CPU_LADDERS else set()
    ladder = [Rung("textbook", batch, "textbook")]
    for step, change in changes:
        if not useless & change.keys():
            ladder.append(replace(ladder[-1], step=step, **change))
    if model in LADDERS:
        beside = next(i for i, rung in enumerate(ladder) if rung.flash)
        ladder.insert(beside + 1, replace(ladder[beside], who=_PEER))
    return ladder


def config_of(model: str, tiny: bool) -> LMConfig:
    """Return the published sizes, or something tiny that is built alike."""
    return _TINY[model] if tiny else preset(model)


def flops_of(model: str, tiny: bool = False) -> float:
    """Return what a token needs, as MFU counts it."""
    config = config_of(model, tiny)
    with torch.device("meta"):
        return flops_per_token(TransformerLM(config), context_of(config))


def context_of(config: LMConfig) -> int:
    """Return the tokens of a row."""
    return min(_CONTEXT, config.context)


def climb(model: str, tiny: bool, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row for each rung of ``model`` as it is measured."""
    context, flops = context_of(config_of(model, tiny)), flops_of(model, tiny)
    for rung in rungs(model, tiny):
        row = {"case": f"{model}, {rung.step}, {rung.who}", "model": model, **asdict(rung)}
        begun = time.perf_counter()
        try:
            with kernels_of(rung):
                seconds, peak = time_steps(build_rung(model, rung, device, tiny).loss, device, once=tiny)
        except Exception as error:  # whatever it is, the other rungs are worth having
            row["error"] = reason(error)
        else:
            tokens = rung.batch * context / seconds
            row |= {"step_s": seconds, "tokens_per_s": tokens, "flops_per_s": tokens * flops, "peak_gib": peak / 2**30}
        yield row | {"took_s": time.perf_counter() - begun}
        torch.compiler.reset()  # compiled code of its shapes
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def kernels_of(rung: Rung) -> Iterator[None]:
    """Inside the block products and attention are those of ``rung``."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if rung.tf32 else "highest")
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if rung.flash else SDPBackend.MATH):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def build_rung(model: str, rung: Rung, device: torch.device, tiny: bool = False) -> LMStepper:
    """Return the model and optimizer of a rung, on ``device``."""
    config = config_of(model, tiny)
    config = config.padded(64) if rung.padded else config
    torch.manual_seed(0)
    with device:
        built: Any = IMPLEMENTATIONS[rung.who].build(config, "")
        tokens = torch.randint(0, config.vocab_size, (rung.batch, context_of(config) + 1))
    if rung.compiled:
        built = compile_regions(built, backend="eager" if tiny else "inductor")
    return LMStepper(rung.who, built, tokens, rung.bf16, fused=rung.fused, foreach=not rung.fused)


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the ladders' gains over the textbook, and Tandem over transformers on the rung that both have."""
    found: dict[str, float] = {}
    for model in LADDERS | CPU_LADDERS:
        own = [row for row in rows if row.get("model") == model and "step_s" in row]
        climbed = {row["step"]: row for row in own if row["who"] != _PEER}
        for peer in (row for row in own if row["who"] == _PEER and row["step"] in climbed):
            for name, key in (("speed", "tokens_per_s"), ("memory", "peak_gib")):
                found[f"{model}_{name}_over_transformers"] = climbed[peer["step"]][key] / peer[key]
        if "textbook" in climbed:
            speeds = {step: row["tokens_per_s"] for step, row in climbed.items()}
            found[f"{model}_speed_over_textbook"] = max(speeds.values()) / speeds["textbook"]
    return found


@exit_on_user_error
def main() -> None:
    """Climb on this machine, and print the table."""
    on_gpu = torch.cuda.is_available()
    parser = benchmark_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=[*LADDERS, *CPU_LADDERS], help="(default: those of the device)")
    options = parser.parse_args()
    table = Table({"case": "<44", "batch": "5d", "step_s": "8.3f", "tokens_per_s": "12,.0f", "peak_gib": "8.2f"})
    for model in options.models or [*(LADDERS if on_gpu else CPU_LADDERS)]:
        for row in climb(model, False, torch.device("cuda" if on_gpu else "cpu")):
            table.add(row)
    finish(table.rows, ratios(table.rows), options.json)


if __name__ == "__main__":
    main()
