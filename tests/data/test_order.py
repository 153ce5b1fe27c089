"""The plan of an epoch: every sample once, full batches, the same for everybody who asks."""

from __future__ import annotations

from collections import Counter

import pytest
from accelerate.data_loader import prepare_data_loader
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from library.data.batches import ALL, Bucket, DataParallelRank, EpochBatchSampler

SQUARE: Bucket = (0, (64, 64))
WIDE: Bucket = (0, (96, 32))
OTHER: Bucket = (1, (64, 64))


def plan_epoch(
    buckets: list[Bucket], batch_sizes: dict[Bucket, int], seed: int, epoch: int, dp_rank: DataParallelRank = ALL
) -> list[list[int]]:
    """Return the items of the batches that a sampler gives in an epoch."""
    sampler = EpochBatchSampler(buckets, batch_sizes, seed, dp_rank)
    sampler.set_position(epoch)
    return [[index for _, index in batch] for batch in sampler]


def flat(plan: list[list[int]]) -> list[int]:
    return [index for batch in plan for index in batch]


@given(
    buckets=st.lists(st.sampled_from([SQUARE, WIDE, OTHER]), min_size=1, max_size=60),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
    epoch=st.integers(0, 3),
)
def test_every_item_comes_once_in_batches_of_one_bucket(
    buckets: list[Bucket], sizes: tuple[int, int, int], epoch: int
) -> None:
    batch_sizes = dict(zip((SQUARE, WIDE, OTHER), sizes, strict=True))
    plan = plan_epoch(buckets, batch_sizes, 5, epoch)
    assert sorted(flat(plan)) == list(range(len(buckets)))
    smaller: Counter[Bucket] = Counter()
    for batch in plan:
        (bucket,) = {buckets[index] for index in batch}
        assert len(batch) <= batch_sizes[bucket]
        smaller[bucket] += len(batch) < batch_sizes[bucket]
    assert max(smaller.values()) <= 1  # only what remains of a bucket makes a smaller batch


def test_batches_of_four_are_four_batches_of_one() -> None:
    fours = plan_epoch([SQUARE] * 22, {SQUARE: 4}, seed=1, epoch=2)
    ones = plan_epoch([SQUARE] * 22, {SQUARE: 1}, seed=1, epoch=2)
    assert flat(fours) == flat(ones)
    assert [len(batch) for batch in fours] == [4, 4, 4, 4, 4, 2]


def test_the_plan_follows_from_seed_and_epoch() -> None:
    buckets = [SQUARE, WIDE] * 20

    def plan(seed: int, epoch: int) -> list[list[int]]:
        return plan_epoch(buckets, {SQUARE: 3, WIDE: 2}, seed, epoch)

    assert plan(1, 0) == plan(1, 0)
    assert plan(1, 0) != plan(1, 1)
    assert plan(1, 0) != plan(2, 0)


@given(
    buckets=st.lists(st.sampled_from([SQUARE, WIDE, OTHER]), min_size=1, max_size=40),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
    processes=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    first=st.integers(0, 7),
)
def test_processes_share_each_step_and_weigh_every_sample_alike(
    buckets: list[Bucket], sizes: tuple[int, int, int], processes: int, accumulation: int, first: int
) -> None:
    batch_sizes = dict(zip((SQUARE, WIDE, OTHER), sizes, strict=True))
    plan = plan_epoch(buckets, batch_sizes, 5, 2)[first:]
    ranks = []
    for rank in range(processes):
        sampler = EpochBatchSampler(buckets, batch_sizes, 5, DataParallelRank(processes, rank, accumulation))
        sampler.set_position(2, first)
        batches = [[index for _, index in batch] for batch in sampler]
        assert len(sampler) == len(batches)
        ranks.append(list(zip(batches, sampler.micro_steps(), strict=True)))
    steps: list[list[tuple[list[int], float]]] = [[]]
    for together in zip(*ranks, strict=True):  # all compute as many batches
        (about,) = {(m.done, m.samples, m.ends_step) for _, m in together}
        real = [(batch, m.weight) for batch, m in together if m.weight]
        assert about[:2] == (len(real), sum(len(batch) for batch, _ in real))
        assert [plan[m.number - first] for _, m in together] == [batch for batch, _ in together]
        steps[-1] += real
        if about[2]:
            steps.append([])
    assert steps.pop() == []
    assert [batch for step in steps for batch, _ in step] == plan  # each once, in order
    full = processes * accumulation
    assert [len(step) for step in steps[:-1]] == [full] * len(steps[:-1])
    for step in steps:
        samples = sum(len(batch) for batch, _ in step)
        for batch, weight in step:  # engines divide by processes and accumulation, a batch's loss is a mean
            assert weight / full / len(batch) == pytest.approx(1 / samples)


def test_resuming_in_the_middle_gives_the_same_tail() -> None:
    sampler = EpochBatchSampler([SQUARE] * 20, {SQUARE: 2}, seed=3)
    sampler.set_position(4)
    whole = list(sampler)
    again = EpochBatchSampler([SQUARE] * 20, {SQUARE: 2}, seed=3)
    again.set_position(4, 7)
    assert list(again) == whole[7:]
    assert len(again) == 3
    assert again.batches_per_epoch() == 10
    assert {epoch for batch in whole for epoch, _ in batch} == {4}


class Echo:
    """A data set that returns what it is asked for."""

    def __getitem__(self, position: tuple[int, int]) -> tuple[int, int]:
        return position

    def __len__(self) -> int:
        return 7


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loader_prepared_by_accelerate_starts_where_the_sampler_is_set(rank: int) -> None:
    sampler = EpochBatchSampler([SQUARE] * 7, {SQUARE: 2}, 0, DataParallelRank(2, rank))
    loader = DataLoader(Echo(), batch_sampler=sampler, collate_fn=list)  # type: ignore[arg-type,var-annotated]
    prepared = prepare_data_loader(loader, num_processes=1, process_index=0, even_batches=False)
    for epoch, first in ((0, 0), (1, 2), (3, 0)):
        sampler.set_position(epoch, first)
        expected = [[(epoch, i) for i in batch] for batch in plan_epoch([SQUARE] * 7, {SQUARE: 2}, 0, epoch)]
        assert len(prepared) == len(expected[first:]) // 2
        assert list(prepared) == expected[first:][rank::2]
