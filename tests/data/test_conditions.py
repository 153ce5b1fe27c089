"""Regions to fill and control images: from the dataset TOML to what a batch carries."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from library.data.batches import Batch, Item, collate
from library.data.cache import previews
from library.data.dataset import TrainingData
from library.data.masks import MASK_KINDS, Mask, MaskKind, draw_mask, generated_mask
from library.errors import UserError
from tests.data.folders import add_image, averaged, build, cache_all, make_image, make_old, write_toml

BUCKETS = "enable_bucket = true\nbucket_reso_steps = 16\nmin_bucket_reso = 16"


def pixels_of(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1).float() / 127.5 - 1


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, atol=1e-6)  # fp32 means of 64 values in other order


def save_mask(path: Path, mask: np.ndarray) -> None:
    """Write a mask of 0 and 1 as black and white."""
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(mask.astype(np.uint8) * 255).save(path)
    make_old(path)


def half(size: tuple[int, int] = (64, 64)) -> np.ndarray:
    mask = np.zeros(size[::-1], dtype=np.uint8)
    mask[:, : size[0] // 4 * 3] = 1
    return mask


def items(data: TrainingData, epoch: int = 0) -> list[Item]:
    return [data.train[(epoch, index)] for index in range(len(data.train))]


def filling(folder: Path, keys: str, **arguments: object) -> TrainingData:
    data = build(write_toml(folder, subset=f"image_dir = 'img'\n{keys}"), conditioning="fill", **arguments)  # type: ignore[arg-type]
    cache_all(data)
    return data


def editing(folder: Path, keys: str = "control_directory = 'control'", dataset: str = "") -> TrainingData:
    toml = write_toml(folder, dataset=dataset, subset=f"image_dir = 'img'\n{keys}")
    data = build(toml, conditioning="references")
    cache_all(data)
    return data


# --- regions to fill


def test_masked_latents_are_the_encoders_of_the_image_without_the_region(tmp_path: Path) -> None:
    path = add_image(tmp_path / "img", "a.png")
    save_mask(tmp_path / "masks" / "a.png", half())
    (item,) = items(filling(tmp_path, "inpaint_mask_directory = 'masks'"))
    mask = torch.from_numpy(half()).float()
    assert item.conditions.mask is not None
    assert item.conditions.masked_latents is not None
    assert item.conditions.mask.dtype == torch.float32
    assert torch.equal(item.conditions.mask, mask[None])
    assert close(item.conditions.masked_latents, averaged(pixels_of(path) * (1 - mask)))
    assert close(item.latents, averaged(pixels_of(path)))
    assert item.mask is None


def test_mask_files_are_resized_and_cropped_with_their_image_and_made_two_valued(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png", (128, 64))  # the centre crop begins at 32
    ramp = np.repeat(np.arange(64, dtype=np.uint8)[None] * 4, 32, axis=0)  # half the image's size
    (tmp_path / "masks").mkdir()
    Image.fromarray(ramp).save(tmp_path / "masks" / "a.webp", lossless=True)
    (item,) = items(filling(tmp_path, "inpaint_mask_directory = 'masks'"))
    assert item.conditions.mask is not None
    # 128 is reached in column 32 of 64, which is column 64 of 128, 32 of the crop
    assert item.conditions.mask.tolist() == [[[0.0] * 32 + [1.0] * 32] * 64]


def test_transparency_says_what_to_fill_and_the_colours_under_it_are_trained_on(tmp_path: Path) -> None:
    image = make_image(64, 64).convert("RGBA")
    image.putalpha(Image.fromarray((1 - half()) * 255))
    (tmp_path / "img").mkdir()
    image.save(tmp_path / "img" / "a.png")
    (tmp_path / "img" / "a.txt").write_text("x")
    (item,) = items(filling(tmp_path, "inpaint_alpha_mask = true"))
    assert item.conditions.mask is not None
    assert torch.equal(item.conditions.mask[0], torch.from_numpy(half()).float())
    assert close(item.latents, averaged(pixels_of(tmp_path / "img" / "a.png")))


def test_generated_masks_change_with_epoch_and_repeat_and_stay_among_the_variants(tmp_path: Path) -> None:
    path = add_image(tmp_path / "img", "a.png")
    data = filling(
        tmp_path, "inpaint_masks = ['halves', 'borders']\ninpaint_mask_variants = 3\nnum_repeats = 2", seed=4
    )
    allowed = [generated_mask(("halves", "borders"), 64, 64, 4, "img\na.png", variant) for variant in range(3)]
    seen: list[int] = []
    for epoch in range(10):
        for item in items(data, epoch):
            mask = item.conditions.mask
            assert mask is not None
            assert item.conditions.masked_latents is not None
            (which,) = [i for i, one in enumerate(allowed) if np.array_equal(one, mask[0].numpy())]
            seen.append(which)
            assert close(item.conditions.masked_latents, averaged(pixels_of(path) * (1 - mask)))
    assert set(seen) == {0, 1, 2}
    assert seen[::2] != seen[1::2]
    again = build(tmp_path / "dataset.toml", conditioning="fill", seed=4)
    assert len(again.missing_latents("vae-1")) == 0
    assert len(build(tmp_path / "dataset.toml", conditioning="fill", seed=5).missing_latents("vae-1")) == 3


def test_without_a_source_masks_of_all_kinds_are_generated_and_the_summary_says_so(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    data = filling(tmp_path, "")
    line = data.describe()[1]
    kinds = "rectangles, borders, strokes, halves"
    assert line == f"  img: 1 image x 1, generated masks by default ({kinds}; 4 an image)"
    mask = items(data)[0].conditions.mask
    assert mask is not None
    of_all = [generated_mask(MASK_KINDS, 64, 64, 0, "img\na.png", variant) for variant in range(4)]
    assert any(np.array_equal(one, mask[0].numpy()) for one in of_all)


def test_held_out_images_always_see_their_first_mask(tmp_path: Path) -> None:
    for i in range(2):
        add_image(tmp_path / "img", f"{i}.png", seed=i)
    toml = write_toml(tmp_path, dataset="validation_split = 0.5")
    data = build(toml, conditioning="fill")
    cache_all(data)
    assert data.validation is not None
    name = Path(data.validation.samples[0].image.path).name
    first = generated_mask(MASK_KINDS, 64, 64, 0, f"img\n{name}", 0)
    for epoch in range(5):
        mask = data.validation[(epoch, 0)].conditions.mask
        assert mask is not None
        assert np.array_equal(first, mask[0].numpy())


def test_a_sample_without_a_loss_mask_among_others_with_counts_in_its_region(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    add_image(tmp_path / "other", "b.png", seed=1)
    save_mask(tmp_path / "fill" / "a.png", half())
    save_mask(tmp_path / "fill" / "b.png", half())
    save_mask(tmp_path / "loss" / "b.png", np.ones((64, 64)))
    fill = "inpaint_mask_directory = 'fill'\n"
    toml = write_toml(tmp_path, subset=f"image_dir = 'img'\n{fill}")
    toml.write_text(
        f"{toml.read_text()}[[datasets.subsets]]\nimage_dir = 'other'\nconditioning_data_dir = 'loss'\n{fill}"
    )
    data = build(toml, masked_loss=True, conditioning="fill")
    cache_all(data)
    masks = collate(items(data)).masks
    assert masks is not None
    assert masks[:, 0].tolist() == [[[1.0] * 6 + [0.0] * 2] * 8, [[1.0] * 8] * 8]


# --- control images


def test_references_are_the_latents_of_the_control_images_in_their_order(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    paths = [add_image(tmp_path / "control", f"a_{i}.png", caption=None, seed=5 + i) for i in range(11)]
    (item,) = items(editing(tmp_path))
    assert len(item.conditions.references) == 11  # _10 comes after _9
    for path, reference in zip(paths, item.conditions.references, strict=True):
        assert close(reference, averaged(pixels_of(path)))
    assert item.conditions.mask is None
    assert item.conditions.masked_latents is None


@pytest.mark.parametrize(
    ("keys", "size", "expected"),
    [
        ("", (200, 100), (64, 64)),  # as the image
        ("control_resolution = 64", (200, 100), (96, 48)),  # sqrt(64 * 64 * 2) = 90.5, in patches of 16
        ("control_resolution = [128, 64]", (70, 70), (96, 96)),  # sqrt(128 * 64) = 90.5
        ("no_resize_control = true", (200, 100), (192, 96)),  # trimmed
        ("no_resize_control = true\ncontrol_resolution = 64", (50, 40), (48, 32)),  # not larger than that
        ("no_resize_control = true\ncontrol_resolution = 64", (200, 100), (96, 48)),
    ],
)
def test_control_images_are_sized_as_musubi_tuners_keys_say(
    tmp_path: Path, keys: str, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    add_image(tmp_path / "img", "a.png")
    add_image(tmp_path / "control", "a.png", size, caption=None, seed=1)
    (item,) = items(editing(tmp_path, dataset=keys))
    assert item.conditions.references[0].shape == (3, expected[1] // 8, expected[0] // 8)


def test_a_trimmed_control_image_keeps_its_middle_unresized(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    path = add_image(tmp_path / "control", "a.png", (70, 50), caption=None, seed=1)
    (item,) = items(editing(tmp_path, dataset="no_resize_control = true"))
    assert close(item.conditions.references[0], averaged(pixels_of(path)[:, 1:49, 3:67]))


def test_a_mirrored_image_has_mirrored_references(tmp_path: Path) -> None:
    path = add_image(tmp_path / "img", "a.png")
    control = add_image(tmp_path / "control", "a.png", caption=None, seed=1)
    data = editing(tmp_path, "control_directory = 'control'\nflip_aug = true")
    seen = set()
    for epoch in range(12):
        (item,) = items(data, epoch)
        flipped = close(item.latents, averaged(pixels_of(path).flip(-1)))
        seen.add(flipped)
        pixels = pixels_of(control).flip(-1) if flipped else pixels_of(control)
        assert close(item.conditions.references[0], averaged(pixels))
    assert seen == {True, False}


def test_only_samples_with_references_of_the_same_sizes_share_a_batch(tmp_path: Path) -> None:
    for i in range(6):
        add_image(tmp_path / "img", f"{i}.png", seed=i)
        add_image(tmp_path / "control", f"{i}.png", (96, 48) if i % 2 else (64, 64), caption=None, seed=i)
    for i in (4, 5):
        (tmp_path / "control" / f"{i}.png").rename(tmp_path / "control" / f"{i}_0.png")
        add_image(tmp_path / "control", f"{i}_1.png", caption=None, seed=9)
    data = editing(tmp_path, dataset="batch_size = 4\nno_resize_control = true")
    shapes = []
    for batch in data.batch_sampler():
        stacked = collate([data.train[at] for at in batch])
        assert all(len(reference) == len(stacked.latents) for reference in stacked.conditions.references)
        shapes.append((len(batch), [tuple(reference.shape[2:]) for reference in stacked.conditions.references]))
    assert sorted(shapes) == [(1, [(6, 12), (8, 8)]), (1, [(8, 8), (8, 8)]), (2, [(6, 12)]), (2, [(8, 8)])]


def test_json_lines_name_control_images(tmp_path: Path) -> None:
    for i in range(2):
        add_image(tmp_path / "img", f"{i}.png", caption=None, seed=i)
    paths = [add_image(tmp_path / "refs", f"r{i}.png", caption=None, seed=7 + i) for i in range(3)]
    lines: list[dict[str, str]] = [
        {"image_path": "0.png", "caption": "x", "control_path": "refs/r0.png"},
        {"image_path": "1.png", "caption": "x", "control_path_1": str(paths[2]), "control_path_0": "refs/r1.png"},
    ]
    (tmp_path / "meta.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = editing(tmp_path, "metadata_file = 'meta.jsonl'")
    one, two = items(data)
    assert close(one.conditions.references[0], averaged(pixels_of(paths[0])))
    assert [close(r, averaged(pixels_of(p))) for r, p in zip(two.conditions.references, paths[1:], strict=True)] == [
        True,
        True,
    ]
    assert "1 or 2 control images an image" in "\n".join(data.describe())


def test_relative_control_paths_start_at_control_directory_where_there_is_one(tmp_path: Path) -> None:
    for i in range(2):
        add_image(tmp_path / "img", f"{i}.png", caption=None, seed=i)
    paths = [add_image(tmp_path / "control", f"{name}.png", caption=None, seed=7) for name in ("other", "1", "unused")]
    lines = [
        {"image_path": "0.png", "caption": "x", "control_path": "other.png"},
        {"image_path": "1.png", "caption": "x"},  # found by its name
    ]
    (tmp_path / "meta.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = editing(tmp_path, "metadata_file = 'meta.jsonl'\ncontrol_directory = 'control'")
    for item, path in zip(items(data), paths[:2], strict=True):
        assert close(item.conditions.references[0], averaged(pixels_of(path)))
    assert data.warnings == []


# --- both


def test_a_changed_companion_is_encoded_again_and_shared_control_images_once(tmp_path: Path) -> None:
    for i in range(2):
        add_image(tmp_path / "img", f"{i}.png", seed=i)
        add_image(tmp_path / "control", f"{i}.png", caption=None, seed=8)
    data = build(
        write_toml(tmp_path, subset="image_dir = 'img'\ncontrol_directory = 'control'"), conditioning="references"
    )
    assert len(data.missing_latents("vae-1")) == 3  # two images, one control image twice
    cache_all(data)
    add_image(tmp_path / "control", "1.png", caption=None, seed=10)
    make_old(tmp_path / "control" / "1.png")
    (tmp_path / "control" / "1.png").touch()
    again = build(tmp_path / "dataset.toml", conditioning="references")
    assert len(again.missing_latents("vae-1")) == 1


@pytest.mark.parametrize("kind", ["fill", "references"])
def test_worker_processes_read_the_same_conditions(tmp_path: Path, kind: str) -> None:
    for i in range(4):
        add_image(tmp_path / "img", f"{i}.png", seed=i)
        add_image(tmp_path / "control", f"{i}.png", caption=None, seed=9 - i)
    general = "flip_aug = true"
    subset = "image_dir = 'img'\n" + ("" if kind == "fill" else "control_directory = 'control'")
    data = build(write_toml(tmp_path, "batch_size = 2", subset, general), conditioning=kind)  # type: ignore[arg-type]
    cache_all(data)

    def batches(workers: int) -> list[Batch]:
        sampler = data.batch_sampler()
        sampler.set_position(3)
        return list(DataLoader(data.train, batch_sampler=sampler, collate_fn=collate, num_workers=workers))

    for alone, shared in zip(batches(0), batches(2), strict=True):
        for one, other in zip(tensors(alone), tensors(shared), strict=True):
            assert torch.equal(one, other)


def tensors(batch: Batch) -> list[torch.Tensor]:
    given = batch.conditions
    both = [tensor for tensor in (given.masked_latents, given.mask) if tensor is not None]
    assert len(both) + len(given.references) in (1, 2)
    return [*both, *given.references]


# --- what is under the mask


def blank_of(name: str) -> np.ndarray:
    """The value under a mask in [-1, 1], from 8-bit colours."""
    return np.array({"grey": 127.5, "black": 0, "white": 255}[name] / 127.5 - 1, dtype=np.float32)


@pytest.mark.parametrize("blank", ["grey", "black", "white"])
def test_the_region_is_blanked_with_the_colour_asked_for_and_nothing_else_changes(tmp_path: Path, blank: str) -> None:
    path = add_image(tmp_path / "img", "a.png")
    save_mask(tmp_path / "masks" / "a.png", half())
    data = filling(tmp_path, f"inpaint_mask_directory = 'masks'\ninpaint_blank = '{blank}'\nflip_aug = true")
    pixels, mask = pixels_of(path).numpy(), half()
    expected = torch.from_numpy(np.where(mask == 1, blank_of(blank), pixels))
    seen = set()
    for epoch in range(8):
        (item,) = items(data, epoch)
        assert item.conditions.mask is not None
        assert item.conditions.masked_latents is not None
        flipped = not torch.equal(item.conditions.mask[0], torch.from_numpy(mask).float())
        seen.add(flipped)
        assert close(item.conditions.masked_latents, averaged(expected.flip(-1) if flipped else expected))
    assert seen == {False, True}
    said = "" if blank == "grey" else f", blanked with {blank}"
    assert data.describe()[1].endswith(f"inpainting masks{said}")


def test_caches_of_grey_keep_their_names_and_other_colours_have_their_own(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    save_mask(tmp_path / "masks" / "a.png", half())
    keys = "inpaint_mask_directory = 'masks'\n"
    filling(tmp_path, keys)
    for blank, missing in (("grey", 0), ("black", 1), ("white", 1), ("noise", 1)):
        toml = write_toml(tmp_path, subset=f"image_dir = 'img'\n{keys}inpaint_blank = '{blank}'")
        assert len(build(toml, conditioning="fill").missing_latents("vae-1")) == missing


def test_noise_is_a_function_of_seed_sample_and_mask_and_even_from_black_to_white(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        add_image(tmp_path / "img", name)
    keys = "inpaint_masks = ['halves']\ninpaint_mask_variants = 2\ninpaint_blank = 'noise'"
    shown = {}
    for seed in (1, 2):
        data = build(write_toml(tmp_path, subset=f"image_dir = 'img'\n{keys}"), conditioning="fill", seed=seed)
        data.missing_latents("vae-1")  # hashes the contents
        for sample in data.train.samples:
            for variant, (_, image) in enumerate(previews(sample, seed)):
                mask = generated_mask(("halves",), 64, 64, seed, sample.identity, variant) == 1
                array = np.asarray(image)
                assert np.array_equal(array[~mask], np.asarray(Image.open(sample.image.path))[~mask])
                under = array[mask].astype(float) / 255
                assert abs(under.mean() - 1 / 2) < 0.02  # 3 000 values and more: the mean's deviation is 0.005
                assert abs(under.std() - 12**-0.5) < 0.02  # of an even distribution from 0 to 1
                shown[seed, sample.identity, variant] = under[:500].tobytes()
        once, again = (previews(data.train.samples[0], seed) for _ in range(2))
        assert once == again
    assert len(set(shown.values())) == len(shown) == 8


def test_another_colour_is_refused_with_those_there_are(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    with pytest.raises(UserError, match=r"inpaint_blank = 'red'.*grey.*black.*white.*noise"):
        filling(tmp_path, "inpaint_blank = 'red'")
    toml = write_toml(tmp_path, subset="image_dir = 'img'\ninpaint_blank = 'black'")
    with pytest.raises(UserError, match="'inpaint_blank' is not taken: this model generates images from text alone"):
        build(toml)


SIZES = [(256, 256), (192, 80), (16, 16), (64, 16)]


def drawn(kind: MaskKind, width: int, height: int, count: int = 60) -> list[Mask]:
    rng = random.Random(f"{kind} {width} {height}")
    return [draw_mask(kind, width, height, rng) for _ in range(count)]


@pytest.mark.parametrize("kind", MASK_KINDS)
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_masks_fill_5_to_90_percent_of_any_size(kind: MaskKind, width: int, height: int) -> None:
    for mask in drawn(kind, width, height):
        assert (mask.shape, mask.dtype) == ((height, width), np.uint8)
        assert set(np.unique(mask)) == {0, 1}
        assert 0.05 <= mask.mean() <= 0.9


@pytest.mark.parametrize(("width", "height"), [(1472, 64), (64, 1472), (4096, 256)])
def test_ribbons_that_no_three_rectangles_fill_get_a_half(width: int, height: int) -> None:
    """Three of 150/256 of the shorter side, squared, are 4.5 % of 1472 x 64."""
    mask = draw_mask("rectangles", width, height, random.Random(0))
    assert mask.all(axis=0).any() or mask.all(axis=1).any()  # whole rows or columns: no rectangle touches the edge
    assert 0.3 <= mask.mean() <= 0.7  # 35 to 65 % and the rounding of 64 rows


def test_a_mask_is_a_function_of_seed_sample_and_variant() -> None:
    first = generated_mask(MASK_KINDS, 64, 48, 1, "a", 0)
    assert np.array_equal(first, generated_mask(MASK_KINDS, 64, 48, 1, "a", 0))
    others = [(2, "a", 0), (1, "b", 0), (1, "a", 1)]
    assert all(not np.array_equal(first, generated_mask(MASK_KINDS, 64, 48, *key)) for key in others)


def test_only_the_kinds_asked_for_are_drawn() -> None:
    halves = [generated_mask(("halves",), 64, 64, 0, "a", variant) for variant in range(50)]
    for mask in halves:
        rows, columns = mask.all(axis=1), mask.all(axis=0)
        assert rows.any() != columns.any()  # whole rows or whole columns
        assert mask.sum() == 64 * max(rows.sum(), columns.sum())
    # 50 draws of one of four sides: that one stays away has a probability of 4 * 0.75^50 = 2e-6
    corners = {tuple(bool(mask[y, x]) for y, x in ((0, 0), (0, -1), (-1, 0), (-1, -1))) for mask in halves}
    assert len(corners) == 4


def test_rectangles_keep_lamas_margin_and_sides() -> None:
    """LaMa: at least 10 pixels of 256 from the edge, sides of 30 to 150; one rectangle alone shows its sides."""
    alone = 0
    for mask in drawn("rectangles", 256, 256, 200):
        inner = mask.copy()
        inner[10:-10, 10:-10] = 0
        assert not inner.any()
        high, wide = np.ptp(np.nonzero(mask), axis=1) + 1
        if mask.sum() == high * wide:
            alone += 1
            assert min(high, wide) >= 30
            assert max(high, wide) <= 150 or high * wide > 150 * 30  # two that make one rectangle
    assert alone > 30  # of 200, a third


def test_borders_leave_one_rectangle_and_touch_the_edge() -> None:
    sides = set()
    for mask in drawn("borders", 160, 80, 100):
        known = 1 - mask
        rows, columns = np.nonzero(known)
        top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
        assert known.sum() == (bottom - top) * (right - left)
        for depth, side in ((top, 80), (80 - bottom, 80), (left, 160), (160 - right, 160)):
            assert depth == 0 or side / 8 - 1 <= depth <= side * 3 / 8 + 1  # rounded to whole pixels
        sides.add(sum(depth > 0 for depth in (top, 80 - bottom, left, 160 - right)))
    assert sides == {1, 2, 3, 4}


def test_strokes_fill_about_a_third_of_the_image_and_vary() -> None:
    """LaMa calls such masks wide; simulated shares were 11 to 61 % between the first and the last tenth."""
    shares = [mask.mean() for mask in drawn("strokes", 256, 256, 200)]
    assert 0.2 < np.mean(shares) < 0.5
    assert np.std(shares) > 0.1
