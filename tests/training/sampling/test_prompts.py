"""Sample prompts in kohya's three kinds of files, and their pictures: read, refused, encoded and shown."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from library.conditions import NO_CONDITIONS, Conditions
from library.config.model_types import Blank, ConditionKind
from library.data.buckets import ControlSizing
from library.errors import UserError
from library.models.family import SampleSettings
from library.models.text import TextEncoder
from library.training.sampling.conditions import (
    PromptImageRules,
    check_prompt_images,
    encode_prompt_images,
    show_prompt_images,
    text_jobs,
)
from library.training.sampling.images import Sampler
from library.training.sampling.prompts import SamplePrompt, check_steering, note_changes, parse_prompt, read_prompts
from tests.data.folders import AverageEncoder, add_image, build, make_image, write_toml
from tools.generate import parser, read_text_prompts


def _read(tmp_path: Path, text: str, suffix: str = ".txt", **keywords: object) -> list[SamplePrompt]:
    path = tmp_path / f"prompts{suffix}"
    path.write_text(text, encoding="utf-8")
    return read_prompts(path, seed=5, pixel_multiple=16, **keywords)  # type: ignore[arg-type]


def test_options_comments_and_defaults(tmp_path: Path) -> None:
    prompts = _read(
        tmp_path,
        "# a comment\n\na well-known cat --n blurry, low --w 640 --h 384 --d 42 --s 12 --g 2.5 --l 3\nplain dog\n",
    )
    assert prompts == [
        SamplePrompt("a well-known cat", "blurry, low", 640, 384, 42, 12, 2.5, 3.0),
        SamplePrompt("plain dog", seed=6),
    ]
    assert prompts[0].texts() == ["a well-known cat", "blurry, low"]
    assert prompts[1].texts() == ["plain dog"]
    assert sorted({text for prompt in prompts for text in prompt.texts()}) == [
        "a well-known cat",
        "blurry, low",
        "plain dog",
    ]


def test_options_may_be_of_either_case_with_an_equals_sign_and_of_one_frame(tmp_path: Path) -> None:
    assert _read(tmp_path, "x --W 640 --h=384 --f 1") == [SamplePrompt("x", width=640, height=384, seed=5)]


def test_toml_has_common_keys_and_a_table_a_picture(tmp_path: Path) -> None:
    """kohya's layout; a subset's key wins over the common one."""
    text = """
    [prompt]
    width = 640
    negative_prompt = "low"
    sample_steps = 12
    scale = 2
    [[prompt.subset]]
    prompt = "a cat"
    seed = 42
    [[prompt.subset]]
    prompt = "a dog --w 1"
    width = 320
    guidance_scale = 1.5
    """
    assert _read(tmp_path, text, ".toml") == [
        SamplePrompt("a cat", "low", 640, 512, 42, 12, 3.5, 2.0),
        SamplePrompt("a dog --w 1", "low", 320, 512, 6, 12, 1.5, 2.0),
    ]
    assert _read(tmp_path, '[prompt]\nprompt = "alone"', ".toml") == [SamplePrompt("alone", seed=5)]


def test_json_is_a_list_of_objects_or_lines(tmp_path: Path) -> None:
    listed = [
        {"prompt": "a cat", "negative_prompt": "low", "width": 640, "height": 384, "seed": 42, "sample_steps": 12,
         "guidance_scale": 2.5, "scale": 3.0, "enum": 0, "frame_count": 1},
        "a dog --w 320",
        {"prompt": "musubi's key", "cfg_scale": 4},
    ]  # fmt: skip
    assert _read(tmp_path, json.dumps(listed), ".json") == [
        SamplePrompt("a cat", "low", 640, 384, 42, 12, 2.5, 3.0),
        SamplePrompt("a dog", width=320, seed=6),
        SamplePrompt("musubi's key", seed=7, cfg=4.0),
    ]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e"])
def test_only_a_newline_ends_a_prompt(tmp_path: Path, mark: str) -> None:
    """As sd-scripts reads lines, with readlines(); str.splitlines() would cut at each of these."""
    line = f"a{mark}b --w 64"
    wanted = [SamplePrompt(f"a{mark}b", width=64, seed=5), SamplePrompt("c", seed=6)]
    assert _read(tmp_path, f"{line}\r\nc") == wanted
    assert read_prompts([line, "c"], 5, 16) == wanted
    (tmp_path / "texts.txt").write_text(f"a{mark}b\nc\n", encoding="utf-8")
    asked = parser().parse_args(["text", "--model", "m", "--from_file", str(tmp_path / "texts.txt")])
    assert read_text_prompts(asked) == [f"a{mark}b", "c"]


def test_a_prompt_written_as_a_line_reads_back_as_itself() -> None:
    for prompt in (SamplePrompt("a cat", "low", 640, 384, 1234567890123, 12, 2.25, 3.0), SamplePrompt("x")):
        assert parse_prompt(prompt.line(), SamplePrompt(""), 16, "here") == prompt


def test_a_list_gives_the_prompts_that_a_file_of_its_lines_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "a well-known cat --n blurry, low --w 640 --h 384 --d 42 --s 12 --g 2.5 --l 3",
        "a dog, [sitting] #1",
        "a bird --ci own.png --ci shared/b.png --mi mask.png",
    ]
    monkeypatch.chdir(tmp_path)
    Path("shared").mkdir()
    for image in ("own.png", "shared/b.png", "mask.png"):
        Path(image).touch()
    defaults = SamplePrompt("", "dull", 256, 128, 99, 4, 1.0, 2.0)
    Path("prompts.txt").write_text("\n".join(lines))
    assert read_prompts(lines, 5, 16, defaults) == read_prompts("prompts.txt", 5, 16, defaults)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cat --q 3", r"prompts.txt:1: unknown option --q; known are --n --w"),
        ("cat --w wide", "--w takes a whole number, not 'wide'"),
        ("cat --w 0", "0 x 512 pixels; at most .* and at least one pixel"),
        ("cat --cfg_scale 3", "unknown option --cfg_scale; known are"),
        ("cat --w640", "unknown option --w640; known are"),
        ("cat --s 0", "at least one step"),
        ("cat --d -1", r"seed \(--d\) -1; write a number from 0"),
        ("cat --g nan", r"guidance \(--g\) nan; write a finite number"),
        ("--w 64", "prompts.txt:1: no prompt before the options"),
        ("cat --ss euler_a", "--ss is not taken: the model's own Euler solver is used"),
        ("cat --ci a.png", "prompts.txt:1: image 'a.png' does not exist; it is looked for beside the prompts' file"),
        ("cat --am 0.5", "--am is not taken: LoRA strengths are one for all images"),
        ("cat --f 25", "--f is not taken: an image is one frame"),
        ("cat --w 64 --n one --W 128", "prompts.txt:1: --W stands there twice; keep one"),
        ("cat --n one --n ", "--n stands there twice"),
        ("# nothing", "sample_prompts: .*holds no prompt; write one a line"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        _read(tmp_path, line)


@pytest.mark.parametrize(
    ("suffix", "text", "message"),
    [
        (".toml", "[prompt\n", r"prompts.toml line 1: not valid TOML"),
        (".toml", 'promt = "x"', r"unknown key 'promt'; put everything under \[prompt\]"),
        (".toml", "[prompt]\n", r"holds no prompt; write a \[\[prompt.subset\]\]"),
        (".toml", "[prompt]\nwidth = 64", 'prompt 1: no prompt; write prompt = "..."'),
        (".toml", '[prompt]\nprompt = "x"\nwidht = 64', "prompt 1: unknown key 'widht'; did you mean 'width'"),
        (".json", "[", "prompts.json: not valid JSON"),
        (".json", '{"prompt": "x"}', 'not a list of prompts; write '),
        (".json", "[]", r'holds no prompt; write a list, \[\{"prompt": "..."\}\]'),
        (".json", '[{"prompt": "x"}, {"prompt": "y", "width": "64"}]', "prompt 2: width takes a whole number, not"),
        (".json", '[{"prompt": "x", "scale": 2, "cfg_scale": 3}]', "cfg_scale repeats what another key sets"),
        (".json", '[{"prompt": "x", "sample_sampler": "ddim"}]', "sample_sampler is not taken"),
    ],
)  # fmt: skip
def test_a_bad_toml_or_json_file_is_named(tmp_path: Path, suffix: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        _read(tmp_path, text, suffix)


def test_guidance_without_an_input_is_refused_only_where_it_was_written() -> None:
    usual = SamplePrompt("", guidance=1.0)
    silent, written = (parse_prompt(line, usual, 16, "here") for line in ("x", "a cat --g 3.5"))
    assert check_steering([silent, written], True, 1.0) == []
    assert check_steering([silent], False, 1.0) == []
    with pytest.raises(UserError, match="prompt 'a cat': --g 3.5 is not taken: this model has no guidance input"):
        check_steering([silent, written], False, 1.0)


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
        ("fill", "x --mi m.png", "prompt 'x': no image to fill; write --ci image.png --mi mask.png, the mask white"),
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


@pytest.mark.parametrize(("asked", "made"), [(1000, 992), (1024, 1024), (100, 96), (40, 64), (48, 48), (79, 64)])
def test_a_side_is_rounded_down_as_sd_scripts_does_and_said(asked: int, made: int) -> None:
    """Its ``sample_image_inference``: max(64, side - side % 16); multiples are taken as they are."""
    prompts = read_prompts([f"a cat --w {asked}"], 0, 16)
    assert prompts == [SamplePrompt("a cat", width=made)]
    why = "the model's sides are multiples, rounded down as in sd-scripts"
    said = [f"prompt 'a cat': {asked} x 512 becomes {made} x 512: {why}"] * (asked != made)
    assert note_changes(prompts, TextEncoder().too_long) == said


def test_keys_that_ask_for_nothing_are_passed_over(tmp_path: Path) -> None:
    idle = {"sample_sampler": "", "controlnet_image": None, "flow_shift": 0, "am": [], "frame_count": 1}
    known: dict[str, object] = {"negative_prompt": "", "control_image_path": "", "mask_image_path": None, "seed": None}
    assert _read(tmp_path, json.dumps([{"prompt": "x"} | idle | known]), ".json") == [SamplePrompt("x", seed=5)]
    defaults = {"sample_sampler": "euler", "renorm_cfg": 1.0, "cfg_trunc_ratio": 1, "am": [1.0, 1]}
    assert _read(tmp_path, json.dumps([{"prompt": "x"} | defaults]), ".json") == [SamplePrompt("x", seed=5)]
    for words in (
        "--am 1",
        "--am 1.0,1.00",
        "--am 1, 1",
        "--rcfg 1.0",
        "--ctr 1",
        "--ss euler",
        "--ss Euler",
        "--f 1.0",
    ):
        assert _read(tmp_path, f"x {words}") == [SamplePrompt("x", seed=5)], words
    for words in ("--am 0.5", "--am 1.0,0.5", "--rcfg 2", "--ss euler_a", "--f 2", "--am 11", "--ctr 0.25"):
        with pytest.raises(UserError, match="is not taken"):
            _read(tmp_path, f"x {words}")
