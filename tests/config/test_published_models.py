"""The table of published models agrees with itself, with the families, and with the ready configurations."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from urllib.parse import urlparse

import pytest

from library.config.load import checked, read_keys
from library.config.model_types import IMAGE_MODELS, MODEL_TYPES
from library.config.published_models import (
    CARDS,
    MODEL,
    changes_for,
    find_published,
    fit,
    hub_instead,
    link,
    published_models,
)
from library.config.scripts import LORA
from library.errors import UserError
from tests.runs import ROOT

NAMES = {row.hub: row for row in published_models()}
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def test_rows_agree_with_the_families_and_with_each_other(subtests: pytest.Subtests) -> None:
    """Each family's first hub name, the options of its parts, and models that other rows name."""
    assert len(NAMES) == len(published_models()) == len({row.label for row in published_models()})
    assert {name for row in published_models() if not row.train_on for name in row.model_types} == set(IMAGE_MODELS)
    for row in published_models():
        with subtests.test(row.label):
            titles = {MODEL_TYPES[name].title for name in row.model_types}
            assert len(titles) == 1
            assert MODEL_TYPES[row.model_types[0]].conditioning != "references" or len(row.model_types) == 1
            assert set(row.parts) == set(MODEL_TYPES[row.model_types[0]].files)
            for place in row.files.values():
                assert re.fullmatch(r"[\w.-]+(/[\w.-]+)+", place)
                assert urlparse(link(place)).path.startswith(f"/{'/'.join(place.split('/')[:2])}")
            for other in filter(None, (row.train_on, row.sample_model)):
                assert NAMES[other].model_types == row.model_types
                assert NAMES[other].size == row.size
            assert not (row.train_on and NAMES[row.train_on].train_on)
            if row.sample_model and not row.train_on:
                assert NAMES[row.sample_model].train_on == row.hub


def test_a_model_is_found_by_any_of_its_names(subtests: pytest.Subtests) -> None:
    for row in published_models():
        with subtests.test(row.label):
            owner, name = row.hub.split("/")
            cache = f"/c/models--{owner}--{name}/snapshots/0ab1"
            for given in (row.hub, row.hub.lower(), name, f"mirror/{name}", cache, f"{name}/transformer"):
                assert find_published(given) is row
            if row.file.count("/") > 1:
                file = row.file.rpartition("/")[2]
                stem = file.removesuffix(".safetensors").removesuffix("_bf16")
                for given in (file, f"/models/{file}", f"{stem}_fp8_e4m3fn.safetensors", f"{stem}-Q4_K.gguf"):
                    assert find_published(given) is row
    for other in ("stabilityai/sdxl", "assets/tiny-flux", "my/FLUX.1-dev-tuned", "lora.safetensors", ""):
        assert find_published(other) is None


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_files_of_ready_configurations_are_found_in_the_table(config: Path) -> None:
    """The model's row is of the configuration's kind, and its parts have the names that the configuration gives."""
    given = tomllib.loads(config.read_text()).get("model", {})
    if not given.get(MODEL, "").startswith("models/"):
        return
    row = find_published(given[MODEL])
    assert row is not None
    assert given["model_type"] in row.model_types
    assert {key: Path(given[key]).name for key in row.parts} == {key: Path(v).name for key, v in row.parts.items()}


def test_every_model_has_a_configuration_for_a_card_that_trains_it_by_name(subtests: pytest.Subtests) -> None:
    """Of every kind it has one for some card; the changes leave a configuration that passes the rules."""
    for row in published_models():
        for model_type in row.model_types:
            found = {card: fit(model_type, row.size, card) for card in CARDS}
            assert found[max(CARDS)] is not None
            for card, chosen in found.items():
                if chosen is None:
                    continue
                with subtests.test(row.label, model_type=model_type, card=card):
                    assert chosen.needs <= card
                    given = read_keys((ROOT / chosen.config).read_text(), "new.toml")
                    changed = given.values | changes_for(row, model_type, chosen)
                    given.values = {key: value for key, value in changed.items() if value != ""}
                    if row.has_own_layers:
                        with pytest.raises(UserError, match=f"cannot be trained; train {row.train_on}"):
                            checked(given, LORA)
                        continue
                    config = checked(given, LORA)
                    assert config.model.pretrained_model_name_or_path == row.hub
                    assert config.model.model_type == model_type
                    assert not any(getattr(config.model, key) for key in row.parts)
                    used = {**config.precision.model_dump(), **config.training.model_dump()}
                    assert {key: used[key] for key in chosen.settings} == dict(chosen.settings)


def test_leaving_files_for_the_name_removes_the_parts() -> None:
    row = NAMES["black-forest-labs/FLUX.1-dev"]
    assert hub_instead(row) == {MODEL: row.hub, "ae": "", "clip_l": "", "t5xxl": ""}
