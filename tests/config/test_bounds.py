"""Numbers that no training means are refused at the door, whichever option of whichever script has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from library.config.load import load_for
from library.config.schema import DatasetArguments
from library.config.scripts import LANGUAGE_LORA, LLM, LORA, Script, fields
from library.data.config import (
    DATASET_KEYS,
    INPAINT_KEYS,
    REFERENCE_KEYS,
    SUBSET_KEYS,
    DatasetSettings,
    SubsetSettings,
    load_dataset_config,
)
from library.errors import UserError
from library.training.sampling.prompts import SamplePrompt, parse_prompt

NEEDED = {
    LORA: ["--pretrained_model_name_or_path", "m", "--dataset_config", "d", "--sample_prompts", "p"],
    LANGUAGE_LORA: ["--pretrained_model_name_or_path", "m", "--model_type", "llama", "--train_data", "t"],
    LLM: ["--data_dir", "d", "--preset", "llama-tiny"],
}


def takes(annotation: Any, kind: type) -> bool:
    return annotation is kind or any(takes(inner, kind) for inner in get_args(annotation))


def options_of(kind: type) -> list[tuple[Script, str]]:
    return [
        (script, key)
        for script in NEEDED
        for key, (_, field) in fields(script).items()
        if takes(field.annotation, kind)
    ]


def test_every_number_is_finite(subtests: pytest.Subtests) -> None:
    for script, key in options_of(float):
        for value in ("inf", "-inf", "nan", "1e400"):
            with subtests.test(f"{script.training}: {key} = {value}"):
                with pytest.raises(UserError, match=f"--{key}: .*does not fit") as refusal:
                    load_for(script, [*NEEDED[script], f"--{key}={value}"])
                assert "\n" not in str(refusal.value)


def test_every_whole_number_has_an_end(subtests: pytest.Subtests) -> None:
    for script, key in options_of(int):
        for value in (2**63 if key == "seed" else 10**12, 10**23):
            with (
                subtests.test(f"{script.training}: {key} = {value}"),
                pytest.raises(UserError, match=f"--{key}: .*does not fit"),
            ):
                load_for(script, [*NEEDED[script], f"--{key}={value}"])


def test_what_would_fill_the_memory_or_break_at_the_first_step_is_told_at_once() -> None:
    for key, value in {
        "max_data_loader_n_workers": "1000000",
        "network_dim": "10000000000",
        "train_batch_size": "100000000",
        "learning_rate": "1e30",
        "network_alpha": "1e39",
        "guidance_scale": "1e30",
    }.items():
        with pytest.raises(UserError, match=f"--{key}: '{value}' does not fit: should be less than or equal to"):
            load_for(LORA, [*NEEDED[LORA], f"--{key}={value}"])


def test_large_numbers_that_people_do_write_are_taken() -> None:
    used = [
        "--save_every_n_steps=999999",
        "--max_grad_norm=1e10",
        "--max_data_loader_n_workers=64",
        "--seed=4294967295",
    ]
    lokr = ["--network_type=lokr", "--network_dim=100000", "--network_alpha=512", "--save_format=comfy"]
    load_for(LORA, [*NEEDED[LORA], *used, *lokr])


def test_a_dataset_has_the_same_bounds(tmp_path: Path, subtests: pytest.Subtests) -> None:
    (tmp_path / "img").mkdir()
    toml = tmp_path / "d.toml"
    for key in sorted(SUBSET_KEYS | DATASET_KEYS):
        settings = SubsetSettings if key in SUBSET_KEYS else DatasetSettings
        annotation = settings.model_fields[key].annotation
        kind = "fill" if key in INPAINT_KEYS else "references" if key in REFERENCE_KEYS else "none"
        values = ["inf", "nan"] if takes(annotation, float) else []
        values += [str(10**23), str(2**63)] if takes(annotation, int) else []
        for value in values:
            given = {"resolution": "64"} | {key: value}
            where = [f"{name} = {text}\n" for name, text in given.items()]
            toml.write_text(f"[general]\n{''.join(where)}[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'img'\n")
            with subtests.test(f"{key} = {value}"), pytest.raises(UserError, match=f"{key} = .*correct the value"):
                load_dataset_config(toml, DatasetArguments(dataset_config="d"), kind)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--w 100000", "100000 x 512 pixels; at most 16384 a side"),
        ("--w 16384 --h 16384", "64 megapixels in all"),
        ("--s 100000000", "at least one step is needed, at most 1000"),
        (f"--d {2**63}", "write a number from 0"),
        ("--g inf", "guidance \\(--g\\) inf"),
        ("--l nan", "guidance scale \\(--l\\) nan"),
        ("--l 1e30", "write a finite number, at most 1000"),
        ("--w " + "9" * 5000, "takes a whole number"),
    ],
)
def test_a_prompt_has_bounds_too(options: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_prompt(f"a cat {options}", SamplePrompt(""), 16, "prompts.txt:1")
