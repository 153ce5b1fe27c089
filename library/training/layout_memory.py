"""What one process of a layout holds at the highest point of a step, estimated from a model's footprint.

The arithmetic of ``docs/distributed.md``, in bytes. Weights are split by ``shard`` and ``zero = 3``, dealt out by
blocks under ``pp``; ``tp`` splits the linear layers of the blocks. A LoRA is whole on every process, its optimizer's
state split by ``zero`` alone; where all weights are trained, gradients and optimizer are split as the weights are. What
is gathered for a moment counts as activations.

Not in it: the CUDA context and the libraries' own buffers, and what the allocator loses between blocks (:func:`fits`
allows for both); sampling and validation, and encoders while the cache is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from library.config.parallel_schema import ParallelConfig
from library.training.footprint import Footprint, Part
from library.training.memory import GIB, Parts

RESERVE = int(1.5 * GIB)  # CUDA context, cuBLAS workspaces, NCCL channels: 0.5 to 1.5 GiB on the cards that were seen
# Of a block's activations a part is the whole stream on every process of tp and the rest is split: 10 to 24 of 34
# (Korthikanti et al. 2022, arXiv 2205.05198, equation 3).
_WHOLE_UNDER_TP = 10 / 34
# Gradients and temporaries of the block that backward is in, in its largest kept tensors: 4.4 to 5 were measured on
# CPU in FLUX blocks, with and without recomputation (tests/training/test_layout_memory.py).
_PASSING = 5
_ZERO_BUCKET = 32 * 2**20  # of gradients under way (library/training/zero.py)
_ZERO_LIVE = 10**9  # weights that stage 3 keeps gathered, DeepSpeed's stage3_max_live_parameters
_ADAM = 8  # bytes of state for each trained number: two moments in fp32


@dataclass(frozen=True)
class Options:
    """What a step is, besides its layout."""

    full: bool = False  # all weights are trained, in fp32; else a LoRA in fp32 on a base in bf16
    fp8: bool = False  # the base's matrices in fp8
    checkpointing: bool = False
    batch: int = 1  # of a process that has data of its own

    def describe(self) -> str:
        """Return the options in a few words."""
        base = "fp32" if self.full else "fp8" if self.fp8 else "bf16"
        return f"{base}, checkpointing" if self.checkpointing else base


def fits(parts: Parts, limit: int) -> bool:
    """Return whether ``parts`` go into a GPU of ``limit`` bytes, with room for what is not counted."""
    return parts.total + RESERVE <= 0.95 * limit


def layouts(model: Footprint, gpus: int, in_machine: int, batch: int, full: bool = False) -> Iterator[ParallelConfig]:
    """Yield the layouts that ``gpus`` processes can have, simple ones first; ``full``: all weights are trained.

    Groups that exchange much (``shard``, ``tp``) lie within a machine; ``shard`` may take all there are instead. A
    pipeline's pieces are whole images or texts: one of a batch of one, which leaves all stages but one idle. ``zero``
    comes last: it takes another package.
    """
    yield ParallelConfig(dp=gpus)
    if gpus == 1:
        return
    inside = min(gpus, in_machine)
    splits = sorted({n for n in range(2, inside + 1) if inside % n == 0} | {gpus})
    for shard in splits:
        yield ParallelConfig(dp=gpus // shard, shard=shard)
    if not full:
        yield ParallelConfig(dp=1, shard=gpus, lora_placement="sharded")
    for tp in (n for n in splits if n <= inside and model.heads % n == 0):
        yield ParallelConfig(dp=gpus // tp, tp=tp)
    for pp in (n for n in splits if model.has_stages and n <= sum(part.count for part in model.blocks)):
        pieces = max(n for n in range(1, pp + 1) if batch % n == 0)
        yield ParallelConfig(dp=gpus // pp, pp=pp, microbatches=pieces)
    if not full:
        yield from (ParallelConfig(dp=gpus, zero=stage) for stage in (2, 3))


def describe(layout: ParallelConfig) -> str:
    """Return a layout as the keys that make it."""
    sizes = {"dp": layout.dp, "shard": layout.shard, "tp": layout.tp, "pp": layout.pp, "zero": layout.zero}
    said = ", ".join(f"{key} = {size}" for key, size in sizes.items() if size and size > 1) or "one process"
    return f"{said}, LoRA too" if layout.splits_lora else said


def estimate(model: Footprint, layout: ParallelConfig, options: Options) -> Parts:
    """Return what the fullest process holds.

    ``weights`` are the frozen ones, or all that are trained; with these ``lora`` is 0.
    """
    kept = [(count, part) for count, part in _own_blocks(model, layout.pp) if count]
    everything = [*kept, (1, model.outside)]
    width = 4 if options.full else 2
    owners = layout.dp or 1 if layout.zero else 1  # among whom ZeRO splits
    split = 1 / (owners if layout.zero == 3 else layout.shard)

    def stored(part: Part) -> float:
        matrices = part.matrices * (1 if options.fp8 and not options.full else width) / layout.tp
        return matrices + (part.weights - part.matrices) * width

    weights = sum(count * stored(part) for count, part in everything) * split
    lora = sum(part.count * part.lora for part in model.parts) * 4 / (layout.shard if layout.splits_lora else 1)
    trained = weights if options.full else lora
    numbers = trained / 4
    # DDP reduces in buckets that are a copy of the gradients, with several replicas and without shard
    buckets = trained if (layout.dp or 1) > 1 and not layout.gathers_weights else 0
    own = trained / owners  # what ZeRO steps on here, beside the whole LoRA
    if layout.zero:
        buckets = min(trained, _ZERO_BUCKET) + own  # what is under way, and the gradients of that part
    activations = _activations(model, kept, layout, options)
    # gathered are the block that runs and the one that is fetched meanwhile; what lies outside stays so
    if layout.gathers_weights:
        gathered = 2 * max(stored(part) for _, part in kept) + stored(model.outside)
        if layout.zero:
            gathered = max(gathered, min(_ZERO_LIVE * width, weights * owners))
        activations += gathered * (2 if options.full else 1)  # with their gradients, until these are handed out
    state = numbers * _ADAM / owners + (own if layout.zero else 0)
    update = 0 if options.full else trained + state  # copies that the update guard keeps for a moment
    return Parts(
        weights=round(weights),
        lora=round(lora),
        gradients=round((own if layout.zero in (2, 3) else trained) + buckets),
        optimizer=round(state),
        update=round(update),
        activations=round(activations),
    )


def _own_blocks(model: Footprint, stages: int) -> list[tuple[int, Part]]:
    """Return the blocks of the fullest stage: a run of all blocks, as many as the others or one more."""
    order = [part for part in model.blocks for _ in range(part.count)]
    length = math.ceil(len(order) / stages)
    runs = [order[i : i + length] for i in range(0, len(order), length)]
    fullest = max(runs, key=lambda run: sum(part.weights + part.activations // 2 for part in run))
    return [(fullest.count(part), part) for part in model.blocks]


def _activations(model: Footprint, own: list[tuple[int, Part]], layout: ParallelConfig, options: Options) -> float:
    """Return what forward keeps for backward, and the gradients that are under way in the largest block."""

    def of(part: Part) -> float:
        return part.activations * (_WHOLE_UNDER_TP + (1 - _WHOLE_UNDER_TP) / layout.tp)

    lasting, passing = sum(count * of(part) for count, part in own), 0.0
    if options.checkpointing:
        lasting, passing = float(sum(count * part.inputs for count, part in own)), max(of(part) for _, part in own)
    pieces = layout.pieces if layout.is_pipelined else 1
    under_way = min(layout.pp, pieces) if layout.schedule == "1f1b" else pieces
    share = under_way / pieces  # of the batch whose activations wait at once
    outside = model.outside.activations
    gradients = _PASSING * max(part.largest for _, part in own)
    unpacked = model.largest_matrix * 2 / layout.tp if options.fp8 else 0
    return options.batch * (lasting * share + (passing + gradients) / pieces + outside) + unpacked
