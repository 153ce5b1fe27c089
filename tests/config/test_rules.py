"""The rules among options: each cell of the matrices refuses, what asks for nothing does not, and lines keep apart."""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from library.config import load_config
from library.config.family_defaults import FAMILY, KIND
from library.config.kohya.translate import summary
from library.config.kohya.translation import Note
from library.config.layout_rules import LORA_MATRIX, PRETRAIN_MATRIX, Row, Settings
from library.config.load import load_for
from library.config.markers import OnlyFor, OnlyWith, resume_keys
from library.config.model_types import IMAGE_MODELS, LANGUAGE_MODELS, MODEL_TYPES
from library.config.rules import find_conflicts
from library.config.schema import DatasetArguments, ModelConfig, OptimizerConfig, TrainConfig
from library.config.scripts import LANGUAGE_LORA, LLM, LORA, Script, fields
from library.errors import UserError

REQUIRED = {
    LORA: {"pretrained_model_name_or_path": "m", "dataset_config": "d"},
    LANGUAGE_LORA: {"model_type": "llama", "pretrained_model_name_or_path": "m", "train_data": ["d.jsonl"]},
    LLM: {"preset": "llama-tiny", "data_dir": "d"},
}
LAYOUT: dict[str, dict[str, Any]] = {
    "shard": {"shard": 2},
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "microbatches": 1},
    "device_map": {"device_map": "balanced"},
    "zero": {"zero": 1},
    "zero = 3": {"zero": 3},
    'memory = "auto"': {"memory": "auto"},
}
# option -> what makes a row of the matrix hold, if it is more than a switch
ROWS: dict[str, dict[str, Any]] = {
    "torch_compile": {"torch_compile": True},
    "blocks_to_swap": {"blocks_to_swap": 2},
    "cuda_graph": {"cuda_graph": True},
    "sample_model": {"sample_model": "turbo", "sample_prompts": "prompts.txt"},
    "mixed_precision": {"mixed_precision": "fp16"},
    "full_bf16": {"full_bf16": True, "mixed_precision": "bf16"},
    "text_encoder_lr": {"text_encoder_lr": [1e-4]},
    "save_format": {"network_type": "dora", "save_format": "comfy"},
    "network_type": {"network_type": "dora"},
    "optimizer_type": {"optimizer_type": "Prodigy"},
    "quantised_activations": {"quantised_activations": "row"},
    "activation_budget_mb": {"gradient_checkpointing": True, "activation_budget_mb": 9},
    "cpu_offload_checkpointing": {"gradient_checkpointing": True, "cpu_offload_checkpointing": True},
    "ema_decay": {"ema_decay": 0.9},
    "memory": {"memory": "auto"},
    "preserve": {"preserve": "prior"},
    "train_on": {"train_on": "preferences"},
    "model_type": {"model_type": "z_image"},
    "shard": {"shard": 2},
    "tp": {"tp": 2},
    "device_map": {"device_map": "balanced"},
    "zero": {"zero": 1},
}


def _config(script: Script, **settings: Any) -> Any:
    known, tree = fields(script), {name: {} for name in script.schema.model_fields}  # type: ignore[var-annotated]
    for key, value in (REQUIRED[script] | settings).items():
        tree[known[key][0]][key] = value
    return script.schema.model_validate(tree)


@pytest.mark.parametrize("row", LORA_MATRIX, ids=lambda row: row.key)
def test_each_cell_of_the_matrix_of_loras_refuses_with_its_remedy(row: Row) -> None:
    script = LANGUAGE_LORA if row.key in ("tp", "train_on") else LORA
    settings = ROWS.get(row.key, {row.key: True})
    assert list(find_conflicts(_config(script, **settings))) == [], "alone it is no conflict"
    for layout, reason in row.why.items():
        config = _config(script, **settings | LAYOUT[layout])
        found = {conflict.keys: conflict.message for conflict in find_conflicts(config)}
        message = found[row.key, layout.split(" ")[0]]
        assert message == f"{row.key}: {reason.format(layout=layout, **Settings(config).values)}"
        assert ";" in message, "what to do"


@pytest.mark.parametrize("row", PRETRAIN_MATRIX, ids=lambda row: f"{row.key}-{next(iter(row.why))}")
def test_each_cell_of_the_matrix_of_pretraining_refuses(row: Row) -> None:
    special = {"tp": {"optimizer_type": "Prodigy"}, "shard": {"optimizer_type": "Muon"}}
    for layout in (layout for layout in row.why if layout.split(" ")[0] in fields(LLM)):
        settings = ROWS.get(row.key, {row.key: True}) | LAYOUT[layout]
        settings |= special.get(layout, {}) if row.key == "optimizer_type" else {}
        settings |= {"mixed_precision": "no"} if row.key == "full_bf16" else {}
        assert [conflict.keys for conflict in find_conflicts(_config(LLM, **settings))] == [(row.key, layout)]


@pytest.mark.parametrize("script", [LORA, LANGUAGE_LORA, LLM], ids=["images", "chats", "pretraining"])
def test_options_that_markers_name_are_there_and_defaults_conflict_with_nothing(script: Script) -> None:
    known = fields(script)
    everywhere = {key for each in (LORA, LANGUAGE_LORA, LLM) for key in fields(each)}
    for key, (_, field) in known.items():
        for marker in field.metadata:
            assert not isinstance(marker, type), f"{key}: {marker.__name__} is no marker, an object of it is"
            if isinstance(marker, OnlyWith):
                assert marker.needs.keys() <= everywhere, key
                assert not any(isinstance(wanted, str) for wanted in marker.needs.values()), f"{key}: give a tuple"
                marked = any(isinstance(m, OnlyFor) for m in field.metadata)  # refused wherever it would do nothing
                assert marked or not marker.needs.keys().isdisjoint(known), f"{key}: has no effect here; add an OnlyFor"
    defaults = {key: field.get_default() for key, (_, field) in known.items() if not field.is_required()}
    defaults = {key: value for key, value in defaults.items() if value not in (FAMILY, KIND)}
    assert list(find_conflicts(_config(script, **(defaults | REQUIRED[script])))) == []


def test_what_asks_for_nothing_is_no_conflict() -> None:
    nothing = {"save_last_n_steps": None, "sample_at_end": False, "early_stop_patience": None, "async_upload": False}
    nothing |= {"activation_budget_mb": 0, "text_encoder_lr": [0.0], "dim_from_weights": True, "network_weights": "w"}
    assert list(find_conflicts(_config(LORA, **nothing))) == []


def test_a_key_of_the_file_that_a_flag_leaves_without_effect_is_a_note(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('timestep_sampling = "shift"\ndiscrete_flow_shift = 2.0\n')
    argv = ["--config_file", str(path), "--pretrained_model_name_or_path", "m", "--dataset_config", "d"]
    notes: list[Note] = []
    assert load_config([*argv, "--timestep_sampling", "uniform"], notes).flow.timestep_sampling == "uniform"
    assert summary(notes) == [
        f'note: {path}:2: discrete_flow_shift: has no effect with timestep_sampling = "uniform" (it goes with shift or '
        "sigma), as the command line has it"
    ]
    with pytest.raises(UserError, match="discrete_flow_shift: has no effect"):
        load_config([*argv, "--timestep_sampling", "uniform", "--discrete_flow_shift", "2"])
    path.write_text("[parallel]\nshard = 2\n[training]\nblocks_to_swap = 3\n")
    with pytest.raises(UserError, match="blocks_to_swap: moves full weights, which tp splits"):  # it would be wrong
        load_config([*argv, "--shard", "1", "--tp", "2"])


def test_what_such_a_note_is_about_has_its_default(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("""pretrained_model_name_or_path = "m"
        dataset_config = "d"
        model_type = "qwen_image_edit_plus"
        zero_cond_t = true
        pp = 2
        microbatches = 2
        network_args = ["loraplus_lr_ratio=4"]""")
    flags = ["--model_type", "qwen_image", "--pp", "1", "--dim_from_weights", "--network_weights", "w"]
    notes: list[Note] = []
    config = load_config(["--config_file", str(path), *flags], notes)
    assert {note.key for note in notes} == {"zero_cond_t", "microbatches", "network_args"}
    assert (config.model.zero_cond_t, config.parallel.microbatches, config.network.network_args) == (None, None, [])


def test_text_encoders_are_not_forgotten_beside_a_file_of_the_transformers_layers(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('pretrained_model_name_or_path = "m"\ndataset_config = "d"\ntext_encoder_lr = [1e-5]\n')
    with pytest.raises(UserError, match="text_encoder_lr: dim_from_weights trains the transformer's layers"):
        load_config(["--config_file", str(path), "--dim_from_weights", "--network_weights", "w"])


def test_a_choice_that_was_not_made_is_not_quoted() -> None:
    argv = ["--pretrained_model_name_or_path", "m", "--dataset_config", "d", "--wandb_run_name", "n"]
    with pytest.raises(UserError, match="^wandb_run_name: has no effect without log_with = wandb or all; remove it$"):
        load_config(argv)


def test_a_line_is_held_back_for_the_keys_it_is_about_and_not_for_its_words() -> None:
    argv = ["--pretrained_model_name_or_path", "m", "--dataset_config", "d", "--blocks_to_swap", "2", "--torch_compile"]
    with pytest.raises(UserError) as caught:
        load_config([*argv, "--memry", "auto"])  # the other line says what compiled blocks keep in memory
    assert str(caught.value).splitlines() == [
        "command line: --memry: unknown flag; did you mean 'memory'?",
        "torch_compile: backward of a compiled block would read the weights of the block swapped in since; set "
        "gradient_checkpointing = true, or swap none",
    ]


def test_qwens_text_encoder_goes_with_fp16() -> None:
    argv = ["--pretrained_model_name_or_path", "m", "--dataset_config", "d", "--fp8_text_encoder"]
    for model_type in ("qwen_image", "z_image"):
        load_config([*argv, "--mixed_precision", "fp16", "--model_type", model_type])
    with pytest.raises(UserError, match="T5 leaves the range of fp16"):
        load_config([*argv, "--mixed_precision", "fp16", "--model_type", "flux_fill"])


def test_layouts_of_loras_are_no_options_of_pretraining() -> None:
    argv = ["--preset", "llama-tiny", "--data_dir", "d"]
    for key, value, said in [
        ("zero", ["2"], "is for LoRAs; set shard"),
        ("device_map", ["balanced"], "is for LoRAs on image models; set shard, tp or pp"),
    ]:
        with pytest.raises(UserError, match=f"--{key}: {said}"):
            load_for(LLM, [*argv, f"--{key}", *value])


@pytest.mark.parametrize("script", [LORA, LANGUAGE_LORA, LLM], ids=lambda script: script.name)
def test_a_warm_up_as_long_as_the_run_is_refused_with_the_configuration(script: Script[Any]) -> None:
    warm = {"lr_scheduler": "cosine", "lr_warmup_steps": 50, "max_train_steps": 50}
    words = [f"--{key}={value}" for key, value in warm.items()]
    needed = [
        word
        for key, value in REQUIRED[script].items()
        for word in (f"--{key}", *(value if isinstance(value, list) else [value]))
    ]
    with pytest.raises(UserError, match="lr_warmup_steps.*max_train_steps.*lower lr_warmup_steps"):
        load_for(script, [*needed, *words])
    load_for(script, [*needed, *words[:2], "--max_train_steps=51"])


def _messages(settings: dict[str, Any]) -> list[str]:
    model, dataset = ModelConfig(pretrained_model_name_or_path="m"), DatasetArguments(dataset_config="d")
    config = TrainConfig(model=model, dataset=dataset, optimizer=OptimizerConfig(**settings))
    return [conflict.message for conflict in find_conflicts(config)]


COSINE = {"lr_scheduler": "cosine"}
RELATIVE = {"optimizer_type": "Adafactor", "optimizer_args": ["relative_step=True"]}


def test_settings_without_effect_are_named_with_the_remedy() -> None:
    prodigy = {"optimizer_type": "prodigyopt.Prodigy", "learning_rate": 1e-4}
    for settings, message in (
        (COSINE | {"lr_scheduler_power": 2.0}, 'with lr_scheduler = "cosine" (it goes with polynomial); remove it'),
        ({"lr_scheduler_min_lr_ratio": 0.1}, 'has no effect with lr_scheduler = "constant"'),
        ({"lr_scheduler": "inverse_sqrt", "lr_decay_steps": 9}, 'no effect with lr_scheduler = "inverse_sqrt"'),
        (COSINE | {"lr_warmup_start_ratio": 0.1}, "lr_warmup_start_ratio: has no effect without lr_warmup_steps"),
        ({"lr_warmup_steps": 10}, "(it goes with constant_with_warmup, linear, "),
        ({"lr_scheduler": "constant_with_warmup"}, "needs lr_warmup_steps above 0; set it or choose 'constant'"),
        ({"lr_scheduler": "warmup_stable_decay"}, "needs lr_decay_steps above 0"),
        (COSINE | {"optimizer_type": "AdamWScheduleFree"}, 'would fight it; set lr_scheduler = "constant"'),
        (COSINE | {"optimizer_type": "prodigyplus.ProdigyPlusScheduleFree"}, 'set lr_scheduler = "constant"'),
        (RELATIVE | {"learning_rate": 1e-3}, "learning_rate: has no effect with Adafactor's relative_step=True"),
        (RELATIVE | COSINE | {"optimizer_args": ["warmup_init = True"]}, "lr_scheduler: has no effect with"),
        (prodigy, "learning_rate: 0.0001 multiplies the step size that prodigyopt.Prodigy estimates, nothing would"),
    ):
        problem = _messages(settings)[0]
        assert message in problem
        assert "\n" not in problem


def test_settings_that_work_are_let_through() -> None:
    no_averages = {"optimizer_type": "ProdigyPlusScheduleFree", "optimizer_args": ["use_schedulefree=False"]}
    for settings in (
        {},
        COSINE | {"lr_scheduler_power": 1.0, "lr_scheduler_num_cycles": 1, "lr_decay_steps": 0},
        {"lr_scheduler": "warmup_stable_decay", "lr_warmup_steps": 0.1, "lr_decay_steps": 0.2},
        COSINE | {"lr_warmup_steps": 9, "lr_warmup_start_ratio": 0.1, "lr_decay_steps": 100},
        {"optimizer_type": "AdamWScheduleFree"},
        COSINE | no_averages,
        RELATIVE | {"optimizer_args": ["relative_step=False"], "learning_rate": 1e-3},
        {"optimizer_type": "Prodigy"},
        {"optimizer_type": "Prodigy", "learning_rate": 0.5},
    ):
        assert _messages(settings) == [], settings


def test_the_learning_rate_is_one_by_default_where_the_step_size_is_estimated() -> None:
    assert OptimizerConfig(optimizer_type="dadaptation.DAdaptLion").learning_rate == 1.0
    assert OptimizerConfig(optimizer_type="Prodigy", learning_rate=0.5).learning_rate == 0.5
    assert OptimizerConfig(optimizer_type="AdamW").learning_rate == 1e-4


OF_A_LORA = {
    "optimizer_type", "optimizer_args", "text_encoder_lr", "network_type", "use_rslora",
    "init_lora_weights", "network_dim", "dim_from_weights", "network_alpha", "network_args", "full_bf16", "ema_decay",
    "fp8_base", "fp8_scaled", "fp8_granularity", "fp8_format", "fp8_exclude", "fp8_exclude_patterns", "fp8_rounding",
}  # fmt: skip
OF_CONVERSATIONS = {
    "chat_template",
    "chat_template_args",
    "train_on",
    "dpo_beta",
    "dpo_label_smoothing",
    "max_length",
    "packing",
    "train_batch_size",
    "validation_split",
}
OF_PRETRAINING = OF_CONVERSATIONS - {"train_batch_size", "dpo_beta", "dpo_label_smoothing"} | {
    "preset", "context", "optimizer_type", "text_encoder_lr", "optimizer_args", "weight_decay",
    "full_bf16", "seed", "ema_decay",
}  # fmt: skip


def test_each_training_has_its_resume_keys() -> None:
    model = ["--pretrained_model_name_or_path", "m"]
    of_images = {"preserve_directions", "train_on", "dpo_beta", "slider_prompts", "slider_guidance"}
    assert resume_keys(load_config([*model, "--dataset_config", "d"])).keys() == OF_A_LORA | of_images
    chat = load_for(LANGUAGE_LORA, [*model, "--model_type", "llama", "--train_data", "d.jsonl"])
    assert resume_keys(chat).keys() == OF_A_LORA | OF_CONVERSATIONS
    assert resume_keys(load_for(LLM, ["--data_dir", "d", "--preset", "llama-tiny"])).keys() == OF_PRETRAINING


def test_what_can_be_written_in_several_ways_is_compared_in_one() -> None:
    def keys(*flags: str) -> dict[str, object]:
        return resume_keys(load_config(["--pretrained_model_name_or_path", "m", "--dataset_config", "d", *flags]))

    one = keys("--fp8_scaled", "--fp8_exclude", "final", "embedders", "--optimizer_args", "eps = 1e-6", "foreach=False")
    other = keys("--fp8_scaled", "--fp8_exclude", "embedders", "final", "--optimizer_args", "foreach=False", "eps=1e-6")
    assert one == other
    assert keys("--network_args", "module_dropout=0.1") == keys()
    assert keys("--fp8_scaled") != keys()


ROOT = Path(__file__).resolve().parents[2]


@cache
def names_read() -> frozenset[str]:
    """Return every attribute that is read outside the schemas and their checks."""
    found: set[str] = set()
    files = [ROOT / "train_lora.py", ROOT / "train_llm.py", *(ROOT / "library").rglob("*.py")]
    files += (ROOT / "networks").rglob("*.py")
    for file in files:
        if file.parent == ROOT / "library" / "config":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
    return frozenset(found)


# Read within its section, by the method that the code outside calls instead.
WITHIN = {"dp": "replicas", "microbatches": "pieces"}


@pytest.mark.parametrize("script", [LORA, LANGUAGE_LORA, LLM], ids=["image LoRA", "language LoRA", "pretraining"])
def test_every_option_is_read_somewhere(script: Script) -> None:
    read = names_read()
    by_family = (
        {key for row in MODEL_TYPES.values() for key in row.keys} if "option" in read else set()
    )  # files.Part.option
    unread = {key for key in fields(script) if key not in read | by_family and WITHIN.get(key) not in read}
    unread = {key for key in unread if not key.startswith("metadata_")}  # read by that beginning: spec_fields
    assert not unread


def test_an_option_that_nothing_reads_would_be_found() -> None:
    assert "an_option_that_nothing_reads" not in names_read()
    assert {"learning_rate", "gradient_checkpointing"} <= names_read()


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_a_row_is_of_the_class_it_names(name: str) -> None:
    row = MODEL_TYPES[name]
    module, attribute = row.family.split(":")
    family = getattr(import_module(module), attribute)
    assert family.name == name
    assert set(row.keys) <= ModelConfig.model_fields.keys()


def test_the_schemas_choices_are_the_rows() -> None:
    for script, names in ((LORA, IMAGE_MODELS), (LANGUAGE_LORA, LANGUAGE_MODELS)):
        assert fields(script)["model_type"][1].annotation.__args__ == names  # type: ignore[union-attr]
