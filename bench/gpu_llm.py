"""The ladder of ``bench/gpu.py``: how fast a language model trains, one known speed-up after the other.

    fp32 -> TF32 -> bf16 -> SDPA flash -> compile -> fused AdamW -> padded vocabulary -> larger batch

GPT-2 124M and Llama 3.2 1B, published sizes, random weights, 1024 random tokens a row, all weights trained, clipping
at 1, AdamW. Each rung keeps what the rungs before it brought. Before "SDPA flash" attention is PyTorch's plain kernel,
which writes all scores to memory; before "fused AdamW" it is the ``foreach`` one. Compilation is ``train_llm.py``'s:
block by block. Llama's 128,256 tokens are a multiple of 64 already, so that rung is left out. transformers' model of
the same size stands beside the rung of bf16 and flash attention.

Reported are tokens/s (median step), the peak of allocated memory, and MFU: what the model needs, counted as
``library.training.tasks.pretraining`` does and the same on every rung, over the bf16 matrix products of this card.

A ladder is one process: a process a rung would spend more time on starting than on measuring. A rung that fails or
runs out of memory is a row that says so, and the next one begins with an empty card.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from accelerate.utils import compile_regions
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.llm_train import LMStepper, loss_of, transformers_model
from bench.measure import reason, time_steps
from library.models.llm.model import TransformerLM
from library.models.llm.spec import LMConfig, gpt2, llama, preset
from library.training.tasks.pretraining import flops_per_token

LADDERS = {"gpt2-124m": (8, 32), "llama3.2-1b": (4, 8)}  # rows of a batch, and of the larger one: fit into 80 GB
_TINY = {
    "gpt2-124m": gpt2(64, 2, 2, vocab_size=250, context=32),
    "llama3.2-1b": llama(64, 2, 4, 2, 128, vocab_size=256, context=32, tied=True),
}
_CONTEXT = 1024
_PEER = "transformers"


@dataclass(frozen=True)
class Rung:
    """One row.

    Attributes:
        step: what is new.
        batch: rows of a step.
        who: tandem or transformers.
        tf32, bf16: of matrix products; bf16 by autocast, weights stay fp32.
        flash: PyTorch's flash attention, and not its plain one.
        compiled, fused, padded: blocks by inductor, AdamW as one kernel, vocabulary to a multiple of 64.
    """

    step: str
    batch: int
    who: str = "tandem"
    tf32: bool = False
    bf16: bool = False
    flash: bool = False
    compiled: bool = False
    fused: bool = False
    padded: bool = False


def rungs(model: str, tiny: bool) -> list[Rung]:
    """Return the ladder of ``model``, and transformers' row behind the one that it compares with."""
    batch, larger = (1, 2) if tiny else LADDERS[model]
    changes: list[tuple[str, dict[str, Any]]] = [
        ("TF32", {"tf32": True}),
        ("bf16", {"bf16": True}),
        ("SDPA flash", {"flash": True}),
        ("compile", {"compiled": True}),
        ("fused AdamW", {"fused": True}),
        ("padded vocabulary", {"padded": True}),
        (f"batch {larger}", {"batch": larger}),
    ]
    if config_of(model, tiny).vocab_size % 64 == 0:
        changes = [change for change in changes if "padded" not in change[1]]
    ladder = [Rung("fp32", batch)]
    for step, change in changes:
        ladder.append(replace(ladder[-1], step=step, **change))
    beside = next(i for i, rung in enumerate(ladder) if rung.flash)
    ladder.insert(beside + 1, replace(ladder[beside], who=_PEER))
    return ladder


def config_of(model: str, tiny: bool) -> LMConfig:
    """Return the published sizes, or something tiny that is built alike."""
    return _TINY[model] if tiny else preset(model)


def climb(model: str, device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each rung of ``model`` as it is measured."""
    config = config_of(model, tiny)
    context, precision = min(_CONTEXT, config.context), torch.get_float32_matmul_precision()
    with torch.device("meta"):
        flops = flops_per_token(TransformerLM(config), context)
    for rung in rungs(model, tiny):
        row = {"case": f"{model}, {rung.step}, {rung.who}", "model": model, **asdict(rung)}
        begun = time.perf_counter()
        try:
            torch.set_float32_matmul_precision("high" if rung.tf32 else "highest")
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION if rung.flash else SDPBackend.MATH):
                seconds, peak = time_steps(_build(rung, config, context, device, tiny).loss, device, once=tiny)
        except Exception as error:  # whatever it is, the other rungs are worth having
            row["error"] = reason(error)
        else:
            tokens = rung.batch * context / seconds
            row |= {"step_s": seconds, "tokens_per_s": tokens, "flops_per_s": tokens * flops, "peak_gib": peak / 2**30}
        finally:
            torch.set_float32_matmul_precision(precision)
        yield row | {"took_s": time.perf_counter() - begun}
        torch.compiler.reset()  # compiled code of its shapes
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _build(rung: Rung, config: LMConfig, context: int, device: torch.device, tiny: bool) -> LMStepper:
    config = config.padded(64) if rung.padded else config
    torch.manual_seed(0)
    with device:
        model: Any = transformers_model(config) if rung.who == _PEER else TransformerLM(config).initialise()
        tokens = torch.randint(0, config.vocab_size, (rung.batch, context + 1))
    if rung.compiled:
        model = compile_regions(model, backend="eager" if tiny else "inductor")
    return LMStepper(model, loss_of(rung.who, model), tokens, rung.bf16, fused=rung.fused, foreach=not rung.fused)


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the whole ladder's gain, and Tandem over transformers on the rung that both have."""
    found: dict[str, float] = {}
    for model in LADDERS:
        own = [row for row in rows if row.get("model") == model and "step_s" in row]
        climbed = {row["step"]: row for row in own if row["who"] != _PEER}
        for peer in (row for row in own if row["who"] == _PEER and row["step"] in climbed):
            for name, key in (("speed", "tokens_per_s"), ("memory", "peak_gib")):
                found[f"{model}_{name}_over_transformers"] = climbed[peer["step"]][key] / peer[key]
        if "fp32" in climbed:
            speeds = {step: row["tokens_per_s"] for step, row in climbed.items()}
            found[f"{model}_speed_over_fp32"] = max(speeds.values()) / speeds["fp32"]
    return found
