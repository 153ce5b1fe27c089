"""What a training step takes, by a formula: where a step cannot be traced, and for layouts of several processes.

The formula may be off by 20 %. :func:`model_numbers` counts weights on the meta device, and what a block keeps for the
backward pass in one step of a shallow model on fake tensors, which needs no compiler and no card. :func:`step_parts` is
the arithmetic of ``docs/distributed.md``: weights are split by ``shard``, ``pp`` and ``zero = 3``, and by ``tp`` as the
model's plan says. A LoRA is full on every process and ``zero`` splits its optimizer's state; where all weights are
trained, gradients and optimizer are split as the weights are.

Not in it: the CUDA context, what the allocator loses, what a LoRA's update copies, sampling, validation, encoders.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
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
from library.precision.recipe import Recipe
from library.training.memory.block_swap import most_swapped, replace_tensors
from networks.network import inject_adapter
from networks.options import parse_network_args

_FEW = 2  # blocks of a kind in the shallow model
# Of a block's activations a part is the full stream on every process of tp and the rest is split: 10 to 24 of 34
# (Korthikanti et al. 2022, arXiv 2205.05198, equation 3).
_FULL_UNDER_TP = 10 / 34
_ZERO_LIVE = 10**9  # weights that stage 3 keeps gathered, DeepSpeed's stage3_max_live_parameters


@dataclass(frozen=True)
class ModelShape:
    """A model's kind and sizes: the arguments of its class, or a language model's configuration."""

    name: str  # of the family
    arguments: Mapping[str, Any] | LMConfig


@dataclass(frozen=True)
class BlockKind:
    """Blocks of one kind."""

    count: int
    numbers: int  # of one, without its LoRA
    kept: int  # bytes that one keeps for the backward pass of a batch of one
    inputs: int  # bytes of what goes in, kept instead where blocks are recomputed


@dataclass(frozen=True)
class ModelNumbers:
    """A model and its step on a batch of one.

    Attributes:
        weights_by_tp: number of processes that have layers together (``tp``) -> weights of one of them, without a LoRA.
        matrices: of the weights, those that ``fp8_scaled`` makes fp8 and autocast casts.
        lora: numbers of the LoRA; 0 where all weights are trained.
        blocks: of each kind.
        rest: bytes of the step's highest point that no block keeps: outside of the blocks, and for a moment.
        can_be_cut: whether ``pp`` is possible.
    """

    weights_by_tp: Mapping[int, int]
    matrices: int
    lora: int
    blocks: tuple[BlockKind, ...]
    rest: int
    can_be_cut: bool

    @property
    def swappable(self) -> tuple[int, int]:
        """How many blocks may be swapped, and the numbers of the largest."""
        sizes = [(kind.count, kind.numbers) for kind in self.blocks]
        return most_swapped(sizes), max(numbers for _, numbers in sizes)


@dataclass(frozen=True)
class StepOptions:
    """What a step is, besides its layout."""

    full: bool = False  # all weights are trained, in fp32; else a LoRA on a frozen base
    fp8: bool = False  # the base's matrices in fp8
    checkpointing: bool = False
    batch: int = 1  # of a process that has data of its own
    base_bytes: int = 2  # of a frozen weight
    lora_bytes: int = 4  # of a LoRA's weight
    optimizer_bytes: int = 8  # of state for each trained number; AdamW's two moments in fp32
    swapped: int = 0  # blocks whose weights wait in host memory
    inputs_on_host: bool = False  # of recomputed blocks
    kept: int = 0  # bytes of activations that recomputed blocks keep all the same

    def describe(self) -> str:
        """Return the options in a few words."""
        base = "fp32" if self.full else "fp8" if self.fp8 else "bf16"
        return f"{base}, checkpointing" if self.checkpointing else base


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


def model_numbers(
    shape: ModelShape, tokens: int, text: int, rank: int, base: torch.dtype = torch.bfloat16, autocast: bool = True
) -> ModelNumbers:
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
        shallow, few, _ = _model(shape, base, rank, most_blocks=_FEW)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if name not in lora}
    recipe, linear = Recipe(), [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    matrices = {f"{name}.weight" for name in linear if not recipe.excluded_as(name.removesuffix(".base"))}
    with FakeTensorMode(allow_non_fake_inputs=True):
        # fake tensors of the CPU in the place of meta ones, which know no autocast
        replace_tensors(shallow, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        step, rest = _step_bytes(shallow, few, _inputs(shape, shallow, tokens, text), autocast, casts=not rank)
    trained = {id(p) for name, p in model.named_parameters() if name in lora}
    numbers = {
        type(block).__name__: sum(p.numel() for p in block.parameters() if id(p) not in trained) for block in blocks
    }
    counts = Counter(type(block).__name__ for block in blocks)
    return ModelNumbers(
        weights_by_tp=_weights_by_tp(model, sizes, bool(rank)),
        matrices=sum(sizes[name] for name in matrices if name in sizes),
        lora=sum(parameter.numel() for name, parameter in model.named_parameters() if name in lora),
        blocks=tuple(BlockKind(count, numbers[kind], *step[kind]) for kind, count in counts.items()),
        rest=rest,
        can_be_cut=isinstance(model, TransformerLM) or bool(family_class(shape.name).tail),
    )


def _weights_by_tp(model: Any, sizes: Mapping[str, int], has_lora: bool) -> dict[int, int]:
    """Return for each number of processes that can have layers together how many weights each of them holds."""
    is_text = isinstance(model, TransformerLM)
    heads = model.config.heads if is_text else getattr(model.config, "num_attention_heads", 1)
    weights = {1: sum(sizes.values())}
    for tp in (n for n in range(2, heads + 1) if heads % n == 0):
        with suppress(UserError):  # something else than the heads does not divide, or there is no plan
            plan = lm_split_plan(model.config, tp, has_lora) if is_text else split_plan(type(model), model.config, tp)
            split = sum(numbers for name, numbers in sizes.items() if _layer(name) in plan)
            weights[tp] = weights[1] - split + split // tp
    return weights


def _layer(name: str) -> str:
    """Return the layer of a weight; a bias, which is small, is not split here."""
    return name.removesuffix(".weight").removesuffix(".base") if name.endswith(".weight") else ""


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
    """Counts the bytes of all tensors that operations have made and that are still there.

    ``torch.distributed._tools.MemTracker`` does not do: it hooks the gradient of every parameter and raises on a frozen
    one (PyTorch 2.13).
    """

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
    model: nn.Module, blocks: list[nn.Module], inputs: dict[str, Any], autocast: bool, casts: bool
) -> tuple[dict[str, tuple[int, int]], int]:
    """Return the bytes that a block of each kind keeps and gets, and those of the highest point that none keeps.

    A forward and a backward pass; gradients of weights are there already, as in every step but the first.

    Args:
        model, blocks, inputs: of fake tensors.
        autocast: to 16 bits.
        casts: whether blocks keep their weights as autocast casts them; these are left out.
    """
    found, before = dict[str, tuple[int, int]](), list[int]()

    def enter(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        before.append(live.now)

    def leave(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], _: Any) -> None:
        streams = {id(t): t for t in (*arguments, *named.values()) if isinstance(t, Tensor) and t.requires_grad}
        cast = sum(2 * p.numel() for p in module.parameters() if p.ndim == 2) if casts else 0
        kept, got = live.now - before[-1] - cast, sum(t.nbytes for t in streams.values())
        found[type(module).__name__] = max((kept, got), found.get(type(module).__name__, (0, 0)))

    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    for block in blocks:
        block.register_forward_pre_hook(enter, with_kwargs=True)
        block.register_forward_hook(leave, with_kwargs=True)
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    with _LiveBytes((*model.parameters(), *model.buffers(), *gradients)) as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = tree_leaves(model.train()(**inputs))[0]
        loss = output.float().square().mean()
        del output
        loss.backward()
    of_blocks = sum(found[type(block).__name__][0] for block in blocks)
    return found, max(0, live.peak - of_blocks)


def step_parts(model: ModelNumbers, options: StepOptions, layout: ParallelConfig | None = None) -> dict[str, int]:
    """Return what the fullest process holds at the highest point of a step: bytes by part.

    ``weights`` are the frozen ones, or all that are trained; with these the LoRA is 0.
    """
    layout = layout or ParallelConfig()
    replicas = layout.dp or 1
    owners = replicas if layout.zero else 1  # among whom ZeRO splits
    width, matrices = 4 if options.full else options.base_bytes, model.matrices / layout.tp
    in_fp8 = matrices * (width - 1) if options.fp8 and not options.full else 0
    whole = model.weights_by_tp[1]
    number = (model.weights_by_tp[layout.tp] * width - in_fp8) / whole  # bytes of a weight
    outside = whole - sum(kind.count * kind.numbers for kind in model.blocks)
    most, largest = model.swappable
    weights = (_stage(model, layout.pp) + outside - min(options.swapped, most) * largest) * number
    weights /= owners if layout.zero == 3 else layout.shard
    lora = model.lora * options.lora_bytes
    trained = weights if options.full else lora
    # DDP reduces in buckets that are a copy of the gradients; ZeRO's are those of its own share
    buckets = trained / owners if replicas > 1 and layout.shard == 1 else 0
    numbers = trained / (4 if options.full else options.lora_bytes) / owners
    activations = _activations(model, options, layout)
    if layout.gathers_weights:  # the block that runs and the one that is fetched meanwhile, with their gradients
        gathered = (2 * largest + outside) * number
        gathered = max(gathered, min(_ZERO_LIVE * number, weights * owners)) if layout.zero else gathered
        activations += gathered * (2 if options.full else 1)
    return {
        "weights": round(weights),
        "LoRA": round(lora),
        "gradients": round((trained / owners if layout.zero in (2, 3) else trained) + buckets),
        "optimizer": round(numbers * (options.optimizer_bytes + (4 if layout.zero else 0))),
        "activations": round(activations),
    }


def _stage(model: ModelNumbers, pp: int) -> int:
    """Return the numbers of the blocks of the fullest of ``pp`` stages, which have as many blocks each."""
    every = sorted((kind.numbers for kind in model.blocks for _ in range(kind.count)), reverse=True)
    return sum(every[: -(-len(every) // pp)])


def _activations(model: ModelNumbers, options: StepOptions, layout: ParallelConfig) -> float:
    """Return what is kept for backward, with what the largest block keeps while it is recomputed."""
    split = _FULL_UNDER_TP + (1 - _FULL_UNDER_TP) / layout.tp
    # trained weights as autocast has cast them, kept to the end of forward unless they are gathered by block
    casts = 2 * model.matrices / layout.tp / layout.pp / options.batch
    recomputed = casts = casts if options.full and not layout.gathers_weights else 0.0
    kept = sum(kind.count * kind.kept for kind in model.blocks) * split
    if options.checkpointing:
        inputs = sum(kind.count * kind.inputs for kind in model.blocks)
        recomputed = max(casts, max(kind.kept for kind in model.blocks) * split)
        kept = min(kept, (0 if options.inputs_on_host else inputs) + options.kept / options.batch)
    at_once = min(layout.pp, layout.microbatch_count) / layout.microbatch_count  # of the batch, on the first stage
    return options.batch * (kept * at_once / layout.pp + recomputed + model.rest)
