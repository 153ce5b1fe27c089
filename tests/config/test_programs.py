"""Configurations of ai-toolkit, OneTrainer and SimpleTuner: recognised by name, and translated without losing a key."""

from __future__ import annotations

import json
import math
import random
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import toml
import torch
import yaml
from diffusers import FluxTransformer2DModel
from PIL import Image
from torch.testing import assert_close

from library.config import load_config
from library.config.kohya.translation import Note
from library.config.model_types import MODEL_TYPES
from library.config.programs.translate import _meaning, _translate_keys
from library.config.schema import DatasetArguments
from library.config.scripts import LORA, fields
from library.data.buckets import Bucketing
from library.data.captions import caption_variants
from library.data.config import DATASET_KEYS, SUBSET_KEYS, load_dataset_config
from library.errors import UserError
from library.files import find_program, read_toml
from library.models.registry import lora_targets
from library.training.flow import SAMPLERS
from library.training.optim.factory import build_optimizer
from library.training.sampling.prompts import SamplePrompt, read_prompts
from networks.options import NetworkOptions, parse_network_args
from tests.runs import call, printed, refusal
from tools import check_dataset, migrate_config
from tools.migrate_config import migrate_foreign

PROGRAMS = ("ai-toolkit", "OneTrainer", "SimpleTuner")
FOLDER = Path(migrate_config.__file__).parents[1] / "library/config/programs"


def ai_toolkit(arch: dict[str, Any], images: str = "images", **more: Any) -> dict[str, Any]:
    """The keys of config/examples/train_lora_*_24gb.yaml."""
    process = {
        "type": "sd_trainer",
        "training_folder": "output",
        "device": "cuda:0",
        "trigger_word": "p3r5on",
        "network": {"type": "lora", "linear": 16, "linear_alpha": 16},
        "save": {"dtype": "float16", "save_every": 250, "max_step_saves_to_keep": 4, "push_to_hub": False},
        "datasets": [
            {"folder_path": images, "caption_ext": "txt", "caption_dropout_rate": 0.05, "shuffle_tokens": False,
             "cache_latents_to_disk": True, "resolution": [64, 96], **more}
        ],
        "train": {
            "batch_size": 1, "steps": 2000, "gradient_accumulation_steps": 1, "train_unet": True,
            "train_text_encoder": False, "gradient_checkpointing": True, "noise_scheduler": "flowmatch",
            "optimizer": "adamw8bit", "lr": 1e-4, "ema_config": {"use_ema": True, "ema_decay": 0.99}, "dtype": "bf16",
        },
        "model": {"name_or_path": "model", "quantize": True, **arch},
        "sample": {
            "sampler": "flowmatch", "sample_every": 250, "width": 1024, "height": 1024, "neg": "", "seed": 42,
            "prompts": ["[trigger], playing chess", "a man holding a sign that says, 'this is a sign'"],
            "walk_seed": True, "guidance_scale": 4, "sample_steps": 20,
        },
    }  # fmt: skip
    return {"job": "extension", "config": {"name": "mine", "process": [process]}, "meta": {"name": "[name]"}}


def one_trainer(model_type: str, **more: Any) -> dict[str, Any]:
    """The keys of training_presets/*/*LoRA*.json, with a concept of ConceptConfig.py within."""
    concept = {"name": "", "path": "images", "enabled": True, "type": "STANDARD", "balancing": 2.0,
               "include_subdirectories": False, "image": {"enable_random_flip": True}, "text": {}}  # fmt: skip
    return {
        "base_model_name": "model", "batch_size": 2, "learning_rate": 0.0003, "model_type": model_type,
        "output_model_format": "DIFFUSERS_LORA", "resolution": "64,96", "concepts": [concept],
        "transformer": {"train": True, "weight_dtype": "FLOAT_8", "offload_fraction": 0.1},
        "text_encoder": {"train": False, "weight_dtype": "FLOAT_8"}, "training_method": "LORA",
        "vae": {"weight_dtype": "FLOAT_32"}, "train_dtype": "BFLOAT_16", "timestep_distribution": "LOGIT_NORMAL",
        "layer_filter": "attn", "layer_filter_preset": "attn-mlp", "quantization": {"layer_filter": "blocks"}, **more,
    }  # fmt: skip


def simple_tuner(family: str, **more: Any) -> dict[str, Any]:
    """The keys of simpletuner/examples/*.peft-lora/config.json; half with the dashes of config.json.example."""
    return {
        "--model_family": family, "--data_backend_config": "config/multidatabackend.json", "base_model_precision":
        "int8-quanto", "checkpoint_step_interval": 10, "controlnet": False, "disable_bucket_pruning": True,
        "grad_clip_method": "value", "gradient_checkpointing": True, "hub_model_id": "x", "learning_rate": 1e-4,
        "lora_rank": 16, "lora_type": "standard", "lr_scheduler": "constant", "max_train_steps": 100,
        "mixed_precision": "bf16", "model_type": "lora", "num_train_epochs": 0, "optimizer": "adamw_bf16",
        "output_dir": "output/x", "push_to_hub": "false", "report_to": "none", "seed": 42, "use_ema": False,
        "validation_guidance": 4.0, "validation_num_inference_steps": 16, "validation_prompt": "a sign",
        "validation_resolution": "1024x768", "validation_seed": 42, "validation_steps": 50, **more,
    }  # fmt: skip


BACKENDS = [
    {"id": "one", "type": "local", "instance_data_dir": "images", "crop": False, "resolution": 64, "repeats": 1,
     "resolution_type": "pixel_area", "caption_strategy": "textfile", "cache_dir_vae": "cache"},
    {"id": "text", "dataset_type": "text_embeds", "default": True, "type": "local", "cache_dir": "cache"},
]  # fmt: skip
FAMILIES = {
    **{f"ai-toolkit {name}": (ai_toolkit({"arch": name}), kind) for name, kind in {
        "flux": "flux", "flux2": "flux2_dev", "flux2_klein_9b": "flux2_klein", "qwen_image": "qwen_image",
        "zimage:turbo": "z_image", "krea2": "krea2", "ernie_image": "ernie_image"}.items()},
    "ai-toolkit is_flux": (ai_toolkit({"is_flux": True}), "flux"),
    "ai-toolkit edit": (ai_toolkit({"arch": "qwen_image_edit_plus"}, control_path="images"), "qwen_image_edit_plus"),
    "ai-toolkit klein edit": (ai_toolkit({"arch": "flux2_klein_4b"}, control_path="images"), "flux2_klein_edit"),
    "ai-toolkit masks": (ai_toolkit({"arch": "flux_kontext"}, control_path="images"), "flux_kontext"),
    **{f"OneTrainer {name}": (one_trainer(name), kind) for name, kind in {
        "FLUX_DEV_1": "flux", "FLUX_FILL_DEV_1": "flux_fill", "FLUX_2": "flux2_klein", "QWEN": "qwen_image",
        "KREA_2": "krea2", "Z_IMAGE": "z_image", "ERNIE": "ernie_image"}.items()},
    "OneTrainer dynamic": (one_trainer("FLUX_DEV_1", dynamic_timestep_shifting=True), "flux"),
    **{f"SimpleTuner {name} {flavour}": (simple_tuner(name, model_flavour=flavour), kind) for name, flavour, kind in (
        ("flux", "dev", "flux"), ("flux", "kontext", "flux_kontext"), ("flux2", "klein-4b", "flux2_klein"),
        ("flux2", "dev", "flux2_dev"), ("qwen_image", "v1.0", "qwen_image"), ("krea2", "raw", "krea2"),
        ("qwen_image", "edit-v3", "qwen_image_edit_plus"), ("z_image", "base", "z_image"),
        ("ernie", "base", "ernie_image"), ("ernie", "turbo", "ernie_image"))},
    "SimpleTuner z_image": (simple_tuner("z_image"), "z_image"),
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with images and SimpleTuner's datasets."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    Image.new("RGB", (96, 64)).save(tmp_path / "images/a.png")
    (tmp_path / "images/a.txt").write_text("a caption")
    (tmp_path / "multidatabackend.json").write_text(json.dumps(BACKENDS))
    return tmp_path


def write(data: Any, program: str, folder: Path) -> Path:
    path = folder / ("in.yaml" if program == "ai-toolkit" else "in.json")
    text = json.dumps(data)
    path.write_text(yaml.safe_dump(json.loads(text)) if program == "ai-toolkit" else text)
    return path


def leaves(value: Any, path: str = "") -> set[str]:
    """The keys of a configuration, as a reader would write them."""
    inner = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        inner = enumerate(value)
    return (
        set().union(*(leaves(each, f"{path}{key}.".replace("--", "")) for key, each in inner)) if inner else {path[:-1]}
    )


@pytest.mark.parametrize("name", list(FAMILIES))
def test_published_configurations_are_recognised_and_pass_our_checks(here: Path, name: str) -> None:
    data, model_type = FAMILIES[name]
    program = name.split()[0]
    path = write(data, program, here)
    with pytest.raises(UserError, match=f"is a configuration of {program}; translate it: python tools/migrate"):
        load_config(["--config_file", str(path)])
    assert program in refusal(check_dataset, str(path))
    answer = printed(migrate_config, "--save_to", "my.toml", str(path))
    for key in leaves(data):
        assert key.removeprefix("config.process.0.") in {line.split()[0] for line in answer.splitlines() if line}, key
    config = load_config(["--config_file", "my.toml"])
    assert config.model.model_type == model_type
    kind = MODEL_TYPES[config.model.model_type].conditioning
    dataset = load_dataset_config(config.dataset.dataset_config, config.dataset, kind)
    assert [one.subsets[0].image_dir for one in dataset.datasets] == [here / "images"] * len(dataset.datasets)
    assert dataset.datasets[0].resolution == (64, 64)
    assert len(dataset.datasets) == (1 if program == "SimpleTuner" else 2)


def test_what_the_programs_do_by_default_is_what_happens(here: Path) -> None:
    """The defaults of toolkit/config_modules.py, TrainConfig.py and SimpleTuner's field registry."""
    bare = {"job": "extension", "config": {"name": "n", "process": [
        {"type": "sd_trainer", "training_folder": "o", "model": {"name_or_path": "m", "arch": "flux"},
         "datasets": [{"folder_path": "images"}]}]}}  # fmt: skip
    call(migrate_config, "--save_to", "a.toml", str(write(bare, "ai-toolkit", here)))
    ours = load_config(["--config_file", "a.toml"])
    assert (ours.network.network_dim, ours.network.network_alpha) == (4, 4)
    assert (ours.optimizer.learning_rate, ours.training.max_train_steps) == (1e-6, 1000)
    assert (ours.training.mixed_precision, ours.training.gradient_checkpointing) == ("no", True)
    assert ours.flow.timestep_sampling == "sigmoid"
    sets = toml.load("a_dataset.toml")["datasets"][0]
    assert (sets["resolutions"], "bucket_reso_steps" in sets, sets["bucket_no_upscale"]) == ([512], False, True)
    assert sets["subsets"][0]["caption_extension"] == ".txt"
    bare = {"training_method": "LORA", "model_type": "FLUX_DEV_1", "base_model_name": "m"}
    call(migrate_config, "--save_to", "b.toml", str(write(bare, "OneTrainer", here)))
    ours = load_config(["--config_file", "b.toml"])
    assert (ours.network.network_dim, ours.network.network_alpha) == (16, 1.0)
    assert (ours.optimizer.learning_rate, ours.optimizer.lr_warmup_steps) == (3e-6, 200)
    assert (ours.training.max_train_epochs, ours.training.mixed_precision) == (100, "fp16")
    assert (ours.flow.timestep_sampling, ours.flow.discrete_flow_shift, ours.flow.guidance_scale) == ("sigma", 1.0, 1.0)
    bare = {"model_type": "lora", "model_family": "flux", "data_backend_config": "none.json", "lora_rank": 8}
    call(migrate_config, "--save_to", "c.toml", str(write(bare, "SimpleTuner", here)))
    ours = load_config(["--config_file", "c.toml"])
    assert (ours.network.network_alpha, ours.network.network_dropout) == (8, 0.1)
    assert (ours.optimizer.learning_rate, ours.dataset.train_batch_size) == (4e-7, 4)
    assert (ours.flow.timestep_sampling, ours.flow.discrete_flow_shift) == ("shift", 3.0)
    assert ours.model.pretrained_model_name_or_path == "black-forest-labs/FLUX.1-Krea-dev"  # its default flavour


# without these the file is no training of a family
IDENTIFYING = {"job", "config", "type", "model", "arch", "name_or_path", "model_type", "base_model_name", "transformer",
               "training_method", "model_family", "pretrained_model_name_or_path",
               "pretrained_transformer_model_name_or_path"}  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_key_is_in_the_result_or_in_a_line(here: Path, program: str, seed: int) -> None:
    random.seed(seed)
    tables = read_toml(FOLDER / f"{program.lower()}.toml")[0]
    known = {part: [key.split("@")[0] for key in tables[part] if key != "without"] for part in ("training", "dataset")}
    values = [0, 1, 2.5, "1", "auto", "", None, True, False, [1, 2], {}, "x", "lokr", "FLOAT_8", [{"a": 1}], "None"]

    def some(keys: list[str]) -> dict[str, Any]:
        drawn = [*random.sample(keys, min(8, len(keys))), f"odd{random.randrange(9)}", "some.new.key"]
        tree: dict[str, Any] = {}
        for key in drawn:
            *above, last = key.replace("*", "0").split(".")
            table = tree
            for part in above:
                table = table.setdefault(part, {})
                if not isinstance(table, dict):
                    break
            else:
                table[last] = random.choice(values)
        return tree

    def put(drawn: dict[str, Any], table: dict[str, Any]) -> None:
        for key, value in drawn.items():
            if isinstance(value, dict) and isinstance(table.get(key), dict) and value:
                put(value, table[key])
            elif key not in IDENTIFYING:
                table.pop(f"--{key}", None)
                table[key] = value

    minimal = {"ai-toolkit": ai_toolkit({"arch": "flux"}), "OneTrainer": one_trainer("QWEN"),
               "SimpleTuner": simple_tuner("flux")}[program]  # fmt: skip
    table = minimal["config"]["process"][0] if program == "ai-toolkit" else minimal
    put(some(known["training"]), table)
    listed = tables["datasets"]
    table[listed] = [*table.get(listed, []), *(some(known["dataset"]) for _ in range(2))]
    path = write(minimal, program, here)
    notes = migrate_foreign(program, path.read_text(), path, here / "my.toml")
    named = {note.key for note in notes}
    for key in leaves(minimal):
        assert key.removeprefix("config.process.0.") in named, key
    for note in notes:
        assert note.text or note.outcome == "same"


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_tables_name_keys_that_are_there(program: str) -> None:
    tables = read_toml(FOLDER / f"{program.lower()}.toml")[0]
    columns = {
        "to",
        "text",
        "values",
        "but",
        "add",
        "as",
        "each",
        "option",
        "when",
        "unless",
        "off",
        "why",
        "idle",
        "per",
        "default",
        "like",
        "area",
        "times",
    }
    parts = [(key, "dataset" if key.startswith(tables["datasets"]) else "training") for key in tables["entry"]]
    assert all(key.removeprefix(f"{tables['datasets']}.*.") in tables[part] for key, part in parts)
    for part, known in (("training", fields(LORA).keys()), ("dataset", DATASET_KEYS | SUBSET_KEYS)):
        rows = {key: row for key, row in tables[part].items() if key != "without"}
        for key, row in rows.items():
            assert row.keys() <= columns, key
            assert set(row.get("to", "").split()) <= set(known), key
            for value in row.get("values", {}).values():
                assert not isinstance(value, dict) or value.keys() <= known, key
            assert all(
                other.replace(".0.", ".*.") in [*rows, *tables.get("by", {}).values()]
                for other in [*row.get("when", {}), row.get("like", key)]
            ), key
            words = [word for word in row.get("values", {}) if word != word.lower()]
            assert not words, key


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_key_that_says_how_another_is_meant_is_accepted_for_values_that_have_a_row(program: str) -> None:
    tables = read_toml(FOLDER / f"{program.lower()}.toml")[0] | {"program": program}
    for part, (key, other) in product(("training", "dataset"), tables["by"].items()):
        known = [row.partition("@")[2] for row in tables[part] if row.startswith(f"{key}@")]
        for value in ["odd7", "AUTOMAGIC", *known]:
            notes: list[Note] = []
            _translate_keys(tables, part, {other: value}, notes)
            outcome = next(note.outcome for note in notes if note.key == other)
            assert outcome != "accepted" if value not in known else outcome != "refused", (other, value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("job: [\nprocess:\n  training_folder: x", "in.yaml: cannot be read"),
        ("a: &a [1]\ntraining_folder: *a", "in.yaml: cannot be read (refers to parts of itself"),
        (
            "training_folder: x\nmodel: {arch: flux, name_or_path: 3}",
            "in.yaml: names no model; model.name_or_path: not",
        ),
        ("training_folder: x\nmodel: {arch: wan21}", "in.yaml: names no model family of this version; model.arch: not"),
        ("training_folder: " + "[" * 3000, "in.yaml: cannot be read"),
        ("folder_path: 2026-13-45", "in.yaml: cannot be read"),
        ("training_folder: x\nsave: {a: 1}\nsave: {b: 2}", "in.yaml: cannot be read ('save' stands there twice"),
        ('{"model_family": "x", "seed": 8, "seed": 4}', "in.yaml: not valid JSON ('seed' stands there twice"),
        ('{"model_family": "x", "--seed": 8, "seed": 4}', "in.yaml: 'seed' stands there twice"),
        ("training_folder: x\nconfig.process.0.device: a\ndevice: b", "in.yaml: 'device' stands there twice"),
    ],
)
def test_files_that_mean_nothing_are_refused_in_a_line(here: Path, text: str, said: str) -> None:
    (here / "in.yaml").write_text(text)
    assert said in refusal(migrate_config, "--save_to", "my.toml", "in.yaml")
    assert not (here / "my.toml").exists()


def test_a_file_of_datasets_alone_becomes_a_dataset_toml(here: Path) -> None:
    answer = printed(migrate_config, "--save_to", "data.toml", "multidatabackend.json")
    assert leaves({"data_backends": BACKENDS}) <= {line.split()[0] for line in answer.splitlines() if line}
    (table,) = toml.load("data.toml")["datasets"]
    assert table["subsets"] == [
        {"image_dir": "images", "caption_extension": ".txt", "enable_wildcard": True, "num_repeats": 2}
    ]
    assert (table["resolution"], table["enable_bucket"]) == (64, True)


def test_of_two_keys_with_one_meaning_the_other_is_said(here: Path) -> None:
    data = ai_toolkit({"arch": "flux"})
    process = data["config"]["process"][0]
    process["network"]["rank"], process["train"]["unet_lr"] = 8, 1e-3
    process["sample"]["samples"] = [{"prompt": "another", "width": 64}]
    path = write(data, "ai-toolkit", here)
    notes = {note.key: note for note in migrate_foreign("ai-toolkit", path.read_text(), path, here / "my.toml")}
    assert notes["network.linear"].text == "network.rank is set too and counts"
    assert notes["train.lr"].text == "train.unet_lr is set too and counts"
    assert notes["sample.prompts"].outcome == "left out"
    config = load_config(["--config_file", "my.toml"])
    assert (config.network.network_dim, config.optimizer.learning_rate) == (8, 1e-3)
    assert config.sampling.sample_prompts == ["another --w 64 --h 1024 --d 42 --g 4 --s 20"]


def notes_of(data: Any, program: str, folder: Path) -> dict[str, Any]:
    path = write(data, program, folder)
    return {note.key: note for note in migrate_foreign(program, path.read_text(), path, folder / "my.toml", True)}


# an entry, and of each key that decides what it is the values with which its images are trained on as usual
DECIDING: dict[str, tuple[dict[str, str], dict[str, list[Any]]]] = {
    "OneTrainer": ({"path": "images"}, {"enabled": [True], "type": ["STANDARD"], "validation_concept": [False]}),
    "SimpleTuner": ({"instance_data_dir": "images"}, {"type": ["local"], "dataset_type": ["image"], "disabled": [False],
        "disable": [False], "is_regularisation_data": [False]}),
    "ai-toolkit": ({"folder_path": "images"}, {"type": ["image", "sd"], "is_reg": [False], "prior_reg": [False]}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("program", "key"), [(program, key) for program, (_, keys) in DECIDING.items() for key in keys]
)
def test_images_that_are_not_trained_on_there_are_not_trained_on_here(here: Path, program: str, key: str) -> None:
    entry, usual = DECIDING[program]
    whole = {"OneTrainer": one_trainer("QWEN"), "SimpleTuner": simple_tuner("flux"), "ai-toolkit": ai_toolkit({})}
    for value in [True, False, "VALIDATION", "PRIOR_PREDICTION", "video", "text_embeds", "aws", 7, *usual[key]]:
        data: Any = [entry | {key: value}, entry]
        if program == "ai-toolkit":
            data = ai_toolkit({"arch": "flux"})
            data["config"]["process"][0]["datasets"] = [entry | {key: value}, entry]
        elif program == "OneTrainer":
            data = whole[program] | {"concepts": data}
        else:
            data = whole[program] | {"data_backends": data}
        notes = notes_of(data, program, here)
        tables = toml.load("my_dataset.toml")["datasets"]
        subsets = [table["subsets"][0] for table in tables]
        trained = [one for one in subsets if not one.get("is_reg") and one.get("validation_split") != 1.0]
        assert len(trained) == (2 if value in usual[key] and type(value) is type(usual[key][0]) else 1), value
        where = {"OneTrainer": "concepts", "SimpleTuner": "data_backends", "ai-toolkit": "datasets"}[program]
        assert (len(tables) == 1) == (notes[f"{where}.0.{key}"].outcome == "refused")
        assert "model_type" in toml.load("my.toml")["model"]  # a key of that name outside is another


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_switch_that_is_on_there_is_not_turned_off_in_silence(here: Path, program: str) -> None:
    tables = read_toml(FOLDER / f"{program.lower()}.toml")[0]
    rows = {key: row for key, row in tables["training"].items() if key != "without"}
    rows |= {key: group for group in tables["training"]["without"] for key in group["keys"].split()}
    on = [key for key, row in rows.items() if row.get("off") in ([True], [1.0]) and "when" not in row]
    assert len(on) > 4
    for key in on:
        value = rows[key]["off"][0]
        assert _meaning(rows[key], type(value)(0), {})[0] == "refused", key
        assert _meaning(rows[key], value, {})[0] == "accepted", key
        assert _meaning(rows[key], int(value) if value is not True else "True", {})[0] == "accepted", key


def test_of_captions_those_lines_are_trained_on_that_the_program_takes(here: Path) -> None:
    """dataloader_mixins.py of ai-toolkit, SelectRandomText.py of mgds, multiaspect/sampler.py of SimpleTuner."""
    lines = {}
    for name, data in {
        "ai-toolkit": ai_toolkit({"arch": "flux"}), "OneTrainer": one_trainer("QWEN"), "SimpleTuner": BACKENDS,
        "SimpleTuner split": [BACKENDS[0] | {"disable_multiline_split": True}],
    }.items():  # fmt: skip
        call(migrate_config, "--overwrite", "--save_to", "my.toml", str(write(data, name.split()[0], here)))
        file = "my.toml" if isinstance(data, list) else "my_dataset.toml"
        config = DatasetArguments(dataset_config=str(here / file), dataset_args=["resolution=64"])
        subset = load_dataset_config(here / file, config).datasets[0].subsets[0]
        lines[name] = set(caption_variants("one\ntwo", subset.settings, 40))
    both, drawn = {"one\ntwo"}, {"one", "two"}
    assert lines == {"ai-toolkit": both, "OneTrainer": drawn, "SimpleTuner": drawn, "SimpleTuner split": both}


def test_prompts_keep_their_own_options_under_our_names(here: Path) -> None:
    data = ai_toolkit({"arch": "qwen_image_edit"})
    own = "make it blue --ctrl_img images/a.png --w 512 --cfg 3 --seed 7 --steps 9 --n dull"
    data["config"]["process"][0]["sample"] = {"width": 1024, "guidance_scale": 4, "prompts": [own, "as it is --p2 x"]}
    notes = notes_of(data, "ai-toolkit", here)
    first, second = load_config(["--config_file", "my.toml"]).sampling.sample_prompts
    asked = read_prompts([first], 0, 16)[0]
    assert (asked.width, asked.cfg, asked.seed, asked.steps, asked.negative) == (512, 3.0, 7, 9, "dull")
    assert (asked.height, asked.guidance, asked.control_images) == (512, SamplePrompt("").guidance, ("images/a.png",))
    assert "--l 4" in second
    assert notes["sample_prompts, prompt 2"].text.startswith("a run would stop: unknown option --p2")
    sizes = simple_tuner("flux", validation_resolution="1024x768, 512")
    notes_of(sizes, "SimpleTuner", here)
    read = read_prompts(load_config(["--config_file", "my.toml"]).sampling.sample_prompts, 0, 16)
    assert [(one.width, one.height) for one in read] == [(1024, 768), (512, 512)]
    samples = [{"prompt": "off", "enabled": False, "width": 64}, {"prompt": "on", "enabled": True, "width": 128}]
    notes = notes_of(one_trainer("FLUX_DEV_1", samples=samples), "OneTrainer", here)
    assert load_config(["--config_file", "my.toml"]).sampling.sample_prompts == ["on --w 128"]
    assert {notes[f"samples.0.{key}"].outcome for key in samples[0]} == {"refused"}


@pytest.mark.parametrize(
    ("given", "side"),
    [
        ({"resolution": 1.0, "resolution_type": "area"}, 1024),
        ({"resolution": 0.5, "resolution_type": "area"}, 704),
        ({"resolution": "0.25", "resolution_type": "area"}, 512),
        ({"resolution": 768, "resolution_type": "pixel_area"}, 768),
        ({"resolution": 768, "resolution_type": "pixel"}, 768),
        ({}, 512),  # the training's own: megapixels too
    ],
)
def test_an_area_in_megapixels_becomes_the_side_of_its_square(here: Path, given: dict[str, Any], side: int) -> None:
    """multiaspect/image.py: int(sqrt(megapixels * 1e6)), to the nearest multiple of 64."""
    entry = {"instance_data_dir": "images", "caption_strategy": "textfile"} | given
    data = simple_tuner("flux", resolution=0.25, resolution_type="area", data_backends=[entry])
    notes = notes_of(data, "SimpleTuner", here)
    assert toml.load("my_dataset.toml")["datasets"][0]["resolution"] == side
    assert "resolution=512" in load_config(["--config_file", "my.toml"]).dataset.dataset_args
    assert ("shorter side" in notes.get("data_backends.0.resolution", notes["resolution"]).text) == (
        "pixel" in given.values()
    )


def test_what_a_run_refuses_is_said_and_the_rest_is_written(here: Path) -> None:
    concept = {"path": "images", "balancing": 2.5, "text": {"prompt_source": "filename"}}
    data = one_trainer("QWEN", optimizer={"optimizer": "PRODIGY"}, learning_rate=3e-4, concepts=[concept])
    notes = notes_of(data, "OneTrainer", here)
    assert any(note.text.startswith("a run would stop: ") and "Prodigy" in note.text for note in notes.values())
    assert toml.load("my.toml")["optimizer"]["learning_rate"] == 3e-4
    assert notes["concepts.0.balancing"].text == "not taken: num_repeats = 2.5 does not fit; it is 1"
    assert "concepts.0.num_repeats" not in notes
    assert "set class_tokens" in notes["concepts.0.text.prompt_source"].text
    assert "concepts.0.balancing: num_repeats = 2.5 does not fit" in (here / "my_dataset.toml").read_text()


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("model", ["FLUX_DEV_1", "FLUX_FILL_DEV_1", "QWEN", "Z_IMAGE"])
def test_masks_of_onetrainer_are_taken_from_beside_the_images(here: Path, model: str, masked: bool) -> None:
    notes = notes_of(one_trainer(model, masked_training=masked), "OneTrainer", here)
    (subset,) = toml.load("my_dataset.toml")["datasets"][0]["subsets"]
    assert toml.load("my.toml")["flow"]["masked_loss"] is masked
    assert (subset.get("conditioning_data_dir") == subset["image_dir"]) is masked
    assert (subset.get("inpaint_mask_directory") == subset["image_dir"]) is (model == "FLUX_FILL_DEV_1")
    assert not any(note.outcome == "refused" for key, note in notes.items() if "model_type" in key or "mask" in key)


@pytest.mark.parametrize("given", [{}, {"alpha": 4}, {"linear": 8}, {"linear": 16, "linear_alpha": 4}, {"rank": 6}])
@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_rank_and_alpha_are_what_ai_toolkit_trains_with(here: Path, kind: str, given: dict[str, int]) -> None:
    """toolkit/lora_special.py: alpha is the rank for transformers; config_modules.py: LoKr is full unless told not to.

    models/lokr.py: its large matrix is one where the rank is half of its longer side or more.
    """
    data = ai_toolkit({"arch": "flux"})
    rank = given.get("rank", given.get("linear", 4))
    for full in (None, True, False):
        network = {"type": kind, **given} | ({} if full is None else {"lokr_full_rank": full})
        data["config"]["process"][0]["network"] = network
        notes = notes_of(data, "ai-toolkit", here)
        ours = load_config(["--config_file", "my.toml"]).network
        assert ours.network_type == kind
        assert ours.network_dim == ours.network_alpha
        is_full = kind == "lokr" and full is not False
        assert is_full or ours.network_dim == rank
        assert ours.network_args == ["full_matrix=True"] * is_full
        assert {f"network.{key}" for key in network} <= notes.keys()
        assert all(
            "alpha" in note.text for key, note in notes.items() if key in ("network.alpha", "network.linear_alpha")
        )


LOKR_JSON = {
    "algo": "lokr",
    "multiplier": 1.0,
    "full_matrix": True,
    "linear_alpha": 1,
    "factor": 16,
    "apply_preset": {
        "target_module": ["Attention", "FeedForward"],
        "module_algo_map": {"Attention": {"factor": 16}, "FeedForward": {"factor": 8}},
    },
}  # config/lycoris_config.json.example


@pytest.mark.parametrize("full", [True, False])
def test_a_lokr_of_each_program_is_trained_as_there(here: Path, full: bool) -> None:
    """Rank, alpha and factors of modules/module/LoRAModule.py, LyCORIS's wrapper.py, toolkit/config_modules.py."""

    def ours(model_type: str = "flux") -> NetworkOptions:
        return parse_network_args(load_config(["--config_file", "my.toml"]).network, lora_targets()[model_type])

    given = {
        "peft_type": "LOKR",
        "lokr_dim": 6,
        "lora_alpha": 3.0,
        "lokr_decompose_factor": 8,
        "lokr_full_matrix": full,
    }
    given |= {"lokr_decompose_both": True, "lokr_use_tucker": False, "dropout_probability": 0.1, "lora_rank": 9}
    given |= {"lora_decompose": True, "lokr_weight_decompose": True}  # the first is of LoRAs alone
    notes = notes_of(one_trainer("FLUX_DEV_1", **given), "OneTrainer", here)
    assert (ours().kind, ours().factor, ours().full_matrix) == ("lokr", 8, full)
    assert full or (ours().dim, ours().alpha, ours().decompose_both) == (6, 3.0, True)
    refused = {key for key, note in notes.items() if note.outcome == "refused" and key in given}
    assert refused == {"dropout_probability", "lokr_weight_decompose"} | ({"lokr_decompose_both"} if full else set())
    assert notes["lora_alpha"].outcome == ("left out" if full else "renamed")
    assert "from lokr_decompose_factor, lokr_full_matrix" in Path("my.toml").read_text() or not full

    (here / "lycoris_config.json").write_text(json.dumps(LOKR_JSON | {"full_matrix": full, "linear_dim": 12}))
    config = simple_tuner("flux", lora_type="lycoris", lycoris_config="config/lycoris_config.json", lora_rank=9)
    config |= {"--use_dora": True}  # of lora_type standard alone
    with torch.device("meta"):
        parts = dict(FluxTransformer2DModel(num_layers=1, num_single_layers=1).named_modules())
    layers = [name for name, part in parts.items() if isinstance(part, torch.nn.Linear)]
    targeted = [name for name, part in parts.items() if type(part).__name__ in ("FluxAttention", "FeedForward")]
    inside = {layer for layer in layers if any(layer.startswith(f"{name}.") for name in targeted)}
    for family, model_type in (("flux", "flux"), ("qwen_image", "qwen_image"), ("z_image", "z_image")):
        notes = notes_of(config | {"--model_family": family}, "SimpleTuner", here)
        found = ours(model_type)
        assert (found.kind, found.factor, found.full_matrix) == ("lokr", 16, full)
        mlps = ("mlp",) if family == "z_image" else ("img_mlp", "txt_mlp")
        others = ("attn",) if family == "z_image" else ("img_attn", "txt_attn", *["single"] * (family == "flux"))
        assert found.factors == dict.fromkeys(others, 16) | dict.fromkeys(mlps, 8)
        assert full or (found.dim, found.alpha) == (12, 1.0)
        if family == "flux":
            trained = found.trained_layers(lora_targets()["flux"], ["transformer"])
            assert {name.replace(".{i}.", ".0.") for name in trained} == inside
        assert toml.load("my.toml")["saving"]["save_format"] == "comfy"  # what it would be without is not read there
        assert (notes["lycoris.apply_preset.target_module"].outcome == "refused") == (family == "z_image")
    notes = notes_of(config | {"lycoris_config": "gone.json"}, "SimpleTuner", here)
    assert notes["lycoris_config"].outcome == "refused"


@pytest.mark.parametrize(("key", "each"), product(("gradient_accumulation", "gradient_accumulation_steps"), (1, 3, 4)))
def test_steps_of_ai_toolkit_are_as_many_updates_as_there(here: Path, key: str, each: int) -> None:
    """BaseSDTrainProcess.py: a step is one backward pass with gradient_accumulation_steps, else one update."""
    data = ai_toolkit({"arch": "flux"})
    train = {"steps": 3000, key: each, "lr_scheduler": "constant_with_warmup"}
    data["config"]["process"][0] |= {
        "train": train,
        "save": {"save_every": 250, "max_step_saves_to_keep": 7},
        "sample": {"prompts": ["x"]},
    }
    notes_of(data, "ai-toolkit", here)
    ours = load_config(["--config_file", "my.toml"])
    updates, waiting = 0, 1
    for _ in range(3000):  # its loop
        if waiting >= (each if key.endswith("steps") else 1):
            updates, waiting = updates + 1, 0
        waiting += 1
    assert (ours.training.max_train_steps, ours.training.gradient_accumulation_steps) == (updates, each)
    share = updates / 3000
    assert ours.saving.save_every_n_steps == int(250 * share)
    every, last = ours.saving.save_every_n_steps, ours.saving.save_last_n_steps
    assert sum(step >= every * 20 - last for step in range(every, every * 20 + 1, every)) == 7
    assert ours.sampling.sample_every_n_steps == int(100 * share)  # unset there
    assert ours.optimizer.lr_warmup_steps == int(1000 * share)


@pytest.mark.parametrize(("arch", "steps"), [("flux", 32), ("zimage", 16), ("qwen_image", 32)])
def test_sizes_are_near_those_of_ai_toolkit(here: Path, arch: str, steps: int) -> None:
    """toolkit/buckets.py with get_bucket_divisibility of the model, which data_loader.py puts over bucket_tolerance."""

    def there(width: int, height: int, area: int) -> tuple[int, int]:
        scale = math.sqrt(min(1, area / (width * height))) / steps
        rounded = [[rounding(side * scale) * steps for rounding in (math.floor, math.ceil)] for side in (width, height)]
        fitting = [pair for pair in product(*rounded) if 0 < pair[0] * pair[1] <= area]
        return min(fitting, key=lambda pair: abs(pair[0] * pair[1] - min(area, width * height)))

    notes = notes_of(ai_toolkit({"arch": arch}, resolution=[512], bucket_tolerance=64), "ai-toolkit", here)
    config = load_config(["--config_file", "my.toml"])
    (dataset,) = load_dataset_config(config.dataset.dataset_config, config.dataset, "none").datasets
    draw = random.Random(0)
    sizes = [(draw.randint(200, 2000), draw.randint(200, 2000)) for _ in range(500)]
    buckets = Bucketing(dataset, 16, [(size, 1) for size in sizes])
    off = [
        abs(math.log(ours / theirs))
        for size in sizes
        for ours, theirs in zip(buckets.fit(size, False, "").bucket, there(*size, 512**2), strict=True)
    ]
    assert sum(off) / len(off) < steps / 512 / 2  # half a step; sd-scripts' rule in steps of 64 is further away
    assert "the model's own steps" in notes["datasets.0.bucket_tolerance"].text
    assert "sizes differ" in notes["datasets.0.enable_bucket"].text


@pytest.mark.parametrize("optimizer", ["automagic", "adamw_8bit", "dadaptation", "prodigy8bit"])
def test_a_rate_goes_over_with_its_optimizer_alone(here: Path, optimizer: str) -> None:
    """optimizer.py: of Prodigy and D-Adaptation a rate below 0.1 is 1.0, of Automagic where it begins."""
    data = ai_toolkit({"arch": "flux"})
    data["config"]["process"][0]["train"] |= {"optimizer": optimizer, "lr": 1e-4}
    notes = notes_of(data, "ai-toolkit", here)
    assert notes["train.lr"].outcome == "refused"
    assert (notes["train.optimizer"].outcome == "refused") == (optimizer != "prodigy8bit")
    assert "learning_rate" not in toml.load("my.toml")["optimizer"]


@pytest.mark.parametrize("kind", ["shift", "flux_shift", "lumina2_shift"])
def test_ai_toolkits_shifts_are_drawn_as_there_or_the_nearest_is_said(here: Path, kind: str) -> None:
    """custom_flowmatch_sampler.py: even draws, shifted by z_image.py's 3, or by the size; steps count from noise."""
    data = ai_toolkit({"arch": "zimage:turbo"})
    data["config"]["process"][0]["train"] |= {"timestep_type": kind, "max_denoising_steps": 500}
    notes = notes_of(data, "ai-toolkit", here)
    flow = load_config(["--config_file", "my.toml"]).flow
    uniform = torch.linspace(0.01, 0.99, 99)
    sigmas = SAMPLERS[flow.timestep_sampling](flow, torch.zeros(99), uniform, 4096)
    assert_close(sigmas.sort().values, 3 * uniform / (1 + 2 * uniform), rtol=0, atol=1e-6)
    assert "min_timestep" in notes["train.max_denoising_steps"].text
    data["config"]["process"][0]["model"]["arch"] = "flux"
    note = notes_of(data, "ai-toolkit", here)["train.timestep_type"]
    assert (note.outcome, "discrete_flow_shift (3.16" in note.text) == ("refused", math.exp(1.15) < 3.165)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_value_that_does_not_fit_is_not_taken_and_the_rest_is(here: Path, program: str) -> None:
    tables = read_toml(FOLDER / f"{program.lower()}.toml")[0] | {"program": program}
    rows = {key: row for key, row in tables["training"].items() if key != "without" and set(row) <= {"to", "default"}}
    odd: dict[str, Any] = {}
    for key, value in product(rows, (0, -1, 1.5, "odd")):
        notes: list[Note] = []
        values = _translate_keys(tables, "training", {key: value}, notes)
        (note,) = (note for note in notes if note.key == key and note.outcome != "default")
        to = rows[key]["to"].split()[0]
        if note.outcome == "refused":
            odd |= {key: value} if "name" not in key else {}
            assert f"{to}: {value!r} does not fit" in note.text
        else:
            assert note.outcome == "left out" or to in values
    assert len(odd) > 8
    data = {"ai-toolkit": ai_toolkit({"arch": "flux"}), "OneTrainer": one_trainer("FLUX_DEV_1"),
            "SimpleTuner": simple_tuner("flux")}[program]  # fmt: skip
    for key, value in odd.items():
        table = data["config"]["process"][0] if program == "ai-toolkit" else data
        *above, last = key.split(".")
        for part in above:
            table = table.setdefault(part, {})
        table[last] = value
    notes = notes_of(data, program, here)
    assert {key for key in odd if notes[key].outcome == "refused"} == odd.keys()
    assert toml.load("my.toml")["model"]["pretrained_model_name_or_path"]


# of the default_settings of simpletuner/helpers/training/optimizer_param.py, and of create_optimizer in OneTrainer's
# modules/util/create.py with TrainOptimizerConfig's values: what optimizers are called there -> what they train with
CONSTANTS: dict[str, dict[str, dict[str, Any]]] = {
    "SimpleTuner": {
        "adamw_bf16": {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 1e-2},
        "torch-adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
        "bnb-adamw8bit": {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 1e-2},
        "optimi-lion": {"betas": (0.9, 0.99), "weight_decay": 0.0},
        "optimi-adamw": {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0},
        "prodigy": {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "use_stableadamw": True, "factored": True,
                    "split_groups": True, "split_groups_mean": True, "d_coef": 1, "prodigy_steps": 0},
        "torch-adafactor": {"beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "weight_decay": 0.0},
        "soap": {"betas": (0.95, 0.95), "weight_decay": 0.01, "max_precondition_dim": 10000},
    },
    "OneTrainer": {
        "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False},
        "adamw_8bit": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
        "adafactor": {"eps": (1e-30, 1e-3), "clip_threshold": 1.0, "decay_rate": -0.8, "beta1": None,
                      "weight_decay": 0.0, "scale_parameter": False, "relative_step": False, "warmup_init": False},
        "came": {"eps1": 1e-30, "eps2": 1e-16, "betas": (0.9, 0.999, 0.9999), "weight_decay": 0.0},
        "lion": {"betas": (0.9, 0.99), "weight_decay": 0.0},
        "prodigy": {"betas": (0.9, 0.999), "beta3": None, "eps": 1e-8, "weight_decay": 0, "decouple": False,
                    "d_coef": 1.0, "use_bias_correction": False, "safeguard_warmup": False, "d0": 1e-6, "slice_p": 1},
        "prodigy_plus_schedule_free": {"betas": (0.9, 0.99), "eps": None, "weight_decay": 0.0,
                                       "split_groups_mean": True, "factored": True, "d_limiter": True},
        "schedule_free_adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "warmup_steps": 200, "r": 0},
        "dadapt_adam": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "decouple": False},
    },
}  # fmt: skip


@pytest.mark.parametrize("program", CONSTANTS)
def test_optimizers_train_with_the_constants_that_they_have_there(here: Path, program: str) -> None:
    row = read_toml(FOLDER / f"{program.lower()}.toml")[0]["training"]
    key = "optimizer" if program == "SimpleTuner" else "optimizer.optimizer"
    assert set(row[key]["values"]) == CONSTANTS[program].keys()
    for name, wanted in CONSTANTS[program].items():
        data = (
            simple_tuner("flux", optimizer=name, learning_rate=1.0)
            if program == "SimpleTuner"
            else one_trainer("QWEN", optimizer={"optimizer": name.upper()}, learning_rate=1.0)
        )
        notes_of(data, program, here)
        config = load_config(["--config_file", "my.toml"]).optimizer
        groups = [{"params": [torch.nn.Parameter(torch.zeros(4, 4))]} for _ in range(2)]
        optimizer = build_optimizer(config, groups, full_bf16=False)
        has = {what: optimizer.param_groups[0].get(what, "missing") for what in wanted}
        assert has == wanted, name


# a file's keys, and what it draws there from uniform and normal draws (models/common.py, ModelSetupNoiseMixin.py)
SHIFTED = {
    "SimpleTuner": [
        ({"flow_use_uniform_schedule": True, "flow_schedule_shift": 3}, lambda u, z: 3 * u / (1 + 2 * u)),
        ({"flow_use_uniform_schedule": True}, lambda u, z: 3 * u / (1 + 2 * u)),
        ({"flow_use_uniform_schedule": True, "flow_schedule_shift": 0}, lambda u, z: u),
        ({"flow_schedule_auto_shift": True}, lambda u, z: 3 * z / (1 + 2 * z)),  # the static shift goes before
        ({"flow_schedule_shift": 0.0}, lambda u, z: z),
        ({"flow_schedule_shift": 0, "flow_schedule_auto_shift": True}, lambda u, z: z * E / (1 + (E - 1) * z)),
    ],
    "OneTrainer": [
        ({"timestep_distribution": "UNIFORM", "timestep_shift": 3.0}, lambda u, z: 3 * u / (1 + 2 * u)),
        ({"timestep_distribution": "UNIFORM"}, lambda u, z: u),
        ({"timestep_distribution": "LOGIT_NORMAL", "timestep_shift": 3.0}, lambda u, z: 3 * z / (1 + 2 * z)),
        ({"dynamic_timestep_shifting": True}, lambda u, z: z * E / (1 + (E - 1) * z)),
    ],
}
E = math.exp(1.15)  # FLUX.1 dev's shift at 1024 x 1024


@pytest.mark.parametrize("program", SHIFTED)
def test_noise_levels_are_drawn_as_there(here: Path, program: str) -> None:
    uniform, normal = torch.linspace(0.01, 0.99, 99), torch.linspace(-3, 3, 99)
    for keys, wanted in SHIFTED[program]:
        data = (
            simple_tuner("flux", model_flavour="dev", **keys)
            if program == "SimpleTuner"
            else one_trainer("FLUX_DEV_1", **keys)
        )
        notes_of(data, program, here)
        flow = load_config(["--config_file", "my.toml"]).flow
        sigmas = SAMPLERS[flow.timestep_sampling.replace("auto", "flux_shift")](flow, normal, uniform, 4096)
        assert_close(sigmas.sort().values, wanted(uniform, normal.sigmoid()), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "flavour", "keys", "adapter"),
    [
        ("z_image", "turbo", {}, ["ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter_v1.safetensors"]),
        (
            "z_image",
            "turbo-ostris-v2",
            {},
            ["ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter_v2.safetensors"],
        ),
        ("z_image", None, {}, ["ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter_v2.safetensors"]),
        ("z_image", None, {"assistant_lora_path": "a.safetensors"}, ["a.safetensors"]),
        ("z_image", "turbo", {"disable_assistant_lora": True}, []),
        ("z_image", "base", {}, []),
        ("z_image", "ostris-de-turbo", {}, []),
        ("flux", "schnell", {}, ["ostris/FLUX.1-schnell-training-adapter"]),
        ("flux", "dev", {}, []),
    ],
)
def test_distilled_models_train_with_the_adapter_that_they_have_there(
    here: Path, family: str, flavour: str | None, keys: dict[str, Any], adapter: list[str]
) -> None:
    """ASSISTANT_LORA_FLAVOURS of z_image/model.py and flux/model.py."""
    notes = notes_of(simple_tuner(family, **{"model_flavour": flavour} if flavour else {}, **keys), "SimpleTuner", here)
    config = load_config(["--config_file", "my.toml"])
    assert config.network.base_weights == adapter
    assert ("training" in notes["model_family"].text) == (flavour not in ("base", "ostris-de-turbo", "dev"))
    assert "De-Turbo" in config.model.pretrained_model_name_or_path or flavour != "ostris-de-turbo"


def test_a_run_is_as_long_as_there(here: Path) -> None:
    """SimpleTuner's trainer.py: max_train_steps counts unless it is 0 or unset; epochs are 1 where they are unset."""
    for steps, epochs, wanted in (
        (0, 10, (None, 10)),
        (None, None, (None, 1)),
        (10, 10, (10, None)),
        (10, 0, (10, None)),
    ):
        data = simple_tuner("flux") | {"max_train_steps": steps, "num_train_epochs": epochs}
        notes_of({key: value for key, value in data.items() if value is not None}, "SimpleTuner", here)
        given = load_config(["--config_file", "my.toml"]).training.model_dump(exclude_unset=True)
        assert (given.get("max_train_steps"), given.get("max_train_epochs")) == wanted


@pytest.mark.parametrize("suffix", ["toml", "env", "sh", "quoted.env"])
def test_simpletuner_is_translated_from_each_of_its_forms(here: Path, suffix: str) -> None:
    """config.json, config.toml and config.env mean the same; env_file.py has the variables' names."""
    data = {key.removeprefix("--"): value for key, value in simple_tuner("flux", model_flavour="dev").items()}
    call(migrate_config, "--save_to", "json.toml", str(write(data, "SimpleTuner", here)))
    renamed = {"max_train_steps": "MAX_NUM_STEPS", "lr_scheduler": "LR_SCHEDULE", "seed": "TRAINING_SEED",
               "num_train_epochs": "NUM_EPOCHS", "data_backend_config": "DATALOADER_CONFIG"}  # fmt: skip
    extra = {"validation_steps": 50, "model_flavour": "dev"}
    lines = [f'export {renamed.get(key, key.upper())}="{value}"' for key, value in data.items() if key not in extra]
    arguments = ["export TRAINER_EXTRA_ARGS='--validation_steps=50'", "TRAINER_EXTRA_ARGS+=' --model_flavour dev'"]
    path = here / f"config.{suffix}"
    path.write_text(toml.dumps(data) if suffix == "toml" else "\n".join(["#!/bin/bash", *lines, *arguments]))
    if suffix == "quoted.env":  # which is TOML too
        path.write_text(
            "\n".join(lines).replace("export ", "") + "\nTRAINER_EXTRA_ARGS='--validation_steps=50 --model_flavour dev'"
        )
    with pytest.raises(UserError, match="is a configuration of SimpleTuner; translate it: python tools/migrate"):
        load_config(["--config_file", str(path)])
    answer = printed(migrate_config, "--save_to", "my.toml", str(path))
    assert toml.load("my.toml") == toml.load("json.toml") | {"dataset": toml.load("my.toml")["dataset"]}
    named = {line.split()[0] for line in answer.splitlines() if line}
    for key in data:
        assert (key if suffix == "toml" or key in extra else renamed.get(key, key.upper())) in named, key


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.yaml",
            "job: generate\nconfig:\n  process:\n  - type: to_folder\n",
            "is of ai-toolkit, but trains nothing here; ",
        ),
        (
            "a.yml",
            "---\njob: mod # x\nconfig: {process: [{type: rescale_lora}]}\n",
            "is of ai-toolkit, but trains nothing",
        ),
        (
            "a.json",
            '{"algo": "lokr", "linear_dim": 16}',
            "is no TOML, and no configuration to train with of ai-toolkit",
        ),
        ("a.env", "export TRAINING_NUM_PROCESSES=1", "names no model family"),
        ("a.env", "export TRAINING_NUM_PROCESSES='1", "a.env: cannot be read (No closing quotation)"),
        ("a.env", "MODEL_FAMILY=flux\nMODEL_FAMILY=flux2", "a.env: cannot be read ('MODEL_FAMILY' is set twice"),
    ],
)
def test_other_files_of_the_programs_are_named_in_one_line(here: Path, name: str, text: str, said: str) -> None:
    (here / name).write_text(text)
    answer = refusal(migrate_config, "--save_to", "my.toml", name)
    assert said in answer
    assert "not valid TOML" not in answer


def test_what_a_shell_file_holds_beside_variables_gets_a_line(here: Path) -> None:
    lines = ["BASE=/data", "export MODEL_FAMILY=flux", "OUTPUT_DIR=${BASE}/out", "source other.sh", "ODD=1"]
    (here / "c.env").write_text("\n".join(lines))
    answer = printed(migrate_config, "--save_to", "my.toml", "c.env")
    assert load_config(["--config_file", "my.toml"]).saving.output_dir == "/data/out"
    assert {line.split("  ")[0] for line in answer.splitlines() if "no counterpart" in line} == {
        "BASE",
        "line 4",
        "ODD",
    }


@pytest.mark.parametrize(("steps", "share"), [(200, 1), (201, 4), (7, 2), (2, 4), (0.25, 4), (1.0, 4), (0, 4)])
def test_steps_count_updates_of_as_many_batches(here: Path, steps: float, share: int) -> None:
    """create_lr_scheduler in OneTrainer's create.py (above 1 batches, to 1 a share); TrainProgress.global_step."""
    units = {"save_every_unit": "STEP", "validation": True, "validate_after_unit": "STEP"}
    units |= {"save_every": share * 25, "validate_after": share * 5, "gradient_accumulation_steps": share}
    notes_of(one_trainer("QWEN", learning_rate_warmup_steps=steps, **units), "OneTrainer", here)
    config = load_config(["--config_file", "my.toml"])
    updates = 40_000  # of a run
    wanted = int(steps / share) if steps > 1 else int(steps * updates)
    warm = config.optimizer.lr_warmup_steps
    assert abs((warm * updates if 0 < warm < 1 else warm) - wanted) <= 1
    assert (config.saving.save_every_n_steps, config.validation.validate_every_n_steps) == (25, 5)


def test_lines_on_keys_of_onetrainer_are_true(here: Path) -> None:
    """Keys of all its saved files, of files before version 11 (its migrations), of other optimizers and models."""
    parts = {"__version": 0, "train": True, "include": True, "weight_dtype": "NONE", "attention_mask": False}
    old = {
        "__version": 8,
        "weight_dtype": "BFLOAT_16",
        "gradient_checkpointing": False,
        "save_after": 100,
        "save_after_unit": "STEP",
        "lora_layer_preset": "full",
        "prior": {"learning_rate": 2e-4, "weight_dtype": "FLOAT_8"},
        "unet": parts,
        "decoder": parts,
        "transformer": parts,
        "optimizer_defaults": {"ADAFACTOR": {"eps": 1e-30}},
        "optimizer": {
            "optimizer": "ADAFACTOR",
            "eps": 1e-30,
            "eps2": 1e-3,
            "beta1": None,
            "d_coef": 2.0,
            "fused": True,
        },
        "text_encoder": {"dropout_probability": 0.1},
        "resolution": "512,768",
    }
    notes = notes_of(one_trainer("FLUX_DEV_1") | old, "OneTrainer", here)
    refused = {key for key, note in notes.items() if note.outcome == "refused"}
    assert refused == {
        "text_encoder.dropout_probability",
        "layer_filter",
        "concepts.0.image.enable_crop_jitter",
        "layer_filter_preset",
        "quantization.layer_filter",
    }
    assert "output of this encoder alone" in notes["text_encoder.dropout_probability"].text
    assert "divide the epochs by their number" in notes["resolution"].text
    config = load_config(["--config_file", "my.toml"])
    assert (config.training.gradient_checkpointing, config.saving.save_every_n_steps) == (False, 100)
    assert (config.optimizer.learning_rate, config.precision.fp8_base) == (2e-4, True)
    notes = notes_of(one_trainer("FLUX_DEV_1") | old | {"__version": 11, "prior": {"train": False}}, "OneTrainer", here)
    assert notes["prior.train"].outcome == "left out"
    assert load_config(["--config_file", "my.toml"]).model.base_dtype == "bf16"
    for program, data in (("OneTrainer", one_trainer("QWEN", training_method="FINE_TUNE")),
                          ("SimpleTuner", simple_tuner("flux", model_type="full"))):  # fmt: skip
        (here / "my.toml").unlink(missing_ok=True)
        said = refusal(migrate_config, "--save_to", "my.toml", str(write(data, program, here)))
        assert "is not in this version, but lora" in said
        assert not (here / "my.toml").exists()


def test_keys_that_onetrainer_saves_with_their_defaults_get_no_line_that_they_are_not_taken(here: Path) -> None:
    """TrainConfig.default_values, ConceptConfig and SampleConfig: what every saved file has."""
    part = {
        "__version": 0,
        "include": True,
        "train_embedding": True,
        "guidance_scale": 1.0,
        "offload_fraction": 0.0,
        "stop_training_after": None,
        "stop_training_after_unit": "NEVER",
        "gradient_checkpointing": True,
    }
    frozen = part | {"train": False, "stop_training_after": 30, "stop_training_after_unit": "EPOCH"}
    saved = {"__version": 11, "debug_dir": "debug", "tensorboard_port": 6006, "multi_gpu": False, "device_indexes": "",
             "gradient_reduce_precision": "FLOAT_32_STOCHASTIC", "fused_gradient_reduce": True, "train_device": "cuda",
             "frames": "25", "loss_weight_fn": "CONSTANT", "loss_weight_strength": 5.0, "huber_strength": 0.0,
             "huber_delta": 1.0, "vb_loss_strength": 1.0, "ema": "OFF", "ema_update_step_interval": 5,
             "unmasked_weight": 0.1, "oft_block_size": 32, "lokr_dim": 16, "embedding_weight_dtype": "FLOAT_32",
             "fallback_train_dtype": "BFLOAT_16", "rolling_backup": False, "rolling_backup_count": 3, "unet": part,
             "text_encoder": frozen, "vae": part | {"train": True}, "cloud": {"enabled": False, "port": 22},
             "transformer": part | {"train": True, "weight_dtype": "FLOAT_8"}, "text_encoder_sequence_length": 512,
             "quantization": {"layer_filter_preset": "full", "svd_dtype": "NONE", "svd_rank": 16},
             "optimizer": {"optimizer": "ADAMW", "beta1": 0.9, "beta2": 0.999, "fused": True,
                           "stochastic_rounding": False, "use_cautious": False, "rms_rescaling": True, "d_coef": None},
             "samples": [{"prompt": "a", "frames": 1, "noise_scheduler": "DDIM", "cfg_scale": 3.5}]}  # fmt: skip
    text = {"tag_dropout_enable": False, "tag_dropout_mode": "FULL", "caps_randomize_mode": "first"}
    concept = {"__version": 2, "path": "images", "text": text, "image": {"enable_crop_jitter": False}}
    mine = one_trainer("QWEN")
    notes = notes_of(mine | saved | {"concepts": [concept]}, "OneTrainer", here)
    assert {key for key, note in notes.items() if note.outcome == "refused"} == {"layer_filter", "layer_filter_preset"}
    notes = notes_of(mine | {"ema": "GPU", "peft_type": "LOKR", "lora_rank": 4, "lokr_dim": 8}, "OneTrainer", here)
    assert "every update counts" in notes["ema_update_step_interval"].text  # 5 where it is unset
    assert load_config(["--config_file", "my.toml"]).network.network_dim == 8
    for mode, rate in (("FULL", None), ("RANDOM", 0.2)):
        text = {"tag_dropout_enable": True, "tag_dropout_probability": 0.2, "tag_dropout_mode": mode}
        notes_of(mine | {"concepts": [{"path": "images", "text": text}]}, "OneTrainer", here)
        assert toml.load("my_dataset.toml")["datasets"][0]["subsets"][0].get("caption_tag_dropout_rate") == rate


def test_settings_of_an_optimizer_that_is_not_taken_do_not_reach_another(here: Path) -> None:
    named = [
        key for key in read_toml(FOLDER / "onetrainer.toml")[0]["training"] if re.fullmatch(r"optimizer\.\w+", key)
    ]
    settings = {key.removeprefix("optimizer."): 0.5 for key in named if key != "optimizer.weight_decay"}
    data = one_trainer("QWEN", optimizer=settings | {"optimizer": "ADAMW_ADV"}, learning_rate_scheduler="COSINE")
    notes = notes_of(data, "OneTrainer", here)
    assert "AdamW trains" in notes["optimizer.optimizer"].text
    assert {notes[f"optimizer.{key}"].outcome for key in settings} <= {"refused", "left out"}
    ours = load_config(["--config_file", "my.toml"]).optimizer
    assert (ours.optimizer_args, ours.lr_scheduler) == ([], "cosine")
    notes = notes_of(simple_tuner("flux", optimizer="muon", optimizer_config="ns_steps=3"), "SimpleTuner", here)
    assert notes["optimizer_config"].outcome == "refused"
    data = one_trainer("QWEN", optimizer={"optimizer": "SCHEDULE_FREE_ADAMW"}, learning_rate_scheduler="COSINE")
    assert notes_of(data, "OneTrainer", here)["learning_rate_scheduler"].outcome == "left out"  # as is_schedule_free


@pytest.mark.parametrize(
    ("family", "keys", "cfg"),
    [
        ("z_image", {"validation_guidance": 4.0}, 4.0),  # use_cfg_zero_star of the pipelines is true
        ("z_image", {"validation_guidance": 1.0}, 1.0),
        ("krea2", {"validation_guidance": 4.5}, 4.5),
        ("krea2", {"validation_guidance": 0}, 1.0),
        ("qwen_image", {"validation_guidance": 7.0}, 4.0),  # true_cfg_scale of its pipeline
        ("qwen_image", {"validation_guidance_real": 3.0}, 3.0),
        ("flux", {"validation_guidance": 3.0, "validation_guidance_real": 2.0}, 2.0),
    ],
)
def test_simpletuners_samples_are_guided_as_there(here: Path, family: str, keys: dict[str, float], cfg: float) -> None:
    notes_of(simple_tuner(family, **keys), "SimpleTuner", here)
    lines = load_config(["--config_file", "my.toml"]).sampling.sample_prompts
    assert [prompt.cfg for prompt in read_prompts(lines, 0, 16)] == [cfg]


def test_what_is_nobodys_configuration_is_not_given_a_name() -> None:
    assert find_program("name: x\nsteps: 3\n") is None
    assert find_program('{"a": 1}') is None
