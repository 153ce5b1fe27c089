"""Training TOMLs, command lines, dataset TOMLs, metadata files and prompt files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from library.config.load import load_config, load_for, names_language_model
from library.config.schema import DatasetArguments
from library.config.scripts import LANGUAGE_LORA, LLM, LORA, Script, fields
from library.data.config import DATASET_KEYS, SUBSET_KEYS, load_dataset_config
from library.data.file_index import FileIndex
from library.data.sources import find_sources
from library.models.registry import lora_targets
from library.training.optim.factory import check_optimizer
from library.training.sampling.prompts import read_prompts
from networks.options import parse_network_args
from tests.fuzz import harmless, share_of_cases

ODD = ["../..", "/", "~", "~nobody", "nan", "1e400", "a=b", "=", "a.b.C", "rank=[", "𝕬\u202e"]
texts = st.text(max_size=20) | st.sampled_from(["", "\0", *ODD, "\ud800", "a" * 5000])
numbers = st.integers() | st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 10**400]) | st.floats()
values = st.recursive(
    texts | numbers | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2),
)
network_args = st.tuples(
    st.sampled_from(
        ["include_patterns", "train_double_block_indices", "loraplus_lr_ratio", "factor", "in_dims", "attn_dim", "x"]
    ),
    texts
    | numbers.map(str)
    | st.sampled_from(["[1,2", "1-", "all,-99999999999", "(a+)+$", "0-99999999999", "none", "*"]),
).map("=".join)  # fmt: skip


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "images").mkdir()
        Image.new("RGB", (64, 64)).save(Path(name) / "images/a.png")
        (Path(name) / "images/a.txt").write_text("a")
        yield Path(name)


def literal(value: Any) -> str:
    """Return ``value`` as TOML, more or less: what is no TOML has to be refused too."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    return json.dumps(value) if isinstance(value, (str, bool)) else repr(value)


def tables(draw: st.DrawFn, keys: list[str], headings: list[str]) -> str:
    """Return lines of TOML: headings, known keys with any value, unknown keys, and now and then noise."""
    lines = []
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.integers(0, 9))
        if kind == 0:
            lines.append(draw(texts))
        elif kind <= 2:
            lines.append(draw(st.sampled_from(headings)))
        else:
            key = draw(st.sampled_from(keys)) if kind < 9 else json.dumps(draw(texts))
            value = draw(values if key != "network_args" else st.lists(network_args, max_size=2))
            lines.append(f"{key} = {literal(value)}")
    return "\n".join(lines)


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


@share_of_cases(0.25)
@given(data=st.data(), script=st.sampled_from([LORA, LANGUAGE_LORA, LLM]), whole=st.booleans())
def test_any_training_toml_is_taken_or_refused(folder: Path, data: st.DataObject, script: Script, whole: bool) -> None:
    @st.composite
    def text(draw: st.DrawFn) -> str:
        return tables(draw, sorted(fields(script)), ["[model]", "[network]", "[ optimizer", "[[x]]", "[a.b]"])

    required = 'pretrained_model_name_or_path = "m"\ndataset_config = "d"\n' if whole else ""
    path = write(folder / "run.toml", required + data.draw(text()))
    argv = ["--config_file", str(path)]
    harmless(names_language_model, argv)
    config = harmless(load_for, script, argv)
    if config is not None and script is LORA:
        harmless(parse_network_args, config.network, lora_targets()[config.model.model_type])
        harmless(check_optimizer, config.optimizer)


@share_of_cases(0.1)
@given(data=st.data())
def test_any_network_args_and_optimizer_are_taken_or_refused(data: st.DataObject) -> None:
    arguments = ["--pretrained_model_name_or_path", "m", "--dataset_config", "d", "--network_args"]
    arguments += data.draw(st.lists(network_args, max_size=3))
    arguments += ["--optimizer_type", data.draw(texts | st.sampled_from(["AdamW", "torch.optim.", "torch..A", "Lion"]))]
    arguments += ["--optimizer_args", *data.draw(st.lists(texts | values.map(lambda v: f"eps={v}"), max_size=2))]
    config = harmless(load_config, arguments)
    if config is not None:
        harmless(parse_network_args, config.network, lora_targets()["flux"])
        harmless(check_optimizer, config.optimizer)


@share_of_cases(0.1)
@given(
    flags=st.lists(
        st.sampled_from([f"--{key}" for key in sorted(fields(LORA))]) | texts | numbers.map(str), min_size=1, max_size=8
    )
)
def test_any_command_line_is_taken_or_refused(flags: list[str]) -> None:
    harmless(load_config, flags)


@share_of_cases(0.15)
@given(data=st.data())
def test_any_dataset_toml_is_taken_or_refused(folder: Path, data: st.DataObject) -> None:
    @st.composite
    def text(draw: st.DrawFn) -> str:
        keys = sorted(SUBSET_KEYS | DATASET_KEYS)
        start = draw(
            st.sampled_from(["", "[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = 'images'\n"])
        )
        return start + tables(draw, keys, ["[general]", "[[datasets]]", "[[datasets.subsets]]", "[datasets]"])

    path = write(folder / "d.toml", data.draw(text()))
    conditioning = data.draw(st.sampled_from(["none", "fill", "references"]))
    config = harmless(load_dataset_config, path, DatasetArguments(dataset_config="d"), conditioning)
    for dataset in config.datasets if config is not None else ():
        for subset in dataset.subsets:
            harmless(find_sources, subset, FileIndex(folder / "cache"), [], conditioning)


@share_of_cases(0.1)
@given(
    lines=st.lists(
        texts
        | st.fixed_dictionaries(
            {"image_path": texts | st.sampled_from(["a", "a.png"]) | values},
            optional={"caption": values, "tags": values, "control_path": values, "control_path_1": values},
        ).map(json.dumps)
        | values.map(json.dumps),
        max_size=4,
    ),
    suffix=st.sampled_from([".json", ".jsonl"]),
)
def test_any_metadata_file_is_taken_or_refused(folder: Path, lines: list[str], suffix: str) -> None:
    listed = write(folder / f"listed{suffix}", "\n".join(lines))
    toml = write(
        folder / "m.toml",
        f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = 'images'\nmetadata_file = '{listed.name}'\n",
    )
    config = harmless(load_dataset_config, toml, DatasetArguments(dataset_config="m"))
    found = harmless(find_sources, config.datasets[0].subsets[0], FileIndex(folder / "cache"), [])
    for source in found or ():
        assert Path(source.image.path).is_relative_to(folder / "images")


@share_of_cases(0.1)
@given(
    text=st.text(max_size=60) | values.map(json.dumps),
    suffix=st.sampled_from([".txt", ".json", ".toml"]),
    data=st.data(),
)
def test_any_prompt_file_is_taken_or_refused(folder: Path, text: str, suffix: str, data: st.DataObject) -> None:
    options = st.sampled_from("wdslgn") | st.sampled_from(["ci", "mi", "fs", ""])
    more = data.draw(st.lists(st.tuples(options, texts | numbers.map(str)), max_size=3))
    path = write(folder / f"prompts{suffix}", text + "".join(f" --{name} {value}" for name, value in more))
    harmless(read_prompts, path, 0, 16)
