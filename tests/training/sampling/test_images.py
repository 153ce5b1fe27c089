"""The sheets of samples, with a stand-in for the model that paints one colour."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import library.training.sampling.painting as painting
from library.checksums import write_checked_json
from library.models.family import SampleSettings
from library.training.sampling.images import Sampler
from library.training.sampling.painting import PaintedSet, missing_of, painted_size
from library.training.sampling.prompts import SamplePrompt


class Painter:
    """A family whose image shows what it was asked for: the prompt's length in red, the "weights" in green."""

    def sample(
        self, transformer: nn.Linear, encoder: object, text: dict, settings: SampleSettings, **_: object
    ) -> Image.Image:
        return Image.new(
            "RGB", (settings.width, settings.height), (int(text["x"].item()), int(transformer.weight.item()), 200)
        )


class Encoder:
    released = 0

    def release(self) -> None:
        self.released += 1


PROMPTS = [SamplePrompt("a" * 50, width=64, height=64), SamplePrompt("b" * 150, width=64, height=32)]


def sampler(folder: Path, prompts: list[SamplePrompt] = PROMPTS) -> Sampler:
    embeddings = {prompt.prompt: {"x": torch.tensor(len(prompt.prompt))} for prompt in prompts}
    return Sampler(Painter(), prompts, Encoder(), embeddings, folder)  # type: ignore[arg-type]


def draw(one: Sampler, *steps: int) -> None:
    for step in steps:
        one.sample(nn.Linear(1, 1).requires_grad_(False), step)


def painted(step: int) -> nn.Module:
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, step)
    return model


def colours(path: Path) -> set[tuple[int, int, int]]:
    with Image.open(path) as sheet:
        found = sheet.convert("RGB").getcolors(1 << 20)
    assert found is not None
    return {colour for count, colour in found if count > 1000 and colour[2] == 200}


def test_sheets_show_the_ends_and_at_most_eight_steps_evenly_chosen(tmp_path: Path) -> None:
    one = sampler(tmp_path)
    for step in range(0, 210, 10):  # 21 steps
        one.sample(painted(step), step)
    assert one.write_sheets() == [tmp_path / "before_after.png", tmp_path / "over_time.png"]
    assert colours(tmp_path / "before_after.png") == {(red, step, 200) for red in (50, 150) for step in (0, 200)}
    # 20 intervals in 7 parts of 2.86, to the nearest step: the first and the last are always there
    chosen = [0, 30, 60, 90, 110, 140, 170, 200]
    assert colours(tmp_path / "over_time.png") == {(red, step, 200) for red in (50, 150) for step in chosen}
    with Image.open(tmp_path / "over_time.png") as sheet:
        assert sheet.width > 8 * 256
        assert sheet.height > 256 + 128  # a row a prompt, the second one half as high


def test_an_image_carries_its_prompt_and_the_vae_is_let_go(tmp_path: Path) -> None:
    one = sampler(tmp_path)
    draw(one, 3)
    with Image.open(tmp_path / "step000003_01.png") as picture:
        assert picture.info["prompt"] == "b" * 150 + " --w 64 --h 32 --d 0 --s 20 --g 3.5 --l 1.0"
    assert one.image_encoder.released == 1  # type: ignore[attr-defined]


def test_a_resumed_run_goes_on_with_its_own_images_alone(tmp_path: Path) -> None:
    draw(sampler(tmp_path), 0, 10, 20, 1234567)
    cut_off = tmp_path / "step000010_01.png"
    cut_off.write_bytes(cut_off.read_bytes()[:-30])
    resumed = sampler(tmp_path)
    resumed.recall(20)
    assert sorted(resumed.sampled) == [0, 20]  # 10 is broken, 1234567 lies behind the point of resumption
    draw(resumed, 30)
    assert len(resumed.write_sheets()) == 2
    other = sampler(tmp_path, [PROMPTS[0], SamplePrompt("another", width=64, height=32)])
    other.recall(20)
    assert other.sampled == {}
    other = sampler(tmp_path / "nowhere")
    other.recall(20)
    assert other.sampled == {}


def test_processes_that_look_at_different_times_leave_no_picture_out(tmp_path: Path) -> None:
    folders = [tmp_path / "regularisation", tmp_path / "general"]
    sets = {f.name: PaintedSet(f, [SamplePrompt(f"{f.name} {i}") for i in range(5)]) for f in folders}
    first = missing_of(sets, 0, 2)
    folders[0].mkdir()
    (path, prompt), *_ = first
    path.touch()  # painted before the other process looks
    write_checked_json(painting.generated_record(path), painting._described(path, prompt))
    second = missing_of(sets, 1, 2)
    assert {path for path, _ in (*first, *second)} == {path for each in sets.values() for path in each.paths}
    assert len(first) + len(second) == 10
    assert [prompt.prompt for path, prompt in second if path.parent.name == "general"] == [
        "general 0",
        "general 2",
        "general 4",
    ]
    assert len(missing_of(sets)) == 9


@pytest.mark.parametrize(
    ("resolution", "expected"),
    [((1024, 1024), (512, 512)), ((1536, 1536), (768, 768)), ((512, 512), (512, 512)), ((256, 256), (256, 256)),
     ((768, 768), (512, 512)), ((1216, 832), (608, 416)), ((500, 300), (496, 288))],
)  # fmt: skip
def test_pictures_have_half_the_sides_but_a_square_of_512_where_the_dataset_has_it(
    resolution: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert painted_size([(64, 64), resolution], 16) == expected
