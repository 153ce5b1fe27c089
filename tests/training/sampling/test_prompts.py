"""Sample prompt files in kohya's three kinds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from library.errors import UserError
from library.training.sampling.prompts import SamplePrompt, check_steering, parse_prompt, read_prompts


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
        ("cat --w 100", r"width \(--w\) 100 is no multiple of 16; take 96"),
        ("cat --s 0", "at least one step"),
        ("cat --d -1", r"seed \(--d\) -1; write a number from 0"),
        ("cat --g nan", r"guidance \(--g\) nan; write a finite number"),
        ("--w 64", "prompts.txt:1: no prompt before the options"),
        ("cat --ss euler_a", "--ss is not taken: the model's own Euler solver is used"),
        ("cat --ci a.png", "prompts.txt:1: image 'a.png' does not exist; it is looked for beside the prompts' file"),
        ("cat --am 0.5", "--am is not taken: LoRA strengths are one for all images"),
        ("cat --f 25", "--f is not taken: an image is one frame"),
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
        (".json", '[{"prompt": "x", "scale": 2, "cfg_scale": 3}]', "cfg_scale says again what another key said"),
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
