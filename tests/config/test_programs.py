"""Configurations of ai-toolkit, OneTrainer and SimpleTuner: recognised by name, and translated without losing a key."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import toml
import yaml
from PIL import Image

from library.config import load_config
from library.config.scripts import LORA, fields
from library.data.config import DATASET_KEYS, SUBSET_KEYS, load_dataset_config
from library.errors import UserError
from library.files import find_program, read_toml
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
        "zimage:turbo": "z_image", "krea2": "krea2"}.items()},
    "ai-toolkit is_flux": (ai_toolkit({"is_flux": True}), "flux"),
    "ai-toolkit edit": (ai_toolkit({"arch": "qwen_image_edit_plus"}, control_path="images"), "qwen_image_edit_plus"),
    "ai-toolkit klein edit": (ai_toolkit({"arch": "flux2_klein_4b"}, control_path="images"), "flux2_klein_edit"),
    "ai-toolkit masks": (ai_toolkit({"arch": "flux_kontext"}, control_path="images"), "flux_kontext"),
    **{f"OneTrainer {name}": (one_trainer(name), kind) for name, kind in {
        "FLUX_DEV_1": "flux", "FLUX_FILL_DEV_1": "flux_fill", "FLUX_2": "flux2_klein", "QWEN": "qwen_image",
        "KREA_2": "krea2", "Z_IMAGE": "z_image"}.items()},
    "OneTrainer dynamic": (one_trainer("FLUX_DEV_1", dynamic_timestep_shifting=True), "flux"),
    **{f"SimpleTuner {name} {flavour}": (simple_tuner(name, model_flavour=flavour), kind) for name, flavour, kind in (
        ("flux", "dev", "flux"), ("flux", "kontext", "flux_kontext"), ("flux2", "klein-4b", "flux2_klein"),
        ("flux2", "dev", "flux2_dev"), ("qwen_image", "v1.0", "qwen_image"), ("krea2", "raw", "krea2"),
        ("qwen_image", "edit-v3", "qwen_image_edit_plus"), ("z_image", "base", "z_image"))},
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
    path.write_text(yaml.safe_dump(data) if program == "ai-toolkit" else json.dumps(data))
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
    references = program == "ai-toolkit" and ("edit" in model_type or "kontext" in model_type)
    dataset = load_dataset_config(config.dataset.dataset_config, config.dataset, "references" if references else "none")
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
    assert (ours.network.network_dim, ours.network.network_alpha) == (4, 1.0)
    assert (ours.optimizer.learning_rate, ours.training.max_train_steps) == (1e-6, 1000)
    assert (ours.training.mixed_precision, ours.training.gradient_checkpointing) == ("no", True)
    assert ours.flow.timestep_sampling == "sigmoid"
    sets = toml.load("a_dataset.toml")["datasets"][0]
    assert (sets["resolutions"], sets["bucket_reso_steps"], sets["bucket_no_upscale"]) == ([512], 64, True)
    assert sets["subsets"][0]["caption_extension"] == ".txt"
    bare = {"training_method": "LORA", "model_type": "FLUX_DEV_1", "base_model_name": "m"}
    call(migrate_config, "--save_to", "b.toml", str(write(bare, "OneTrainer", here)))
    ours = load_config(["--config_file", "b.toml"])
    assert (ours.network.network_dim, ours.network.network_alpha) == (16, 1.0)
    assert (ours.optimizer.learning_rate, ours.optimizer.lr_warmup_steps) == (3e-6, 200)
    assert (ours.training.max_train_epochs, ours.training.mixed_precision) == (100, "fp16")
    assert (ours.flow.timestep_sampling, ours.flow.guidance_scale) == ("uniform", 1.0)
    bare = {"model_type": "lora", "model_family": "flux", "data_backend_config": "none.json", "lora_rank": 8}
    call(migrate_config, "--save_to", "c.toml", str(write(bare, "SimpleTuner", here)))
    ours = load_config(["--config_file", "c.toml"])
    assert (ours.network.network_alpha, ours.network.network_dropout) == (8, 0.1)
    assert (ours.optimizer.learning_rate, ours.dataset.train_batch_size) == (4e-7, 4)
    assert (ours.flow.timestep_sampling, ours.flow.discrete_flow_shift) == ("shift", 3.0)
    assert ours.model.pretrained_model_name_or_path == "black-forest-labs/FLUX.1-Krea-dev"  # its default flavour


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

    data: dict[str, Any] = some(known["training"])
    minimal = {"ai-toolkit": ai_toolkit({"arch": "flux"}), "OneTrainer": one_trainer("QWEN"),
               "SimpleTuner": simple_tuner("flux")}[program]  # fmt: skip
    given = [some(known["dataset"]) for _ in range(2)]
    if program == "ai-toolkit":
        process = minimal["config"]["process"][0]
        process.update(
            {key: value for key, value in data.items() if key not in process and key not in ("config", "job")}
        )
        process["datasets"] += given
    else:
        minimal = {**data, **minimal} | ({"concepts": given} if program == "OneTrainer" else {"data_backends": given})
    path = write(minimal, program, here)
    try:
        notes = migrate_foreign(program, path.read_text(), path, here / "my.toml")
    except UserError:  # a value of theirs that the schema refuses by name: nothing is dropped in silence
        assert not (here / "my.toml").exists()
        return
    named = {note.key for note in notes}
    for key in leaves(minimal):
        assert key.removeprefix("config.process.0.") in named, key
    for note in notes:
        assert note.text or note.outcome == "same"


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_tables_name_keys_that_are_there(program: str) -> None:
    tables = read_toml(FOLDER / f"{program.lower()}.toml")[0]
    columns = {"to", "text", "values", "but", "add", "option", "when", "off", "why", "default", "like"}
    for part, known in (("training", fields(LORA).keys()), ("dataset", DATASET_KEYS | SUBSET_KEYS)):
        rows = {key: row for key, row in tables[part].items() if key != "without"}
        for key, row in rows.items():
            assert row.keys() <= columns, key
            assert "to" not in row or row["to"] in known, key
            for value in row.get("values", {}).values():
                assert not isinstance(value, dict) or value.keys() <= known, key
            assert all(
                other.replace(".0.", ".*.") in [*rows, *tables.get("by", {}).values()]
                for other in [*row.get("when", {}), row.get("like", key)]
            ), key
            words = [word for word in row.get("values", {}) if word != word.lower()]
            assert not words, key


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("job: [\nprocess:\n  training_folder: x", "in.yaml: cannot be read"),
        ("a: &a [1]\ntraining_folder: *a", "in.yaml: refers to parts of itself"),
        ("training_folder: x\nmodel: {arch: wan21}", "in.yaml: names no model family of this version; model.arch: not"),
        ("training_folder: " + "[" * 3000, "in.yaml: cannot be read"),
        ("folder_path: 2026-13-45", "in.yaml: cannot be read"),
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
    assert table["subsets"] == [{"image_dir": "images", "caption_extension": ".txt", "num_repeats": 2}]
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
    assert config.sampling.sample_prompts == ["another --w 1024 --h 1024 --d 42 --g 4 --s 20 --w 64"]


def test_what_is_nobodys_configuration_is_not_given_a_name() -> None:
    assert find_program("name: x\nsteps: 3\n") is None
    assert find_program('{"a": 1}') is None
