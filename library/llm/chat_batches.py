"""Batches of conversations: tokenised, packed or sorted by length, in an order that follows from seed and epoch.

    dialogues -> examples (tokens, which of them are learnt) -> windows of at most ``max_length`` tokens -> batches

Packed, a window holds several conversations, the fullest fit first (best-fit decreasing); each keeps its own positions
and sees nothing of the others (``library.nn.attention``). Otherwise a window is one conversation, and batches are
made of
conversations of similar length, padded on the right. Padding is never learnt, and causal attention never looks at it.

Every batch knows how many learnt tokens its optimizer step has over all batches and processes: the loss is the mean
over those, whatever the batch size, the accumulation and the packing are.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from library.errors import UserError
from library.llm.chat_data import Dialogue
from library.llm.chat_templates import DialogueTemplate
from library.nn.cross_entropy import IGNORED
from library.randomness import derive_seed

_POOL = (
    50  # batches whose conversations are sorted by length together: similar lengths, and yet another order each epoch
)


@dataclass(frozen=True)
class Example:
    """One conversation as the model is given it.

    Attributes:
        tokens: [n] int64.
        targets: [n] int64, the token that should follow each; ``IGNORED`` where that is not learnt.
    """

    tokens: Tensor
    targets: Tensor

    @property
    def learnt(self) -> int:
        """Number of targets."""
        return int((self.targets != IGNORED).sum())


Window = tuple[Example, ...]


@dataclass(frozen=True)
class Tokenised:
    """Examples, and what did not fit: conversations cut at the end, and those without an answer before the cut."""

    examples: list[Example]
    cut: int
    dropped: int


def tokenise_dialogues(
    dialogues: Sequence[Dialogue],
    template: DialogueTemplate,
    max_length: int,
    learn_all: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> Tokenised:
    """Return ``dialogues`` as examples of at most ``max_length`` tokens.

    Args:
        dialogues: in order.
        template: how they become tokens.
        max_length: a longer conversation loses its end.
        learn_all: learn every token, not only the assistant's.
        progress: called with the number of conversations done since the last call.

    Raises:
        UserError: the template refuses a conversation (file and line are named), or nothing is left.
    """
    examples, cut, dropped = [], 0, 0
    for dialogue in dialogues:
        progress(1)
        try:
            tokens, owners = template.tokens(dialogue.messages)
        except UserError as error:
            raise UserError(f"{dialogue.where}: {error}") from None
        learnt = [True if learn_all else owner >= 0 and dialogue.learnt[owner] for owner in owners]
        cut += len(tokens) > max_length + 1
        row = torch.tensor(tokens[: max_length + 1], dtype=torch.int64)
        counts = torch.tensor(learnt[1 : max_length + 1], dtype=torch.bool)
        if not counts.any():
            dropped += 1
            continue
        examples.append(Example(row[:-1], row[1:].where(counts, IGNORED)))
    if not examples:
        raise UserError(f"max_length: no answer begins within {max_length} tokens; raise it")
    return Tokenised(examples, cut, dropped)


def pack_examples(examples: Sequence[Example], max_length: int) -> list[Window]:
    """Return windows of at most ``max_length`` tokens with all ``examples``, longest first into the fullest fit."""
    windows: list[list[Example]] = []
    room: list[tuple[int, int]] = []  # what is free in each window, and its number, in order
    for example in sorted(examples, key=lambda e: -len(e.tokens)):  # stable: examples of one length stay in order
        length = len(example.tokens)
        place = bisect.bisect_left(room, (length, -1))
        if place == len(room):
            windows.append([])
            free, number = max_length, len(windows) - 1
        else:
            free, number = room.pop(place)
        windows[number].append(example)
        bisect.insort(room, (free - length, number))
    return [tuple(window) for window in windows]


@dataclass
class InstructionBatch:
    """Windows side by side, padded on the right.

    Attributes:
        tokens: [B, S] int64, padding 0.
        targets: [B, S] int64, ``IGNORED`` where nothing is learnt.
        documents: [B, S] int64, the number of the conversation in its window; None where each is alone in its window.
        learnt_in_step: targets of the optimizer step over all batches and processes.
        pieces: how many of its size make a batch, whose loss is the mean of theirs.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None
    learnt_in_step: int
    pieces: int = 1

    def __len__(self) -> int:
        return len(self.tokens)

    def chunk(self, count: int) -> list[InstructionBatch]:
        """Return ``count`` pieces of equal size with the windows in their order."""
        size = len(self) // count
        rows = [slice(first, first + size) for first in range(0, len(self), size)]
        return [replace(self._map(operator.itemgetter(part)), pieces=self.pieces * count) for part in rows]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> InstructionBatch:
        """Return the batch on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> InstructionBatch:
        """Return the batch in page-locked memory (asked for by the data loader)."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, move: Callable[[Tensor], Tensor]) -> InstructionBatch:
        documents = None if self.documents is None else move(self.documents)
        return replace(self, tokens=move(self.tokens), targets=move(self.targets), documents=documents)


Item = tuple[Window, int]  # a window, and the targets of its optimizer step


class Windows(Dataset[Item]):
    """Windows by (index, targets of the step)."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, key: tuple[int, int]) -> Item:
        return self.windows[key[0]], key[1]


def collate_windows(items: Sequence[Item]) -> InstructionBatch:
    """Return ``items`` of one batch, stacked."""
    longest = max(sum(len(e.tokens) for e in window) for window, _ in items)
    shape = (len(items), longest)
    tokens, targets = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED)
    documents = torch.full(shape, -1)
    for row, (window, _) in enumerate(items):
        start = 0
        for number, example in enumerate(window):
            place = slice(start, start + len(example.tokens))
            tokens[row, place], targets[row, place], documents[row, place] = example.tokens, example.targets, number
            start = place.stop
    alone = all(len(window) == 1 for window, _ in items)
    return InstructionBatch(tokens, targets, None if alone else documents, items[0][1])


class InstructionSampler(Sampler[list[tuple[int, int]]]):
    """Batch sampler over :class:`Windows`, with the interface of ``library.data.batches.EpochBatchSampler``."""

    def __init__(
        self, windows: Sequence[Window], batch_size: int, seed: int, num_processes: int = 1, accumulation: int = 1
    ) -> None:
        self._lengths = [sum(len(e.tokens) for e in window) for window in windows]
        self._learnt = [sum(e.learnt for e in window) for window in windows]
        self._size, self._seed, self._processes = batch_size, seed, num_processes
        self._in_step = num_processes * accumulation
        self.drop_last = False  # accelerate asks
        self.epoch, self.first_batch = 0, 0
        self._plans: dict[int, list[list[int]]] = {}

    def set_position(self, epoch: int, first_batch: int = 0) -> None:
        """Start the next pass in ``epoch`` (from 0) at ``first_batch``, counted over all processes."""
        assert first_batch % self._processes == 0, "processes would swap their batches"
        self.epoch, self.first_batch = epoch, first_batch

    def batches_per_epoch(self, epoch: int | None = None) -> int:
        """Batches of a whole epoch over all processes, the same in every epoch."""
        return len(self._plan(self.epoch if epoch is None else epoch))

    def __len__(self) -> int:
        """Batches of the next pass, over all processes."""
        return max(0, self.batches_per_epoch() - self.first_batch)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, plan = self.epoch, self._plan(self.epoch)
        for place in range(self.first_batch, len(plan)):
            learnt = self._learnt_in_step(epoch * len(plan) + place)
            yield [(index, learnt) for index in plan[place]]

    def _learnt_in_step(self, number: int) -> int:
        """Return the targets of the optimizer step that batch ``number``, counted through all epochs, belongs to."""
        first = number // self._in_step * self._in_step
        per_epoch = self.batches_per_epoch()
        batches = (self._plan(n // per_epoch)[n % per_epoch] for n in range(first, first + self._in_step))
        return sum(self._learnt[index] for batch in batches for index in batch)

    def _plan(self, epoch: int) -> list[list[int]]:
        if epoch not in self._plans:
            if len(self._plans) > 2:  # a step may reach from one epoch into the next
                del self._plans[min(self._plans)]
            self._plans[epoch] = self._planned(epoch)
        return self._plans[epoch]

    def _planned(self, epoch: int) -> list[list[int]]:
        """Return the epoch's batches: shuffled, then sorted by length within pools, then the batches shuffled."""
        draws = torch.Generator().manual_seed(derive_seed("instruction order", self._seed, epoch))
        order: list[int] = torch.randperm(len(self._lengths), generator=draws).tolist()
        pool, plan = self._size * _POOL, list[list[int]]()
        for start in range(0, len(order), pool):
            part = sorted(order[start : start + pool], key=lambda index: -self._lengths[index])
            plan += [part[i : i + self._size] for i in range(0, len(part), self._size)]
        plan = [plan[i] for i in torch.randperm(len(plan), generator=draws).tolist()]
        return plan + [plan[i % len(plan)] for i in range(-len(plan) % self._processes)]
