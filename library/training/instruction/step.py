"""One training step's forward pass on conversations, and the same on those held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from library.accelerator import data_share
from library.config.instruction_schema import InstructionConfig, InstructionValidationConfig
from library.llm.instruction_batches import Example, InstructionBatch, collate_windows
from library.nn.cross_entropy import IGNORED
from library.training.sharding import in_step

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class InstructionStep:
    """What a forward pass needs besides the batch.

    Attributes:
        seed: of the run.
        batches_in_step: batches of an optimizer step, over all processes.
    """

    seed: int
    batches_in_step: int
    figure: ClassVar[str] = "learnt_tokens"
    text_encoders: ClassVar[None] = None

    def loss(self, model: nn.Module, batch: InstructionBatch, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch's loss (a scalar with gradient), and the number of tokens that it counts, [1].

        The optimizer gets the mean over the batches of a step and over processes. Each batch is therefore weighed by
        its share of what the step learns, so that this mean is the mean over tokens, and not one in which the tokens of
        short answers count more.
        """
        learnt = (batch.targets != IGNORED).sum() * batch.pieces
        mean = model(batch.tokens, batch.targets, documents=batch.documents)
        return mean * (learnt * (self.batches_in_step / batch.learnt_in_step)), learnt[None].float()


@dataclass(frozen=True)
class HeldOutDialogues:
    """Conversations to validate on, in batches, and when."""

    batches: Sequence[InstructionBatch]
    config: InstructionValidationConfig

    @torch.no_grad()
    def loss(self, model: nn.Module, accelerator: Accelerator) -> float:
        """Return the mean cross-entropy over all learnt tokens; dropout is off while this runs."""
        sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        training = model.training
        model.eval()
        rank, count = data_share(accelerator)
        share = self.batches[rank::count]
        for batch in in_step(iter(share), accelerator):
            own = (batch or self.batches[0]).to(accelerator.device)
            learnt = (own.targets != IGNORED).sum() * (batch is not None)  # one that is left with none takes part
            sums += torch.stack([model(own.tokens, own.targets).double() * learnt, learnt.double()])
        model.train(training)
        total, learnt = accelerator.reduce(sums, reduction="sum").tolist()
        return total / learnt


def held_out_dialogues(
    examples: Sequence[Example], data: InstructionConfig, config: InstructionValidationConfig
) -> HeldOutDialogues | None:
    """Return the first held-out conversations in batches of similar length; None where nothing is held out."""
    if not examples:
        return None
    size = data.train_batch_size
    chosen = sorted(examples[: config.max_validation_conversations], key=lambda example: len(example.tokens))
    rows = [[((example,), 1) for example in chosen[i : i + size]] for i in range(0, len(chosen), size)]
    return HeldOutDialogues([collate_windows(row) for row in rows], config)
