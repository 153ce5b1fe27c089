"""What a task tells of its model, so that any layout of ``[parallel]`` can share it among processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from library.models.llm.model import Block, TransformerLM, lm_split_plan
from library.nn.tensor_split import Parts
from networks.network import AdapterNetwork


@dataclass(frozen=True)
class SplitPoints:
    """Where a pipeline can cut a model.

    Attributes:
        blocks: names of the repeated modules in running order.
        two_streams: whether these take image and text; else they take one stream.
        tables: embeddings that only the first stage looks into.
        behind: what follows the blocks, in running order.
    """

    blocks: list[str]
    two_streams: bool
    behind: tuple[str, ...]
    tables: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParallelSpec:
    """A model and what layouts ask about it.

    Attributes:
        model: full, in host memory where ``ParallelConfig.splits_model``, else on its device; changed in place.
        blocks: class names of the modules that FSDP2 gathers as one.
        split_points: where a pipeline can cut it.
        tp_plan: number of processes -> layer -> how they share it; raises a UserError where they cannot.
        network: the LoRA in the frozen model; None trains all weights.
        text_encoders: trained beside the model, full on every process.
        methods: of the model, called besides ``forward``.
    """

    model: nn.Module
    blocks: Sequence[str]
    split_points: Callable[[], SplitPoints]
    tp_plan: Callable[[int], dict[str, Parts]]
    network: AdapterNetwork | None = None
    text_encoders: nn.Module | None = None
    methods: Sequence[str] = ()

    @property
    def lora(self) -> list[nn.Parameter]:
        """The LoRA's parameters, none where all weights are trained."""
        return [] if self.network is None else self.network.parameters()


def transformer_split_points(
    model: nn.Module, blocks: Sequence[nn.Module], behind: Sequence[str], streams: int = 2
) -> SplitPoints:
    """Return where a diffusion transformer whose blocks pass on so many streams can be cut."""
    names = {id(module): name for name, module in model.named_modules()}
    return SplitPoints([names[id(block)] for block in blocks], streams == 2, tuple(behind))


def lm_split_points(model: TransformerLM) -> SplitPoints:
    """Return where a language model can be cut."""
    tables = ("embedding", "positions") if model.positions is not None else ("embedding",)
    return SplitPoints([f"blocks.{i}" for i in range(len(model.blocks))], False, ("norm", "lm_head"), tables)


def lm_parallel_spec(model: TransformerLM, network: AdapterNetwork | None = None) -> ParallelSpec:
    """Return what layouts ask about a language model, whose q, k and v a LoRA needs apart."""
    return ParallelSpec(
        model,
        [Block.__name__],
        lambda: lm_split_points(model),
        lambda processes: lm_split_plan(model.config, processes, separate=network is not None),
        network,
        methods=["next_logits"],  # what samples are made with
    )
