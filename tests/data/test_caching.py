"""Caches: everything is encoded once, and nothing stale, damaged or unfinished is ever read."""

from __future__ import annotations

import builtins
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from library.data.batches import RaisingLoader, collate_or_error
from library.errors import UserError
from tests.data.folders import (
    LONG_AGO,
    AverageEncoder,
    LettersEncoder,
    add_image,
    averaged,
    build,
    cache_all,
    items,
    make_image,
    pixels_of,
    silent,
    spelled,
    write_toml,
)

BUCKETS = "enable_bucket = true\nbucket_reso_steps = 16\nmin_bucket_reso = 16"


def test_items_hold_the_latents_and_text_of_their_image(tmp_path: Path) -> None:
    for i, name in enumerate(("a.png", "b.png")):
        add_image(tmp_path / "img", name, caption=f"caption {name}", seed=i)
    data = build(write_toml(tmp_path, subset="image_dir = 'img'\nnum_repeats = 2"))
    cache_all(data)
    assert len(data.train) == 4
    for index, item in enumerate(items(data.train)):
        name = "ab"[index // 2] + ".png"
        # fp32 means of 64 values, added in another order
        torch.testing.assert_close(item.latents, averaged(pixels_of(tmp_path / "img" / name)), atol=1e-6, rtol=0)
        assert spelled(item.text) == f"caption {name}"
        assert item.text["pooled_prompt_embeds"].dtype == torch.bfloat16
        assert item.mask is None
    assert len({item.sample_id for item in items(data.train)}) == 4


def test_images_are_encoded_once_in_batches_of_one_size(tmp_path: Path) -> None:
    for i in range(3):
        add_image(tmp_path / "img", f"a{i}.png", (64, 64), seed=i)
        add_image(tmp_path / "img", f"b{i}.png", (80, 48), seed=i)
    toml = write_toml(tmp_path, dataset=BUCKETS)
    images, texts = cache_all(build(toml), image_batch=2)
    assert sorted(images.batches) == [(1, 3, 48, 80), (1, 3, 64, 64), (2, 3, 48, 80), (2, 3, 64, 64)]
    assert texts.seen == ["a, b, c"]
    again = build(toml)
    assert (len(again.missing_latents("vae-1")), len(again.missing_text("text-1"))) == (0, 0)
    images, texts = cache_all(again)
    assert (images.batches, texts.seen) == ([], [])
    assert items(again.train)[0].latents.shape == (3, 8, 8)


def test_a_changed_image_is_encoded_again_and_nothing_stale_is_used(tmp_path: Path) -> None:
    path = add_image(tmp_path / "img", "a.png", seed=0)
    add_image(tmp_path / "img", "b.png", seed=1)
    toml = write_toml(tmp_path)
    cache_all(build(toml))
    make_image(64, 64, seed=5).save(path)
    os.utime(path, (LONG_AGO + 60, LONG_AGO + 60))
    data = build(toml)
    assert len(data.missing_latents("vae-1")) == 1
    cache_all(data)
    torch.testing.assert_close(data.train[(0, 0)].latents, averaged(pixels_of(path)), atol=1e-6, rtol=0)


def test_a_changed_caption_is_encoded_again(tmp_path: Path) -> None:
    path = add_image(tmp_path / "img", "a.png", caption="old").with_suffix(".txt")
    toml = write_toml(tmp_path)
    cache_all(build(toml))
    path.write_text("new")
    os.utime(path, (LONG_AGO + 60, LONG_AGO + 60))
    data = build(toml)
    assert len(data.missing_text("text-1")) == 1
    cache_all(data)
    assert spelled(data.train[(0, 0)].text) == "new"


def test_another_encoder_or_setting_encodes_again_and_going_back_does_not(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png", (96, 64))
    cache_all(build(write_toml(tmp_path)))
    data = build(write_toml(tmp_path))
    assert (len(data.missing_latents("vae-2")), len(data.missing_text("text-2"))) == (1, 1)
    for general in ("flip_aug = true", "random_crop = true", "resize_interpolation = 'area'"):
        assert len(build(write_toml(tmp_path, general=general)).missing_latents("vae-1")) == 1, general
    with_alpha = build(write_toml(tmp_path, general="alpha_mask = true"), masked_loss=True)
    assert len(with_alpha.missing_latents("vae-1")) == 1
    assert len(build(write_toml(tmp_path)).missing_latents("vae-1")) == 0
    assert len(build(write_toml(tmp_path, general="resize_interpolation = 'lanczos'")).missing_latents("vae-1")) == 0


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_a_damaged_cache_file_is_encoded_again(tmp_path: Path, damage: str) -> None:
    for i in range(3):
        add_image(tmp_path / "img", f"{i}.png", seed=i, caption=f"caption {i}")
    toml = write_toml(tmp_path)
    cache_all(build(toml))
    for kind in ("latents", "text"):
        victim = sorted((tmp_path / "img" / ".tandem_cache" / kind).iterdir())[0]
        content = victim.read_bytes()
        victim.write_bytes({"empty": b"", "cut": content[:-10], "text": b"hello"}[damage])
    data = build(toml)
    assert (len(data.missing_latents("vae-1")), len(data.missing_text("text-1"))) == (1, 1)
    cache_all(data)
    assert len(items(data.train)) == 3


def _cached(folder: Path) -> list[Path]:
    return sorted((folder / "img" / ".tandem_cache").rglob("*.safetensors"))


def test_any_changed_byte_of_a_cache_file_is_noticed_and_the_file_deleted(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    data = build(write_toml(tmp_path))
    cache_all(data)
    draw = random.Random(0)
    for path in _cached(tmp_path):
        whole = path.read_bytes()
        for place in sorted({*range(0, 200, 7), len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(50))}):
            changed = bytearray(whole)
            changed[place] ^= 1 << draw.randrange(8)
            path.write_bytes(changed)
            with pytest.raises(UserError, match=r"damaged .*; start again with --resume auto: it is made anew"):
                data.train[(0, 0)]
            assert not path.exists(), place
            path.write_bytes(whole)


def test_a_whole_cache_file_in_the_place_of_another_is_not_used(tmp_path: Path) -> None:
    for i in range(2):
        add_image(tmp_path / "img", f"{i}.png", seed=i, caption=f"caption {i}")
    data = build(write_toml(tmp_path))
    cache_all(data)
    before = [data.train[(0, i)] for i in range(2)]
    assert not torch.equal(before[0].latents, before[1].latents)
    for folder in ("latents", "text"):  # as a sync that mixes up its files leaves them
        one, other = sorted((tmp_path / "img" / ".tandem_cache" / folder).iterdir())
        shutil.copyfile(one, other)
        with pytest.raises(UserError, match=r"damaged \(its checksum does not fit\)"):
            [data.train[(0, i)] for i in range(2)]
        assert not other.exists()
        cache_all(data)
        for i, item in enumerate(before):
            assert torch.equal(data.train[(0, i)].latents, item.latents)
            assert torch.equal(data.train[(0, i)].text["prompt_embeds"], item.text["prompt_embeds"])


@pytest.mark.timeout(30)
@pytest.mark.parametrize("what", ["folder", "pipe", "link to itself", "link to nothing", "device"])
def test_what_is_no_file_in_the_place_of_a_cache_file_gives_way_to_it(what: str, tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    data = build(write_toml(tmp_path))
    cache_all(data)
    before = data.train[(0, 0)]
    for path in _cached(tmp_path):
        for is_read_before in (True, False):
            path.unlink()
            match what:
                case "folder":
                    path.mkdir()
                case "pipe":
                    os.mkfifo(path)
                case _:
                    path.symlink_to({"link to itself": path.name, "link to nothing": "x", "device": "/dev/zero"}[what])
            if is_read_before:
                with pytest.raises(UserError, match="start again"):
                    data.train[(0, 0)]
            cache_all(build(write_toml(tmp_path)))
            again = data.train[(0, 0)]
            assert torch.equal(again.latents, before.latents)
            assert torch.equal(again.text["prompt_embeds"], before.text["prompt_embeds"])
            assert path.is_file()
            assert not path.is_symlink()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_vanishes_while_training_is_said_in_a_line(workers: int, tmp_path: Path) -> None:
    for i in range(3):
        add_image(tmp_path / "img", f"{i}.png", seed=i, caption=f"caption {i}")
    data = build(write_toml(tmp_path))
    cache_all(data)
    loader = DataLoader(
        data.train,
        batch_sampler=data.batch_sampler(),
        collate_fn=collate_or_error,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    assert len(list(RaisingLoader(loader))) == 3
    shutil.rmtree(tmp_path / "img" / ".tandem_cache")
    with pytest.raises(UserError) as caught:
        list(RaisingLoader(loader))
    said = r"\S+: missing; start again with --resume auto: it is made anew before the model is loaded"
    assert re.fullmatch(said, str(caught.value))


def test_a_cache_file_of_an_earlier_version_is_encoded_again(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    data = build(write_toml(tmp_path))
    cache_all(data)
    (path,) = (tmp_path / "img" / ".tandem_cache" / "latents").iterdir()
    save_file(load_file(path), path)  # as they were without checksums
    assert len(build(write_toml(tmp_path)).missing_latents("vae-1")) == 1


def test_an_image_changed_while_caching_is_refused(tmp_path: Path) -> None:
    path = add_image(tmp_path / "img", "a.png")
    data = build(write_toml(tmp_path))
    data.missing_latents("vae-1")
    make_image(64, 64, seed=5).save(path)
    with pytest.raises(UserError, match=r"a\.png: changed while it was being cached; start again$"):
        data.cache_latents(AverageEncoder(), 1, silent)


def test_what_is_not_finite_is_never_cached(tmp_path: Path) -> None:
    class Broken(AverageEncoder):
        def encode(self, pixels: torch.Tensor) -> torch.Tensor:
            return super().encode(pixels) * torch.nan

    class BrokenText(LettersEncoder):
        def encode(self, captions: list[str], references: object = None) -> list[dict[str, torch.Tensor]]:
            return [{"prompt_embeds": torch.tensor([[torch.inf]])} for _ in captions]

    add_image(tmp_path / "img", "a.png")
    data = build(write_toml(tmp_path))
    with pytest.raises(UserError, match=r"a\.png: its latents are not finite; encode images in bf16 or fp32$"):
        data.cache_latents(Broken(), 1, silent)
    with pytest.raises(
        UserError, match=r"^caption 'a, b, c': prompt_embeds is not finite; encode text in bf16 or fp32$"
    ):
        data.cache_text(BrokenText(), [], 1, silent)
    assert (len(data.missing_latents("vae-1")), len(data.missing_text("text-1"))) == (1, 1)


def test_processes_share_the_encoding(tmp_path: Path) -> None:
    for i in range(12):
        add_image(tmp_path / "img", f"{i}.png", seed=i, caption=f"caption {i}")
    toml = write_toml(tmp_path)
    shares = []
    for rank in range(3):  # one after the other: a later one sees what an earlier one has written
        data, images, texts = build(toml), AverageEncoder(), LettersEncoder()
        data.cache_latents(images, 1, silent, rank, 3)
        data.cache_text(texts, ["a prompt"], 1, silent, rank, 3)
        shares.append((len(images.batches), len(texts.seen)))
    assert [sum(share) for share in zip(*shares, strict=True)] == [12, 13]
    assert len(build(toml).missing_latents("vae-1")) == len(build(toml).missing_text("text-1", ["a prompt"])) == 0


def test_progress_counts_what_is_encoded(tmp_path: Path) -> None:
    for i in range(3):
        add_image(tmp_path / "img", f"{i}.png", seed=i)
    seen: list[object] = []
    data = build(write_toml(tmp_path))
    data.cache_latents(AverageEncoder(), 2, lambda text, total: seen.append((text, total)) or seen.append)  # type: ignore[func-returns-value]
    assert seen == [("encoding images", 3), 2, 1]


def test_caches_go_to_cache_directory(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    cache_all(build(write_toml(tmp_path), cache_directory=str(tmp_path / "elsewhere")))
    assert not (tmp_path / "img" / ".tandem_cache").exists()
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == {"index.json", "latents", "text"}


def test_sample_prompts_are_cached_with_the_captions(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    data = build(write_toml(tmp_path))
    assert len(data.missing_text("text-1", ["a, b, c", "a prompt", ""])) == 3
    data.cache_text(LettersEncoder(), ["a prompt", ""], 2, silent)
    assert spelled(data.text_embeddings("a prompt")) == "a prompt"
    assert spelled(data.text_embeddings("")) == ""


def test_cached_tensors_keep_the_encoders_precision(tmp_path: Path) -> None:
    class Half(AverageEncoder):
        def encode(self, pixels: torch.Tensor) -> torch.Tensor:
            return super().encode(pixels).to(torch.bfloat16)

    add_image(tmp_path / "img", "a.png")
    data = build(write_toml(tmp_path))
    data.cache_latents(Half(), 1, silent)
    (file,) = (tmp_path / "img" / ".tandem_cache" / "latents").iterdir()
    assert load_file(file)["latents"].dtype == torch.bfloat16


def test_a_warm_start_opens_no_image_no_caption_and_one_cache_file_of_each_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(20):
        add_image(tmp_path / "img", f"{i:02d}.png", seed=i, caption=f"caption {i:02d}")
    toml = write_toml(tmp_path)
    cache_all(build(toml))
    opened: list[str] = []
    real_open = builtins.open

    def noting_open(file: object, *rest: object, **options: object) -> object:
        opened.append(str(file))
        return real_open(file, *rest, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(builtins, "open", noting_open)
    monkeypatch.setattr(Image, "open", noting_open)
    data = build(toml)
    assert (len(data.missing_latents("vae-1")), len(data.missing_text("text-1"))) == (0, 0)
    assert not [path for path in opened if path.endswith((".png", ".txt"))]
    assert len({path for path in opened if path.endswith(".safetensors")}) == 2  # one of latents, one of text
