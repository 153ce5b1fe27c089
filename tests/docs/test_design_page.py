"""What docs/design.md says of where things go: paths exist, layers are the import contract's, tables agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from library.config.kohya.flags import FLAGS
from library.config.run_schema import KINDS_OF_LAYOUT, SAVE_FORMATS, SavingConfig
from library.config.schema import NetworkConfig
from library.config.scripts import LORA, fields
from library.training.checkpoint.metadata import _OFF
from networks.files.layouts import LAYOUTS
from networks.files.weights import KINDS
from networks.network import _LAYERS

ROOT = Path(__file__).resolve().parents[2]


def test_the_layers_are_those_of_the_import_contract() -> None:
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    rows = re.findall(
        r"^\| (`.*?) \|", (ROOT / "docs/design.md").read_text(encoding="utf-8").split("## Data flow")[0], re.M
    )
    shown = [[Path(path).stem for path in re.findall(r"`([\w./]+)`", row)] for row in rows]
    assert shown.pop(1) == ["train_lora", "train_llm"]
    assert shown == [[name.rpartition(".")[2] for name in layer.split(" | ")] for layer in contract["layers"]]


@pytest.mark.parametrize("page", ["docs/design.md", "docs/model_families.md", "CONTRIBUTING.md"])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:library|networks|tools|dev|bench|tests|configs|docs)/[\w./]+)`", text)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_a_layout_that_can_be_written_is_an_option() -> None:
    assert set(get_args(SavingConfig.model_fields["save_format"].annotation)) == set(SAVE_FORMATS)
    assert {*SAVE_FORMATS, "lycoris"} <= LAYOUTS.keys()


def test_a_kind_of_adapter_is_an_option_has_weights_and_a_layer_and_can_be_written() -> None:
    choices = set(get_args(NetworkConfig.model_fields["network_type"].annotation))
    assert choices == _LAYERS.keys()
    assert choices == {kind for kind, weights in KINDS.items() if weights.trained}  # others are read and merged
    assert all(any(kind in kinds for kinds in KINDS_OF_LAYOUT.values()) for kind in choices)


def test_no_option_of_ours_has_a_fate_of_kohyas_beside_it() -> None:
    """A key of the schema is taken whatever kohya's table says of a flag of that name, and so is no unused fact."""
    ours = fields(LORA).keys() - {"vae", "text_encoder"}  # told apart by trainer: sd-scripts' are not musubi-tuner's
    assert [name for name in ours if name in FLAGS and FLAGS[name].fate in ("refused", "renamed")] == []
    assert _OFF.keys() & ours == set()
