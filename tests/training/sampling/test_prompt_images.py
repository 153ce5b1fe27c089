"""Pictures of sample prompts: read, refused, encoded as the dataset's are, and shown beside what is drawn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from library.conditions import NO_CONDITIONS, ConditionKind, Conditions
from library.config.model_types import Blank
from library.data.buckets import ControlSizing
from library.errors import UserError
from library.models.family import SampleSettings
from library.training.sampling.conditions import (
    PromptImageRules,
    check_prompt_images,
    encode_prompt_images,
    show_prompt_images,
    text_jobs,
)
from library.training.sampling.images import Sampler
from library.training.sampling.prompts import SamplePrompt, read_prompts
from tests.data.folders import AverageEncoder, add_image, build, make_image, write_toml


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two images, the second with spaces in its name, and a mask that is white on the right."""
    make_image(64, 64, seed=1).save(tmp_path / "a.png")
    make_image(128, 64, seed=2).save(tmp_path / "b c.png")
    mask = np.zeros((64, 64), dtype=np.uint8)
    mask[:, 32:] = 255
    Image.fromarray(mask).save(tmp_path / "m.png")
    return tmp_path


def read(folder: Path, text: str, suffix: str = ".txt") -> list[SamplePrompt]:
    (folder / f"prompts{suffix}").write_text(text)
    return read_prompts(folder / f"prompts{suffix}", 0, 16)


def averaged(path: Path) -> Tensor:
    """The mean colour of each 8 x 8 square of an image, by reshaping."""
    pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1).float() / 127.5 - 1
    channels, height, width = pixels.shape
    return pixels.reshape(channels, height // 8, 8, width // 8, 8).mean(dim=(2, 4))


def test_all_three_kinds_of_file_name_images(folder: Path) -> None:
    both = (str(folder / "a.png"), str(folder / "b c.png"))
    expected = [SamplePrompt("x", width=64, seed=0, control_images=both, mask_image=str(folder / "m.png"))]
    assert read(folder, "x --ci a.png --ci b c.png --mi m.png --w 64") == expected
    keys = {"prompt": "x", "control_image_path": ["a.png", "b c.png"], "mask_image_path": "m.png", "width": 64}
    assert read(folder, json.dumps([keys]), ".json") == expected
    table = "[prompt]\nmask_image_path = 'm.png'\nwidth = 64\n[[prompt.subset]]\nprompt = 'x'\ncontrol_image_path = "
    assert read(folder, table + "['a.png', 'b c.png']", ".toml") == expected
    one = SamplePrompt("x", width=64, seed=0, control_images=both[:1], mask_image=str(folder / "m.png"))
    assert read(folder, table + "'a.png'", ".toml") == [one]


@pytest.mark.parametrize(
    ("suffix", "text", "message"),
    [
        (".txt", "x --ci d.png", "prompts.txt:1: image 'd.png' does not exist; it is looked for beside the prompts"),
        (".txt", "x --ci a.png --mi d.png", "image 'd.png' does not exist"),
        (".json", '[{"prompt": "x", "control_image_path": 3}]', "control_image_path takes a path or a list of paths"),
        (".json", '[{"prompt": "x", "mask_image_path": ["m.png"]}]', "mask_image_path takes text, not"),
    ],
)
def test_images_that_are_not_there_are_named(folder: Path, suffix: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(folder, text, suffix)


@pytest.mark.parametrize(
    ("conditioning", "line", "message"),
    [
        ("none", "x --ci a.png", "prompt 'x': --ci is not taken: this model generates from text alone; remove it"),
        ("references", "x", "prompt 'x': no image to edit; add --ci image.png"),
        ("references", "x --ci a.png --mi m.png", "prompt 'x': --mi is not taken: this model edits whole images; "),
        (
            "fill",
            "x --mi m.png",
            "prompt 'x': no image to fill; write --ci image.png --mi mask.png, the mask white",
        ),
        ("fill", "x --ci a.png", "prompt 'x': no mask; write --ci image.png --mi mask.png, the mask white"),
        ("fill", "x --ci b c.png --mi m.png", "m.png: mask of 64x64 for an image of 128x64; save it in"),
        ("fill", "x --ci a.png --mi black.png", "black.png: nothing to fill; make what is to be filled white"),
        ("references", "x --ci text.png", "text.png: not an image that can be read; replace or remove it"),
    ],
)
def test_prompts_and_model_must_agree(folder: Path, conditioning: ConditionKind, line: str, message: str) -> None:
    Image.new("L", (64, 64), 90).save(folder / "black.png")
    (folder / "text.png").write_text("hello")
    with pytest.raises(UserError) as caught:
        check_prompt_images(read(folder, line), conditioning)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_image_to_fill_covers_the_prompts_size_with_its_region_blanked(folder: Path) -> None:
    rules = PromptImageRules("fill", pixel_multiple=16)
    (prompt,) = read(folder, "x --ci a.png --mi m.png --w 64 --h 32")
    conditions = encode_prompt_images(prompt, AverageEncoder(), rules)  # type: ignore[arg-type]
    assert conditions.mask is not None
    assert conditions.masked_latents is not None
    expected = averaged(folder / "a.png")[:, 2:6]  # 64 x 64 covers 64 x 32; the middle is kept
    expected[:, :, 4:] = 0
    torch.testing.assert_close(conditions.masked_latents, expected[None], atol=1e-6, rtol=0)
    assert conditions.mask.tolist() == [[[[0.0] * 32 + [1.0] * 32] * 32]]
    shown = np.asarray(show_prompt_images(prompt, rules))
    assert np.array_equal(shown[:, :32], np.asarray(Image.open(folder / "a.png"))[16:48, :32])
    assert np.unique(shown[:, 32:]).tolist() == [128]  # mid-grey


@pytest.mark.parametrize(("blank", "value"), [("black", -1.0), ("white", 1.0)])
def test_a_prompts_region_is_blanked_as_the_datasets_are(folder: Path, blank: Blank, value: float) -> None:
    add_image(folder / "img", "a.png")
    toml = write_toml(folder, subset=f"image_dir = 'img'\ninpaint_blank = '{blank}'")
    rules = PromptImageRules.of(build(toml, conditioning="fill"))
    (prompt,) = read(folder, "x --ci a.png --mi m.png --w 64 --h 64")
    conditions = encode_prompt_images(prompt, AverageEncoder(), rules)  # type: ignore[arg-type]
    expected = averaged(folder / "a.png")
    expected[:, :, 4:] = value
    assert conditions.masked_latents is not None
    torch.testing.assert_close(conditions.masked_latents, expected[None], atol=1e-6, rtol=0)
    shown = np.asarray(show_prompt_images(prompt, rules))
    assert np.unique(shown[:, 32:]).tolist() == [round((value + 1) * 127.5)]


def test_references_are_encoded_at_the_control_resolution(folder: Path) -> None:
    (prompt,) = read(folder, "x --ci a.png --ci b c.png --w 32 --h 32")
    kept = PromptImageRules("references", ControlSizing(keep=True), 16)
    conditions = encode_prompt_images(prompt, AverageEncoder(), kept)  # type: ignore[arg-type]
    for name, reference in zip(("a.png", "b c.png"), conditions.references, strict=True):
        torch.testing.assert_close(reference, averaged(folder / name)[None], atol=1e-6, rtol=0)
    as_prompt = encode_prompt_images(prompt, AverageEncoder(), PromptImageRules("references", ControlSizing(), 16))  # type: ignore[arg-type]
    assert [tuple(reference.shape[2:]) for reference in as_prompt.references] == [(4, 4), (4, 4)]
    shown = show_prompt_images(prompt, kept)
    assert shown is not None
    assert shown.size == (64 + 128, 64)


def test_texts_are_shown_their_images_only_where_the_encoder_sees_them(folder: Path) -> None:
    rules = PromptImageRules("references", ControlSizing(), 16)
    one, other, bare = read(folder, "x --n y --l 2 --ci a.png\nx --ci b c.png\nx")
    seen = [job for prompt in (one, other) for job in text_jobs(prompt, True, rules).values()]
    assert [job.caption for job in seen] == ["x", "y", "x"]
    assert len({job.file("f") for job in seen}) == 3
    assert {job.file("f") for job in text_jobs(one, False, rules).values()} >= {
        job.file("f") for job in text_jobs(bare, False, PromptImageRules()).values()
    }
    assert one.text_key("x") != other.text_key("x")
    assert bare.text_key("x") == "x"


class Painter:
    """A family that paints the mean of the first reference and keeps what it was given."""

    def __init__(self) -> None:
        self.given: list[Conditions] = []

    def sample(
        self,
        transformer: object,
        encoder: object,
        text: object,
        settings: SampleSettings,
        conditions: Conditions,
        **_: object,
    ) -> Image.Image:
        self.given.append(conditions)
        return Image.new("RGB", (settings.width, settings.height), (10, 20, 200))


class Encoder(AverageEncoder):
    def release(self) -> None:
        pass


def test_the_sampler_gives_conditions_and_sheets_begin_with_the_input(folder: Path) -> None:
    prompts = read(folder, "x --ci a.png --w 64 --h 64\ny --ci b c.png --w 64 --h 64")
    embeddings: dict[str, dict[str, Tensor]] = {prompt.text_key(prompt.prompt): {} for prompt in prompts}
    painter, encoder = Painter(), Encoder()
    rules = PromptImageRules("references", ControlSizing(), 16)
    sampler = Sampler(painter, prompts, encoder, embeddings, folder / "samples", rules=rules)  # type: ignore[arg-type]
    for step in (0, 5):
        sampler.sample(nn.Linear(1, 1), step)
    assert len(encoder.batches) == 2  # each picture once
    torch.testing.assert_close(painter.given[2].references[0], averaged(folder / "a.png")[None], atol=1e-6, rtol=0)
    (path,) = sampler.write_sheets()
    with Image.open(path) as sheet:
        assert sheet.width == 3 * 264 + 24  # input, before, after
        enlarged = Image.open(folder / "a.png").resize((256, 256), Image.Resampling.LANCZOS)
        assert np.array_equal(np.asarray(sheet.crop((12, 28, 268, 284))), np.asarray(enlarged))
    plain = Sampler(painter, [SamplePrompt("z")], encoder, {"z": {}}, folder / "plain")  # type: ignore[arg-type]
    plain.sample(nn.Linear(1, 1), 0)
    assert painter.given[-1] == NO_CONDITIONS
