"""What a process holds at the highest point of a training step, estimated without the model's weights.

This one estimate is behind ``tools/plan_parallel.py``, the memory dry run (``dry_run``: whether real steps are needed)
and the settings that it proposes. Two parts:

- :func:`model_memory`: the model's own numbers. Weights are counted on the meta device. What a block keeps for the
  backward pass, and holds for a moment, is counted in a forward and a backward pass of a shallow model on fake tensors,
  which have shapes, dtypes and lifetimes and no numbers, under the autocast of training, with Tandem's own layers:
  the same on every processor.
- :func:`estimate`: the arithmetic of ``docs/distributed.md``. Weights are split by ``shard`` and ``zero = 3``, blocks
  shared by ``pp``, whose first stage alone has the tables and whose last what follows the blocks; ``tp`` splits what
  its plan for the model says. A LoRA is full on every process, its optimizer's state split by ``zero`` alone; where all
  weights are trained, gradients and optimizer are split as the weights are. What is gathered for a moment counts as
  activations.

Not in it: the CUDA context and the libraries' own buffers, and what the allocator loses between blocks (:func:`fits`
allows for both); sampling and validation, and encoders while the cache is filled.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from library.config.model_types import IMAGE_MODELS
from library.config.schema import NetworkConfig, ParallelConfig
from library.errors import UserError, did_you_mean
from library.models.family import split_plan
from library.models.family_by_name import family_class
from library.models.files import transformer_of
from library.models.hub import find_model, pipeline_index
from library.models.llm.files import open_lm
from library.models.llm.model import TransformerLM, lm_split_plan, separate_projections
from library.models.llm.spec import PRESETS, LMConfig
from library.models.registry import lora_targets
from library.nn.checkpointing import ALONE
from library.nn.tensor_split import Parts
from library.precision.recipe import Recipe
from library.training.memory.block_swap import most_swapped, replace_tensors, swapped_per_kind
from library.training.memory.budget import GIB, MemoryEstimate
from library.training.parallel.pipeline import lm_split_points, partition, stage_sizes
from networks.network import inject_adapter
from networks.options import parse_network_args

# Number of processes that have a layer together (``tp``) -> numbers (weights) that the fullest of them holds, without a
# LoRA, and those of them that ``fp8_scaled`` makes fp8.
Held = Mapping[int, tuple[int, int]]
Groups = dict[str, list[tuple[str, Tensor]]]  # of parameters, with their names
Plans = dict[int, Mapping[str, Parts]]  # number of processes that have a layer together -> how they share each


@dataclass(frozen=True)
class BlockMemory:
    """Blocks of one kind, or what lies outside the blocks.

    Attributes:
        count: blocks; the other numbers are of one of them.
        held: frozen or trained numbers.
        lora: numbers of its LoRA.
        activations: bytes kept for the backward pass by a batch of one.
        inputs: bytes of what goes in, kept instead where blocks are recomputed.
        temporary: bytes that forward or backward hold at most besides what is kept.
    """

    count: int
    held: Held
    lora: int
    activations: int
    inputs: int
    temporary: int

    @property
    def weights(self) -> int:
        """Numbers of the whole."""
        return self.held[1][0]


@dataclass(frozen=True)
class ModelMemory:
    """A model and its step on a batch of one.

    Attributes:
        blocks, outside: its parts, blocks in running order; without a LoRA where all weights are trained.
        largest_matrix: numbers of the largest in a block.
        ends: of what lies outside, what only the first, every, and only the last stage of a pipeline holds; a head that
            is tied to the embedding is on both. None where ``pp`` cannot cut the model.
    """

    blocks: tuple[BlockMemory, ...]
    outside: BlockMemory
    largest_matrix: int
    ends: tuple[Held, Held, Held] | None

    @property
    def parts(self) -> tuple[BlockMemory, ...]:
        """Everything."""
        return (*self.blocks, self.outside)


@dataclass(frozen=True)
class ModelShape:
    """A model's kind and sizes: the arguments of its class, or a language model's configuration."""

    name: str  # of the family
    arguments: Mapping[str, Any] | LMConfig


def shape_of(model: str) -> ModelShape:
    """Return the shape of a published model by name, or of a folder or file, of which headers are read.

    Raises:
        UserError: no such name, file or folder, or another kind of model.
    """
    if model in IMAGE_MODELS:
        return ModelShape(model, family_class(model).published)
    if model in PRESETS:
        return ModelShape(PRESETS[model].family, PRESETS[model])
    if not (path := Path(model).expanduser()).exists() and "/" not in model:
        names = [*IMAGE_MODELS, *PRESETS]
        raise UserError(
            f"{model}: no file, folder or known model{did_you_mean(model, names)}; known: {', '.join(names)}"
        )
    path = find_model(model, "model")
    if path.is_dir() and pipeline_index(path) is None and not (path / "transformer").is_dir():
        config, _, _ = open_lm(path)
        return ModelShape(config.family, config)
    return ModelShape(*transformer_of(path))


def model_memory(
    shape: ModelShape, tokens: int, text: int, rank: int, base: torch.dtype = torch.bfloat16, autocast: bool = True
) -> ModelMemory:
    """Return what ``shape`` takes.

    Args:
        shape: of :func:`shape_of`.
        tokens: of an image (1024 x 1024 pixels are 4096), or of a text.
        text: of a caption; unused by language models.
        rank: of the LoRA; 0 trains all weights.
        base: dtype of the weights.
        autocast: to 16 bits; without it the weights' dtype is computed in, which must be fp32.
    """
    with torch.device("meta"):
        model, blocks, lora = _model(shape, base, rank)
        shallow, few, its_lora = _model(shape, base, rank, most_blocks=2)
        plans = _tp_plans(shallow, rank > 0)
    groups = _groups(shape, model, blocks)
    whole = _numbers(model, groups, lora, {1: {}})
    part = _numbers(shallow, _groups(shape, shallow, few), its_lora, plans)
    counts, in_shallow = Counter(_kinds(blocks)), Counter(_kinds(few))
    with FakeTensorMode(allow_non_fake_inputs=True):
        # fake tensors of the CPU in the place of meta ones, which know no autocast
        replace_tensors(shallow, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        bytes_of = _step_bytes(shallow, few, _inputs(shape, shallow, tokens, text), autocast)

    def of(kind: str, count: int) -> BlockMemory:
        held = {tp: _share(numbers, in_shallow[kind] or 1) for tp, numbers in part[kind].items()}
        trained = sum(parameter.numel() for name, parameter in groups[kind] if name in lora)
        return BlockMemory(count, held | {1: _share(whole[kind][1], count)}, round(trained / count), **bytes_of[kind])

    largest = max(p.numel() for block in blocks for p in block.parameters() if p.ndim == 2)
    ends = (part["first"], part["every"], part["last"]) if "last" in part else None
    return ModelMemory(tuple(of(kind, count) for kind, count in counts.items()), of("", 1), largest, ends)


def _kinds(blocks: Iterable[nn.Module]) -> list[str]:
    return [type(block).__name__ for block in blocks]


def _share(numbers: tuple[int, int], count: int) -> tuple[int, int]:
    return round(numbers[0] / count), round(numbers[1] / count)


def _tp_plans(model: Any, has_lora: bool) -> Plans:
    """Return for each number of processes that can have layers together how these are split."""
    is_text = isinstance(model, TransformerLM)
    heads = model.config.heads if is_text else getattr(model.config, "num_attention_heads", 1)
    plans: Plans = {1: {}}
    for tp in (n for n in range(2, heads + 1) if heads % n == 0):
        with suppress(UserError):  # something else than the heads does not divide, or there is no plan
            plan = lm_split_plan(model.config, tp, has_lora) if is_text else split_plan(type(model), model.config, tp)
            plans[tp] = plan
    return plans


def _groups(shape: ModelShape, model: nn.Module, blocks: list[nn.Module]) -> Groups:
    """Return the parameters of all blocks of a kind, of "" the rest, and those of that by stages of a pipeline."""
    kind_of = {id(p): type(block).__name__ for block in blocks for p in block.parameters()}
    groups: Groups = {kind: [] for kind in (*_kinds(blocks), "")}
    for name, parameter in model.named_parameters():
        groups[kind_of.get(id(parameter), "")].append((name, parameter))
    ends = _stage_ends(shape, model)
    for end, modules in ends.items():
        groups[end] = [(f"{at}.{name}", p) for at in modules for name, p in model.get_submodule(at).named_parameters()]
    at_ends = {id(parameter) for end in ends for _, parameter in groups[end]}
    groups["every"] = [pair for pair in groups[""] if id(pair[1]) not in at_ends]
    return groups


def _numbers(model: nn.Module, groups: Groups, lora: set[str], plans: Plans) -> dict[str, dict[int, tuple[int, int]]]:
    """Return what is held of each group under each of ``plans``."""
    recipe, linear = Recipe(), (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    fp8 = {f"{name}.weight" for name in linear if not recipe.excluded_as(name.removesuffix(".base"))}

    def held(name: str, parameter: Tensor, plan: Mapping[str, Parts], tp: int) -> int:
        layer, _, kind = name.rpartition(".")
        parts = plan.get(layer.removesuffix(".base"))
        is_split = parts is not None and (kind == "weight" or parts.dim == 0)  # a bias goes with the outputs
        return parameter.numel() // tp if is_split else parameter.numel()

    found: dict[str, dict[int, tuple[int, int]]] = {}
    for group, members in groups.items():
        own = [(name, parameter) for name, parameter in members if name not in lora]
        found[group] = {
            tp: (
                sum(held(name, p, plan, tp) for name, p in own),
                sum(held(name, p, plan, tp) for name, p in own if name in fp8),
            )
            for tp, plan in plans.items()
        }
    return found


def _stage_ends(shape: ModelShape, model: Any) -> dict[str, Sequence[str]]:
    """Return the modules of only the ``first`` and only the ``last`` stage of a pipeline; none if it cannot be cut."""
    if isinstance(model, TransformerLM):
        points = lm_split_points(model)
        return {"first": points.embeddings, "last": points.tail}
    tail = family_class(shape.name).tail
    return {"first": (), "last": tail} if tail else {}


def _model(
    shape: ModelShape, base: torch.dtype, rank: int, most_blocks: int | None = None
) -> tuple[nn.Module, list[nn.Module], set[str]]:
    """Return the model, of ``most_blocks`` of each kind, its blocks, and the names of its LoRA's weights."""
    arguments, model = shape.arguments, nn.Module()
    torch.set_default_dtype(base)
    try:
        if isinstance(arguments, LMConfig):
            model = TransformerLM(replace(arguments, layers=min(most_blocks or arguments.layers, arguments.layers)))
            blocks = list(model.blocks)
        else:
            model = family_class(shape.name).build(arguments, most_blocks)
            blocks = family_class(shape.name).blocks(model)
    finally:
        torch.set_default_dtype(torch.float32)
    if not rank:
        return model, blocks, set()
    if isinstance(model, TransformerLM):
        separate_projections(model)
    targets = lora_targets()[shape.name]
    options = parse_network_args(NetworkConfig(network_dim=rank, network_alpha=rank), targets)
    trained = {id(p) for p in inject_adapter(model, options, targets, seed=0).parameters()}
    return model, blocks, {name for name, p in model.named_parameters() if id(p) in trained}


def _inputs(shape: ModelShape, model: Any, tokens: int, text: int) -> dict[str, Any]:
    """Return what ``model`` is called with, for a batch of one."""
    if isinstance(shape.arguments, LMConfig):
        words = torch.zeros(1, min(tokens, shape.arguments.context), dtype=torch.long)
        return {"tokens": words, "targets": words}
    return family_class(shape.name).example_inputs(model.config, tokens, text)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations have made and that are still there; fake ones take none."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage._cdata)
        return result

    def _freed(self, storage: int) -> None:
        self.now -= self._sizes.pop(storage)


def _step_bytes(
    model: nn.Module, blocks: list[nn.Module], inputs: dict[str, Any], autocast: bool
) -> dict[str, dict[str, int]]:
    """Return ``activations``, ``inputs`` and ``temporary`` of a :class:`BlockMemory` by kind of block, "" for the rest.

    A forward and a backward pass on fake tensors; gradients of weights are there already, as in every step but the
    first.
    """
    found, marks = {"": Counter[str]()}, list[tuple[str, int]]()  # kind of a block, bytes before it

    def passed(kind: str, lasting: int) -> None:
        """Note what was there besides ``lasting`` since the last call."""
        found[kind]["temporary"] = max(found[kind]["temporary"], live.peak - lasting)
        live.peak = live.now

    def enter(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        kind = type(module).__name__
        streams = {id(t): t for t in (*arguments, *named.values()) if isinstance(t, Tensor) and t.requires_grad}
        found.setdefault(kind, Counter())["inputs"] = sum(t.numel() * t.element_size() for t in streams.values())
        marks.append((kind, live.now))
        live.peak = live.now

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        kind, before = marks[-1]
        found[kind]["activations"] = max(found[kind]["activations"], live.now - before)
        passed(kind, live.now)
        streams = [t for t in (output if isinstance(output, tuple) else (output,)) if t.requires_grad]
        torch.autograd.graph.register_multi_grad_hook(streams, lambda _: backward_begins(kind), mode="any")

    running = [("", 0)]  # the part whose backward pass runs, and the bytes when it began

    def backward_begins(kind: str) -> None:
        passed(*running.pop())
        running.append((kind, live.now))

    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    for block in blocks:
        block.register_forward_pre_hook(enter, with_kwargs=True)
        block.register_forward_hook(leave)
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    with _LiveBytes((*model.parameters(), *model.buffers(), *gradients)) as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = tree_leaves(model.train()(**inputs))[0]
        loss, kept = output.float().square().mean(), live.now
        passed("", kept)
        running[0] = ("", kept)
        del output
        loss.backward()
        backward_begins("")
    found[""]["activations"] = max(0, kept - sum(found[kind]["activations"] for kind, _ in marks))
    return {kind: {key: one[key] for key in ("activations", "inputs", "temporary")} for kind, one in found.items()}


RESERVE = int(1.5 * GIB)  # CUDA context, cuBLAS workspaces, NCCL channels: 0.5 to 1.5 GiB on the cards that were seen
# Of a block's activations a part is the full stream on every process of tp and the rest is split: 10 to 24 of 34
# (Korthikanti et al. 2022, arXiv 2205.05198, equation 3).
_FULL_UNDER_TP = 10 / 34
_ZERO_BUCKET = 32 * 2**20  # of gradients under way (library/training/parallel/zero.py)
_ZERO_LIVE = 10**9  # weights that stage 3 keeps gathered, DeepSpeed's stage3_max_live_parameters


@dataclass(frozen=True)
class StepOptions:
    """What a step is, besides its layout."""

    full: bool = False  # all weights are trained, in fp32; else a LoRA in fp32 on a frozen base
    fp8: bool = False  # the base's matrices in fp8
    checkpointing: bool = False
    batch: int = 1  # of a process that has data of its own
    base_bytes: int = 2  # of a frozen weight
    lora_bytes: int = 4  # of a LoRA's weight
    optimizer_bytes: int = 8  # of state for each trained number; AdamW's two moments in fp32
    swapped: int = 0  # blocks whose weights wait in host memory
    inputs_on_host: bool = False  # of recomputed blocks

    def describe(self) -> str:
        """Return the options in a few words."""
        base = "fp32" if self.full else "fp8" if self.fp8 else "bf16"
        return f"{base}, checkpointing" if self.checkpointing else base


def fits(parts: MemoryEstimate, limit: int) -> bool:
    """Return whether ``parts`` go into a GPU of ``limit`` bytes, with room for what is not counted."""
    return parts.total + RESERVE <= 0.95 * limit


def layouts(model: ModelMemory, gpus: int, in_machine: int, batch: int, full: bool = False) -> Iterator[ParallelConfig]:
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
    for tp in (n for n in splits if n <= inside and n in model.outside.held):
        yield ParallelConfig(dp=gpus // tp, tp=tp)
    for pp in (n for n in splits if model.ends and n <= sum(part.count for part in model.blocks)):
        count = max(n for n in range(1, pp + 1) if batch % n == 0)
        yield ParallelConfig(dp=gpus // pp, pp=pp, microbatches=count)
    if not full:
        yield from (ParallelConfig(dp=gpus, zero=stage) for stage in (2, 3))


def settings_of(layout: ParallelConfig) -> dict[str, str]:
    """Return the keys of ``[parallel]`` that make a layout, as they are written."""
    values = {key: getattr(layout, key) for key in ("dp", "shard", "tp", "pp", "microbatches", "zero")}
    return {key: str(value) for key, value in values.items() if (value or 0) > 1}


def estimate(model: ModelMemory, layout: ParallelConfig, options: StepOptions) -> MemoryEstimate:
    """Return what the fullest process holds.

    ``weights`` are the frozen ones, or all that are trained; with these ``lora`` is 0.
    """
    return max((_of_stage(model, layout, options, *stage) for stage in _stages(model, layout)), key=lambda e: e.total)


def _stages(model: ModelMemory, layout: ParallelConfig) -> Iterator[tuple[int, list[tuple[int, BlockMemory]], Held]]:
    """Yield of each stage its number, its blocks of each kind, and what it holds outside of them."""
    if layout.pp == 1 or model.ends is None:
        yield 0, [(part.count, part) for part in model.blocks], model.outside.held
        return
    order = [part for part in model.blocks for _ in range(part.count)]
    first, every, last = model.ends
    sizes = stage_sizes([part.weights for part in order], first[1][0], last[1][0], layout.pp_balance)
    for stage, local in enumerate(partition(sizes, layout.pp)):
        ends = [every, *([first] if stage == 0 else []), *([last] if stage == layout.pp - 1 else [])]
        held = {tp: (sum(end[tp][0] for end in ends), sum(end[tp][1] for end in ends)) for tp in every}
        blocks = [(sum(order[i] is part for i in local), part) for part in model.blocks]
        yield stage, [(count, part) for count, part in blocks if count], held


def _of_stage(
    model: ModelMemory,
    layout: ParallelConfig,
    options: StepOptions,
    stage: int,
    local: list[tuple[int, BlockMemory]],
    outside: Held,
) -> MemoryEstimate:
    width = 4 if options.full else options.base_bytes
    trained_width = 4 if options.full else options.lora_bytes
    owners = layout.dp or 1 if layout.zero else 1  # among whom ZeRO splits
    split = 1 / (owners if layout.zero == 3 else layout.shard)

    def stored(held: Held) -> float:
        numbers, matrices = held[layout.tp]
        return matrices * (1 if options.fp8 and not options.full else width) + (numbers - matrices) * width

    weights = (sum(count * stored(part.held) for count, part in local) + stored(outside)) * split
    if options.swapped:
        sizes = [(count, part.held[1][1]) for count, part in local]
        shares = swapped_per_kind(sizes, min(options.swapped, most_swapped(sizes)))
        weights -= sum(share * stored(part.held) for share, (_, part) in zip(shares, local, strict=True))
    lora = sum(part.count * part.lora for part in model.parts) * trained_width
    trained = weights if options.full else lora
    numbers = trained / trained_width
    # DDP reduces in buckets that are a copy of the gradients, with several replicas and without shard
    buckets = trained if (layout.dp or 1) > 1 and not layout.gathers_weights else 0
    shard = trained / owners  # what ZeRO steps on here, beside the full LoRA
    if layout.zero:
        buckets = min(trained, _ZERO_BUCKET) + shard  # what is under way, and the gradients of that part
    activations = _activations(model, local, layout, options, stage)
    # gathered are the block that runs and the one that is fetched meanwhile; what lies outside stays so
    if layout.gathers_weights:
        gathered = 2 * max(stored(part.held) for _, part in local) + stored(outside)
        if layout.zero:
            gathered = max(gathered, min(_ZERO_LIVE * width, weights * owners))
        activations += gathered * (2 if options.full else 1)  # with their gradients, until these are handed out
    state = numbers * options.optimizer_bytes / owners + (shard if layout.zero else 0)
    return MemoryEstimate(
        weights=round(weights),
        lora=round(lora),
        gradients=round((shard if layout.zero in (2, 3) else trained) + buckets),
        optimizer=round(state),
        activations=round(activations),
    )


def _activations(
    model: ModelMemory, local: list[tuple[int, BlockMemory]], layout: ParallelConfig, options: StepOptions, stage: int
) -> float:
    """Return what forward keeps for backward, and what the largest block holds for a moment."""

    def of(part: BlockMemory) -> float:
        return part.activations * (_FULL_UNDER_TP + (1 - _FULL_UNDER_TP) / layout.tp)

    lasting = sum(count * of(part) for count, part in local)
    passing = float(max(part.temporary for _, part in local))
    if options.checkpointing:
        fetched = options.swapped or layout.gathers_weights or layout.pp > 1 or layout.tp > 1 or options.full
        pairs = not (options.inputs_on_host or fetched)  # two blocks within a checkpoint (library.nn.checkpointing)
        lasting, passing, left = 0.0, 0.0, ALONE
        for count, part in reversed(local):
            alone = min(left, count) if pairs else count
            left -= alone
            rest = count - alone
            lasting += (alone + -(-rest // 2)) * part.inputs
            freed = (ALONE - left) * part.inputs if pairs else 0  # when backward comes to the first pair
            two = min(rest, 2) * of(part) - freed
            passing = max(passing, max(min(alone, 1) * of(part), two) + part.temporary)
        lasting = 0.0 if options.inputs_on_host else lasting
    casts = 0.0  # of trained weights, which autocast keeps to the end of forward unless they are gathered by block
    if options.full and options.checkpointing and not layout.gathers_weights:
        casts = sum(count * part.held[layout.tp][1] for count, part in local) * 2 / options.batch
    passing = max(passing, casts + model.outside.temporary)
    count = layout.microbatch_count if layout.pp > 1 else 1
    share = min(layout.pp - stage, count) / count  # of the batch whose activations wait at once
    unpacked = model.largest_matrix * 2 / layout.tp if options.fp8 else 0
    return options.batch * (lasting * share + passing / count + model.outside.activations) + unpacked
