"""Embeddings of text encoders that look at the reference images too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from library.data.cache import TextJob
from library.data.dataset import TrainingData
from tests.data.folders import AverageEncoder, LettersEncoder, add_image, build, silent, spelled, write_toml


class SeeingEncoder(LettersEncoder):
    """Adds the colours of each reference image's upper left pixel."""

    def __init__(self) -> None:
        super().__init__("seeing-1")
        self.sees_references = True
        self.sizes: list[list[tuple[int, int]]] = []

    def encode(self, captions: list[str], references: list[list[Image.Image]] | None = None) -> list[dict[str, Tensor]]:
        assert references is not None
        self.sizes += [[image.size for image in images] for images in references]
        outputs = super().encode(captions)
        for output, images in zip(outputs, references, strict=True):
            output["seen"] = torch.tensor([image.convert("RGB").getpixel((0, 0)) for image in images])
        return outputs


def data_of(folder: Path, general: str = "", dataset: str = "") -> TrainingData:
    for i in range(3):
        add_image(folder / "img", f"{i}.png", caption="the same", seed=i)
        add_image(folder / "control", f"{i}.png", caption=None, seed=10 + i % 2)  # 0 and 2 have the same image
    subset = "image_dir = 'img'\ncontrol_directory = 'control'"
    return build(write_toml(folder, dataset, subset, general), conditioning="references")


def cached(data: TrainingData) -> SeeingEncoder:
    encoder = SeeingEncoder()
    data.cache_text(encoder, [], 2, silent)
    data.cache_latents(AverageEncoder(), 2, silent)
    return encoder


def corner(path: Path, mirrored: bool = False) -> list[int]:
    pixels = np.asarray(Image.open(path))
    return pixels[0, -1 if mirrored else 0].tolist()


def test_equal_captions_are_encoded_once_for_each_content_of_the_references(tmp_path: Path) -> None:
    data = data_of(tmp_path)
    encoder = cached(data)
    assert encoder.seen == ["the same"] * 2
    assert encoder.sizes == [[(64, 64)]] * 2
    for index in range(3):
        text = data.train[(0, index)].text
        assert text["seen"].tolist() == [corner(tmp_path / "control" / f"{index}.png")]
        assert spelled(text) == "the same"
    assert data.missing_text("seeing-1", sees_references=True) == 0
    assert data.missing_text("seeing-1") == 1  # without images it is another text


def test_a_mirrored_image_has_the_text_of_its_mirrored_references(tmp_path: Path) -> None:
    data = data_of(tmp_path, general="flip_aug = true")
    assert len(cached(data).seen) == 4
    straight = data.train[(0, 0)].latents
    seen = set()
    for epoch in range(12):
        item = data.train[(epoch, 0)]
        flipped = not torch.equal(item.latents, straight)
        seen.add((flipped, tuple(item.text["seen"][0].tolist())))
    path = tmp_path / "control" / "0.png"
    assert {colour for _, colour in seen} == {tuple(corner(path)), tuple(corner(path, mirrored=True))}
    assert len(seen) == 2


def test_images_are_shown_at_the_size_of_their_latents(tmp_path: Path) -> None:
    encoder = cached(data_of(tmp_path, dataset="control_resolution = 32"))
    assert encoder.sizes == [[(32, 32)]] * 2


def test_dropped_captions_keep_their_images(tmp_path: Path) -> None:
    data = data_of(tmp_path, general="caption_dropout_rate = 0.5")
    assert sorted(cached(data).seen) == ["", "", "the same", "the same"]
    texts = {spelled(data.train[(epoch, 1)].text) for epoch in range(20)}
    assert texts == {"", "the same"}
    assert all(data.train[(epoch, 1)].text["seen"].shape == (1, 3) for epoch in range(5))


def test_prompts_are_cached_with_the_images_they_name(tmp_path: Path) -> None:
    data = data_of(tmp_path)
    data.missing_latents("vae-1")  # contents are hashed
    shown = data.train.samples[1].control_images
    encoder = SeeingEncoder()
    data.cache_text(encoder, [TextJob("a prompt", shown)], 4, silent)
    assert encoder.seen.count("a prompt") == 1
    found = data.text_embeddings(TextJob("a prompt", shown))
    assert found["seen"].tolist() == [corner(tmp_path / "control" / "1.png")]
