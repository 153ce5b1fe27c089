"""From plans of epochs and caches to batches: orientation, crop, mask and caption follow from seed, epoch and sample."""

# ruff: noqa: E501  (messages are written out)

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from library.data.batches import ALL, Batch, Bucket, DataParallelRank, EpochBatchSampler, Item, collate
from library.data.dataset import TrainingData
from tests.data.folders import add_image, averaged, build, cache_all, items, make_image, pixels_of, spelled, write_toml

BUCKETS = "enable_bucket = true\nbucket_reso_steps = 16\nmin_bucket_reso = 16"


def flipping(tmp_path: Path) -> TrainingData:
    for i in range(8):
        add_image(tmp_path / "img", f"{i}.png", seed=i)
    data = build(write_toml(tmp_path, general="flip_aug = true"))
    cache_all(data)
    return data


def test_flipped_latents_are_those_of_the_mirrored_image(tmp_path: Path) -> None:
    data = flipping(tmp_path)
    flips = 0
    for epoch in range(8):
        for index in range(8):
            straight = pixels_of(tmp_path / "img" / f"{index}.png")
            latents = data.train[(epoch, index)].latents
            mirrored = bool(torch.allclose(latents, averaged(straight.flip(-1)), atol=1e-6))
            assert mirrored or torch.allclose(latents, averaged(straight), atol=1e-6)
            flips += mirrored
    assert 16 < flips < 48  # 64 fair coins: 32 expected, four standard deviations


def test_choices_are_the_same_for_every_reader_and_differ_between_epochs(tmp_path: Path) -> None:
    data = flipping(tmp_path)
    again = build(tmp_path / "dataset.toml")
    again.missing_latents("vae-1")
    again.missing_text("text-1")
    epochs = [torch.stack([item.latents for item in items(data.train, epoch)]) for epoch in range(3)]
    backwards = torch.stack([again.train[(2, index)].latents for index in reversed(range(8))])
    assert torch.equal(epochs[2], backwards.flip(0))
    assert not torch.equal(epochs[0], epochs[1])


def test_a_random_crop_is_a_part_of_the_whole_images_latents_at_whole_patches(tmp_path: Path) -> None:
    path = add_image(tmp_path / "img", "a.png", (128, 64))
    data = build(write_toml(tmp_path, general="random_crop = true"))
    cache_all(data)
    whole = averaged(pixels_of(path))  # [3, 8, 16]
    places = set()
    for epoch in range(60):
        latents = data.train[(epoch, 0)].latents
        assert latents.shape == (3, 8, 8)
        (place,) = [x for x in range(9) if torch.allclose(latents, whole[:, :, x : x + 8], atol=1e-6)]
        places.add(place)
    assert places == {0, 2, 4, 6, 8}  # every multiple of a patch, both ends included


def test_alpha_masks_follow_crop_and_flip(tmp_path: Path) -> None:
    image = make_image(128, 64).convert("RGBA")
    ramp = np.repeat(np.arange(128, dtype=np.uint8)[None], 64, axis=0)
    image.putalpha(Image.fromarray(ramp))
    (tmp_path / "img").mkdir()
    image.save(tmp_path / "img" / "a.png")
    (tmp_path / "img" / "a.txt").write_text("x")
    data = build(
        write_toml(tmp_path, general="alpha_mask = true\nflip_aug = true\nrandom_crop = true"), masked_loss=True
    )
    cache_all(data)
    both = torch.from_numpy(np.stack([*np.moveaxis(np.asarray(image)[..., :3], -1, 0), ramp])).float()
    straight, mirrored = averaged(both), averaged(both.flip(-1))
    for epoch in range(20):
        item = data.train[(epoch, 0)]
        assert item.mask is not None
        found = torch.cat([(item.latents + 1) * 127.5, item.mask * 255])
        crops = [view[:, :, x : x + 8] for view in (straight, mirrored) for x in range(0, 9, 2)]
        # values up to 255 in fp32 after scaling there and back: 255 * 2^-22
        assert any(torch.allclose(found, crop, atol=1e-3) for crop in crops)


def test_mask_images_weigh_latents_and_unmasked_samples_count_fully(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png", (128, 64))
    add_image(tmp_path / "plain", "b.png", seed=1)
    (tmp_path / "masks").mkdir()
    half = np.zeros((32, 64), dtype=np.uint8)  # half the image's size, same proportions
    half[:, 32:] = 255
    Image.fromarray(half).save(tmp_path / "masks" / "a.png")
    toml = write_toml(tmp_path, subset="image_dir = 'img'\nconditioning_data_dir = 'masks'")
    toml.write_text(toml.read_text() + "[[datasets.subsets]]\nimage_dir = 'plain'\n")
    data = build(toml, masked_loss=True)
    cache_all(data)
    batch = collate(items(data.train))
    assert batch.masks is not None
    assert batch.masks.shape == (2, 1, 8, 8)
    # the centre crop of 128 x 64 begins at 32: four black columns of latents, four white ones
    assert batch.masks[0].tolist() == [[[0.0] * 4 + [1.0] * 4] * 8]
    assert batch.masks[1].tolist() == [[[1.0] * 8] * 8]


def test_captions_change_between_epochs_and_drop_with_everything_cached(tmp_path: Path) -> None:
    tags = "one, two, three, four, five"
    add_image(tmp_path / "img", "a.png", caption=tags)
    general = "shuffle_caption = true\ncaption_dropout_rate = 0.3"
    data = build(write_toml(tmp_path, general=general), caption_variants=4)
    _, texts = cache_all(data)
    assert len(texts.seen) == 5
    assert "" in texts.seen
    seen = [spelled(data.train[(epoch, 0)].text) for epoch in range(60)]
    assert set(seen) == set(texts.seen) == set(data.captions())
    assert all(sorted(text.split(", ")) == sorted(tags.split(", ")) for text in seen if text)


def test_held_out_samples_have_no_chance_in_them(tmp_path: Path) -> None:
    for i in range(4):
        add_image(tmp_path / "img", f"{i}.png", (128, 64), caption="one, two, three, {four|five}", seed=i)
    chance = "flip_aug = true\nrandom_crop = true\nshuffle_caption = true\ncaption_dropout_rate = 0.5\nenable_wildcard = true"
    data = build(write_toml(tmp_path, dataset="validation_split = 0.5", general=chance))
    cache_all(data)
    assert data.validation is not None
    assert len(data.validation) == 2
    for index, sample in enumerate(data.validation.samples):
        middle = averaged(pixels_of(Path(sample.image.path))[:, :, 32:96])
        for epoch in range(6):
            item = data.validation[(epoch, index)]
            torch.testing.assert_close(item.latents, middle, atol=1e-6, rtol=0)
            assert spelled(item.text) == "one, two, three, four"


def test_regularisation_images_carry_their_loss_weight(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    add_image(tmp_path / "reg", "b.png", seed=1)
    toml = write_toml(tmp_path)
    toml.write_text(toml.read_text() + "[[datasets.subsets]]\nimage_dir = 'reg'\nis_reg = true\n")
    data = build(toml, prior=0.25)
    cache_all(data)
    assert collate(items(data.train)).loss_weights.tolist() == [1.0, 0.25]


def test_texts_of_different_lengths_are_filled_up_with_zeros() -> None:
    def item(rows: int) -> Item:
        text = {
            "prompt_embeds": torch.ones(rows, 2),
            "mask": torch.ones(rows, dtype=torch.bool),
            "pooled": torch.ones(3),
        }
        return Item(torch.zeros(1, 2, 2), text, 1.0, None, rows)

    batch = collate([item(2), item(3)])
    assert batch.text["prompt_embeds"].tolist() == [[[1.0, 1.0]] * 2 + [[0.0, 0.0]], [[1.0, 1.0]] * 3]
    assert batch.text["mask"].tolist() == [[True, True, False], [True, True, True]]
    assert batch.text["pooled"].shape == (2, 3)
    assert (batch.sample_ids, batch.masks) == ([2, 3], None)


def test_a_batch_moves_as_a_whole() -> None:
    batch = Batch(torch.zeros(1, 4, 2, 2), {"a": torch.zeros(1, 2)}, torch.ones(1), torch.ones(1, 1, 2, 2), [7])
    moved = batch.to("meta", non_blocking=True)
    assert moved.masks is not None
    for tensor in (moved.latents, moved.text["a"], moved.loss_weights, moved.masks):
        assert tensor.device.type == "meta"
    assert batch.latents.device.type == "cpu"


def test_the_summary_counts_what_is_trained(tmp_path: Path) -> None:
    for i in range(4):
        add_image(tmp_path / "img", f"{i}.png", (64, 64) if i else (80, 48), seed=i, caption=f"number {i}")
    subset = "image_dir = 'img'\nnum_repeats = 3\nflip_aug = true"
    data = build(write_toml(tmp_path, dataset=f"{BUCKETS}\nbatch_size = 2", subset=subset))
    assert data.describe() == [
        "dataset 1: 64x64, buckets, batch size 2",
        "  img: 4 images x 3, flip_aug",
        "       64 x 64          9 samples an epoch",
        "       80 x 48          3 samples an epoch",
        "    sizes by sd-scripts' rule: 98.4% of the pixels kept in 2 shapes (3 at 64x64, 1 at 80x48); 1 image below 97%, "
        "93.8% at least",
        "12 samples and 7 batches an epoch, 0 images held out, 4 different captions",
    ]


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
