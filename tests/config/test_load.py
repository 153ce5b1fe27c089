"""The configuration: one schema for TOML, flags, help and JSON schema, and errors a person can act on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dev.write_config_docs import json_schema, models_page, options_page
from library.config import load_config
from library.config.kohya.translate import summary
from library.config.kohya.translation import Note
from library.config.load import _parser, _validate, load_for, read_keys
from library.config.model_types import PATHS
from library.config.scripts import LANGUAGE_LORA, LLM, LORA, REMOVED_KEYS, Script, fields, sections
from library.errors import UserError
from tests.config.test_kohya import _problem

REQUIRED = ["--pretrained_model_name_or_path", "base", "--dataset_config", "data.toml"]
ROOT = Path(__file__).resolve().parents[2]


def _toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_key_is_read_under_any_heading_or_none(tmp_path: Path) -> None:
    path = _toml(tmp_path, 'network_dim = 8\n[anything]\nlearning_rate = 1\n[network]\nnetwork_args = ["a=1"]\n')
    config = load_config(["--config_file", path, *REQUIRED])
    assert config.network.network_dim == 8
    assert config.optimizer.learning_rate == 1.0
    assert config.network.network_args == ["a=1"]


@pytest.mark.parametrize("script", [LORA, LANGUAGE_LORA, LLM])
def test_every_option_that_names_a_path_takes_a_tilde(
    script: Script[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell resolves it in a TOML file; other options keep it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    needed = {"pretrained_model_name_or_path": "m", "dataset_config": "d", "train_data": ["d"], "data_dir": "d"}
    needed = {key: value for key, value in (needed | {"model_type": "llama"}).items() if key in fields(script)}
    needed |= {"model_type": "flux"} if script is LORA else {}
    for key, (section, field) in fields(script).items():
        tried = [_validate(needed | {key: given}, {}, (), script)[0] for given in ("~/x", ["~/x"])]
        values = str([getattr(getattr(config, section), key) for config in tried if config])
        named = bool(re.search(r"\b(folder|files?)\b", field.description or "")) and "/x" in values
        assert (str(tmp_path / "x") in values) == (key in PATHS), key
        assert ("~" in values) <= (key not in PATHS), key
        assert named <= (key in PATHS or key in ("output_name", "huggingface_path_in_repo", "network_args")), key


def test_a_flag_wins_over_the_toml_file(tmp_path: Path) -> None:
    path = _toml(tmp_path, "[network]\nnetwork_dim = 8\n[training]\ngradient_checkpointing = true\n")
    config = load_config(["--config_file", path, "--network_dim", "32", "--no-gradient_checkpointing", *REQUIRED])
    assert config.network.network_dim == 32
    assert config.training.gradient_checkpointing is False


def test_a_flag_wins_over_the_other_way_of_saying_it_in_the_toml_file(tmp_path: Path) -> None:
    path = _toml(tmp_path, "max_train_epochs = 9\n")
    training = load_config(["--config_file", path, "--max_train_steps", "2", *REQUIRED]).training
    assert (training.max_train_steps, training.max_train_epochs) == (2, None)


def test_lists_and_either_or_numbers_are_taken_from_the_command_line() -> None:
    argv = ["--optimizer_args", "weight_decay=0.1", "betas=0.9,0.99", "--lr_scheduler", "cosine"]
    config = load_config([*argv, "--lr_warmup_steps", "0.1", *REQUIRED])
    assert config.optimizer.optimizer_args == ["weight_decay=0.1", "betas=0.9,0.99"]
    assert config.optimizer.lr_warmup_steps == pytest.approx(0.1)
    assert (
        load_config(["--lr_warmup_steps", "100", "--lr_scheduler", "cosine", *REQUIRED]).optimizer.lr_warmup_steps
        == 100
    )


def test_an_unknown_toml_key_names_file_line_and_nearest_key(tmp_path: Path) -> None:
    path = _toml(tmp_path, "# comment\n[network]\nnetwrk_dim = 8\n")
    assert _problem(["--config_file", path, *REQUIRED]) == (
        f"{path}:3: netwrk_dim: unknown key; did you mean 'network_dim'?"
    )


@pytest.mark.parametrize("script", [LORA, LLM], ids=lambda script: script.name)
def test_a_layout_that_is_not_there_is_refused_with_the_reason(script: Script[Any], tmp_path: Path) -> None:
    path = _toml(tmp_path, "[parallel]\ncp = 2\n")
    with pytest.raises(UserError) as caught:
        load_for(script, ["--config_file", path])
    (line,) = (line for line in str(caught.value).splitlines() if f"{path}:2: cp:" in line)
    assert re.search("diffusers splits an image's tokens .*; remove it, and set tp", line)


def test_a_wrong_type_names_file_line_and_what_was_expected(tmp_path: Path) -> None:
    path = _toml(tmp_path, '[network]\nnetwork_dim = "many"\n')
    message = _problem(["--config_file", path, *REQUIRED])
    assert message.startswith(f"{path}:2: network_dim: 'many' does not fit: should be a valid integer")


@pytest.mark.parametrize("value", ["0.5", "true", '"resolution=64"', "{a = 1}", "1979-05-27"])
def test_arguments_of_the_dataset_that_are_no_list_are_told_as_any_wrong_type(value: str, tmp_path: Path) -> None:
    path = _toml(tmp_path, f"dataset_args = {value}\n")
    assert _problem(["--config_file", path, *REQUIRED]).startswith(f"{path}:1: dataset_args: ")


def test_a_wrong_choice_names_the_nearest_one() -> None:
    assert _problem(["--lr_scheduler", "cosin", *REQUIRED]).endswith("did you mean 'cosine'?")


def test_all_that_is_wrong_is_told_at_once_a_line_each(tmp_path: Path) -> None:
    """Unknown keys and flags, values, keys of kohya's, and conflicts among what could be read; nothing that follows."""
    text = """pretrained_modl_name_or_path = "base"
        max_train_steps = "many"
        save_evry_n_steps = 2
        save_last_n_steps = 4
        full_bf16 = true
        mixed_precision = "bf17"
        discrete_flow_shift = 2.0
        lr_scheduler_power = 2.0
        weighted_captions = true
        [saving]
        output_name = "out/cat"
        [datasets]
        resolution = 64
        [trainin]
        """
    path = _toml(tmp_path, text)
    problem = _problem(["--config_file", path, "--dataset_config", "d.toml", "--foo", "3", "--netwrk_dim=4"])
    sampling = 'timestep_sampling = "auto"'
    assert problem.splitlines() == [
        f"{path}:1: pretrained_modl_name_or_path: unknown key; did you mean 'pretrained_model_name_or_path'?",
        f"{path}:3: save_evry_n_steps: unknown key; did you mean 'save_every_n_steps'?",
        f"{path}:12: datasets: describes images; put it into the file that dataset_config names",
        "command line: --foo: unknown flag; see --help",
        "command line: --netwrk_dim: unknown flag; did you mean 'network_dim'?",
        f"{path}:9: weighted_captions: not taken: captions are cached without weights; remove it",
        f"{path}:2: max_train_steps: 'many' does not fit: should be a valid integer, unable to parse string as an "
        "integer",
        f"{path}:6: mixed_precision: 'bf17' does not fit: should be 'auto', 'no', 'fp16' or 'bf16'; did you mean "
        "'bf16'?",
        f"{path}:11: output_name: 'out/cat' does not fit: it is a file's name alone; put the folder into output_dir",
        'lr_scheduler_power: has no effect with lr_scheduler = "constant" (it goes with polynomial); remove it',
        f"discrete_flow_shift: has no effect with {sampling} (it goes with shift or sigma); remove it",
    ]  # full_bf16 would want another mixed_precision, save_last_n_steps a save_every_n_steps: both are told above


def test_tables_of_the_wrong_kind_are_named(tmp_path: Path) -> None:
    path = _toml(tmp_path, "[[network]]\nnetwork_dim = 8\n")
    assert _problem(["--config_file", path, *REQUIRED]) == (
        f"{path}:1: network: is a list of tables; write [network] in single brackets"
    )


@pytest.mark.parametrize("key", REMOVED_KEYS)
def test_a_saved_configuration_may_hold_a_removed_option_at_its_default(key: str, tmp_path: Path) -> None:
    default, said = REMOVED_KEYS[key]
    kept = _toml(tmp_path, f"[parallel]\n{key} = {json.dumps(default)}\n")
    assert load_config(["--config_file", kept, *REQUIRED]).parallel.shard == 1
    other = _toml(tmp_path, f'[parallel]\n{key} = "other"\n')
    assert _problem(["--config_file", other, *REQUIRED]) == f"{other}:2: {key}: {said}"
    assert "; " in said, "what to do"


def test_a_folder_is_no_config_file(tmp_path: Path) -> None:
    wanted = f"{tmp_path}: is a folder; give --config_file the path of a training TOML"
    assert _problem(["--config_file", str(tmp_path)]) == wanted
    (tmp_path / "config.toml").write_text("seed = 1\n")
    assert _problem(["--config_file", str(tmp_path)]) == f"{wanted}, such as config.toml in it"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("network_dim = = 3", "not valid TOML"),
        ('network_dim = "8', "not valid TOML"),
        ("[a]\nnetwork_dim = 1\n[b]\nnetwork_dim = 2", "stands in this file twice"),
    ],
)
def test_a_broken_toml_file_is_named(tmp_path: Path, text: str, part: str) -> None:
    path = _toml(tmp_path, text)
    message = _problem(["--config_file", path, *REQUIRED])
    assert path in message
    assert part in message


def test_missing_files_keys_and_flags_say_what_to_do(tmp_path: Path) -> None:
    assert "no such file" in _problem(["--config_file", str(tmp_path / "no.toml")])
    assert "pretrained_model_name_or_path: is required" in _problem(["--dataset_config", "d"])
    assert (
        _problem(["--netwrk_dim", "3", *REQUIRED])
        == "command line: --netwrk_dim: unknown flag; did you mean 'network_dim'?"
    )
    assert "'false' belongs to no flag; a switch takes no value" in _problem(["--sample_at_end", "false", *REQUIRED])


def test_options_that_have_no_effect_or_contradict_each_other_are_refused_in_one_line() -> None:
    """One of each kind: the matrices and every ``OnlyWith`` are in test_rules."""
    for words, part in (
        ("--full_bf16 --mixed_precision no", "full_bf16: needs the forward pass in bf16"),
        ("--base_dtype bf16 --mixed_precision no", 'set mixed_precision = "bf16"'),
        ("--min_timestep 500 --max_timestep 400", "min_timestep: 500 is not below"),
        ("--discrete_flow_shift 2", "discrete_flow_shift: has no effect"),
        ("--weighting_scheme logit_normal", 'timestep_sampling = "sigma" only'),
        ("--logit_mean 1", "logit_mean: has no effect"),
        ("--sample_every_n_steps 5", "sample_every_n_steps: has no effect without sample_prompts"),
        ("--wandb_run_name x --log_with tensorboard", "wandb_run_name: has no effect"),
        ("--torch_compile --dynamo_backend eager --dynamo_mode max-autotune", "dynamo_mode: has no effect"),
        ("--fp8_base --fp8_scaled", "fp8_base: casts without scales, fp8_scaled quantises with scales; keep one"),
        ("--fp8_exclude final", "fp8_exclude: has no effect without fp8_base or fp8_scaled"),
        ("--fp8_scaled --quantised_compute quantised", "fp8_granularity: block scales cannot be multiplied in fp8, as"),
        ("--fp8_base --fp8_format e5m2 --quantised_compute quantised", "fp8_format: e5m2 weights cannot be multiplied"),
        ("--save_last_n_steps 5", "save_last_n_steps: has no effect without save_every_n_steps"),
        (
            "--save_best",
            "save_best: has no effect without validate_every_n_steps or validate_every_n_epochs or save_every",
        ),
        ("--ema_decay 0.9 --optimizer_type AdamWScheduleFree", "averages its weights already"),
        ("--huggingface_repo_id a/b --save_state_to_huggingface", "no state is saved"),
    ):
        message = _problem([*words.split(), *REQUIRED])
        assert part in message
        assert "\n" not in message


def test_key_names_are_unique_over_all_sections() -> None:
    names = [key for section in sections().values() for key in section.model_fields]
    assert len(names) == len(set(names)) == len(fields())


def test_every_key_is_described() -> None:
    assert [key for key, (_, field) in fields().items() if not field.description] == []


def test_help_lists_every_key_under_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load_config(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    for name in sections():
        assert f"{name}:" in shown
    for key in fields():
        assert f"--{key}" in shown


def test_the_json_schema_and_the_options_page_are_up_to_date() -> None:
    assert (ROOT / "configs/train_lora.schema.json").read_text(encoding="utf-8") == json_schema()
    assert (ROOT / "docs/options.md").read_text(encoding="utf-8") == options_page()
    assert (ROOT / "docs/models.md").read_text(encoding="utf-8") == models_page()
    assert set(json.loads(json_schema())["properties"]) == set(fields()) | set(sections())


def test_a_switch_that_may_be_left_to_the_model_is_a_switch() -> None:
    edit = [*REQUIRED, "--model_type", "qwen_image_edit_plus"]
    assert load_config([*edit, "--zero_cond_t"]).model.zero_cond_t is True
    assert load_config([*edit, "--no-zero_cond_t"]).model.zero_cond_t is False
    assert load_config(edit).model.zero_cond_t is None


@pytest.mark.parametrize(
    "flags",
    [
        ["--validate_every_n_steps", "0"],
        ["--save_every_n_steps", "0", "--save_last_n_steps", "0"],
        ["--max_train_epochs", "0"],
        ["--sample_every_n_epochs", "0"],
        ["--no-sample_at_end"],
        ["--sample_prompts", ""],
        ["--resume", ""],
        ["--log_with", "none"],
        ["--ema_decay", "0"],
        ["--early_stop_patience", "0"],
        ["--zero", "0"],
    ],
    ids=" ".join,
)
def test_a_key_at_nothing_asks_for_nothing(flags: list[str]) -> None:
    notes: list[Note] = []
    config = load_config([*REQUIRED, *flags], notes)
    plain = load_config(REQUIRED)
    without = {"sampling": {"sample_at_end"}}
    assert config.model_dump(exclude=without) == plain.model_dump(exclude=without)
    assert summary(notes) == []


def test_a_false_is_not_nothing_where_unset_means_neither() -> None:
    assert load_config([*REQUIRED, "--no-memory_dry_run"]).training.memory_dry_run is False
    assert load_config([*REQUIRED, "--training_comment", "0"]).saving.training_comment == "0"


def test_what_another_option_decides_is_a_note_beside_it(tmp_path: Path) -> None:
    """network_dim beside dim_from_weights: the file's ranks count, whoever wrote which."""
    text = 'dim_from_weights = true\nnetwork_weights = "a.safetensors"\nnetwork_dim = 8\nnetwork_alpha = 4\n'
    for words in (["--config_file", _toml(tmp_path, text)], ["--network_weights", "a", "--dim_from_weights",
                                                            "--network_dim", "8", "--network_alpha", "4"]):  # fmt: skip
        notes: list[Note] = []
        config = load_config([*REQUIRED, *words], notes)
        assert config.network.network_dim == 16, "its default, so that nobody reads it"
        assert [note.key for note in notes] == ["network_dim", "network_alpha"]
        assert notes[0].text == (
            "has no effect with dim_from_weights, which takes layers, ranks and alphas from the file"
        )


@pytest.mark.parametrize(
    ("text", "flags", "cleared"),
    [
        ('lr_scheduler = "rex"\nlr_scheduler_min_lr_ratio = 0.1\nlr_warmup_steps = 5', ["--lr_scheduler", "constant"],
         {"lr_scheduler_min_lr_ratio", "lr_warmup_steps"}),
        ("save_every_n_steps = 10\nsave_last_n_steps = 20", ["--save_every_n_steps", "0"], {"save_last_n_steps"}),
        ('timestep_sampling = "sigma"\nweighting_scheme = "mode"', ["--timestep_sampling", "shift"],
         {"weighting_scheme"}),
        ('loss_type = "huber"\nhuber_c = 0.2', ["--loss_type", "l1"], {"huber_c"}),
    ],
)  # fmt: skip
def test_a_flag_clears_what_hung_on_the_key_that_it_overrides(
    tmp_path: Path, text: str, flags: list[str], cleared: set[str]
) -> None:
    notes: list[Note] = []
    load_config(["--config_file", _toml(tmp_path, text), *REQUIRED, *flags], notes)
    assert {note.key for note in notes} == cleared
    assert all(note.text.endswith("as the command line has it") for note in notes)


def test_epochs_of_a_flag_at_zero_leave_the_files_steps(tmp_path: Path) -> None:
    config = load_config(
        ["--config_file", _toml(tmp_path, "max_train_steps = 7"), *REQUIRED, "--max_train_epochs", "0"]
    )
    assert (config.training.max_train_steps, config.training.max_train_epochs) == (7, None)


def test_a_problem_names_its_line_however_toml_writes_the_key() -> None:
    text = """title = 1
[network]
  "foo one" = 1
'foo_two' = 2
network.foo_three = 3
[datasets_."x"]
foo_four=4 # foo_five = 0
"""
    said = read_keys(text, "run.toml").problems
    expected = {"title": 1, "foo one": 3, "foo_two": 4, "foo_three": 5, "foo_four": 7}
    assert [line.split(": ")[:2] for line in said] == [[f"run.toml:{n}", key] for key, n in expected.items()]


HEAVY = {"torch", "numpy", "diffusers", "transformers", "accelerate", "bitsandbytes", "peft", "PIL", "matplotlib"}
# Runs a script as a user does, and says at its end what was imported and what it took.
PROBE = """
import json, resource, runpy, sys, time
began = time.process_time()
from pydantic import BaseModel, Field
spent = time.process_time() - began
script, sys.argv = sys.argv[1], sys.argv[1:]
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    code = end.code
    taken = time.process_time() - began
    modules = sorted({name.split(".")[0] for name in sys.modules})
    print("\\n" + json.dumps({"code": code, "pydantic": spent, "all": taken, "modules": modules}))
"""


def _probe(*words: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=240
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("script", [LORA, LANGUAGE_LORA, LLM], ids=lambda script: script.training)
def test_help_names_no_default_that_is_none(script: Script[Any]) -> None:
    text = " ".join(_parser(script).format_help().split())
    assert "None" not in text
    assert "[]" not in text


@pytest.mark.parametrize("script", ["train_lora.py", "train_llm.py"])
@pytest.mark.parametrize(
    ("words", "code"),
    [(["--help"], 0), (["--netwrk_dim", "4"], 2), (["--learning_rate", "much"], 2)],
    ids=["help", "wrong key", "wrong value"],
)
def test_nothing_heavy_is_imported_before_the_configuration_is_complete(
    script: str, words: list[str], code: int
) -> None:
    found = _probe(script, *words)
    assert found["code"] == code
    assert not HEAVY & set(found["modules"])  # type: ignore[call-overload]
    # Measured: 0.1 s for pydantic, 0.3 s for all; torch alone would be 2 s. Both scale with the machine.
    assert float(found["all"]) < 10 * float(found["pydantic"])  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", ["7", "1600", "1000"])  # the defaults, too
@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize(
    ("script", "needed"),
    [
        (LORA, REQUIRED),
        (LORA, [*REQUIRED, "--network_module", "networks.lora_flux", "--network_train_unet_only"]),  # kohya's
        (LLM, ["--data_dir", "d", "--preset", "llama-tiny"]),
    ],
)
def test_of_steps_and_epochs_that_are_given_together_a_note_says_that_epochs_win(
    script: Script[Any], needed: list[str], in_file: bool, steps: str, tmp_path: Path
) -> None:
    notes: list[Note] = []
    file = ["--config_file", _toml(tmp_path, f"max_train_steps = {steps}\nmax_train_epochs = 2")]
    flags = ["--max_train_steps", steps, "--max_train_epochs", "2"]
    config = load_for(script, [*needed, *(file if in_file else flags)], notes)
    (said,) = [line for line in summary(notes) if "max_train_steps" in line]
    assert said.endswith("max_train_steps: has no effect with max_train_epochs, which wins, as in sd-scripts")
    assert config.training.max_train_epochs == 2


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
@pytest.mark.parametrize("key", sorted(PATHS & fields(LORA).keys() - {"resume"}))
def test_a_path_that_this_user_may_not_look_at_is_refused_with_its_option(key: str, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    path = str(tmp_path / "closed" / "x.safetensors")
    user = os.geteuid()
    os.seteuid(user or 65534)  # whom permissions hold for
    try:
        lines = _validate({key: [path] if "list" in str(fields(LORA)[key][1].annotation) else path}, {}, (), LORA)[1]
    finally:
        os.seteuid(user)
    assert any(line.startswith(f"{key}: {path}: cannot be used (Permission denied); ") for line in lines), lines


@pytest.mark.parametrize("name", ["krea/Krea-2-Raw", "somebody/krea-2.1-tuned"])
def test_a_hub_name_on_the_command_line_leaves_out_the_files_parts_and_says_so(name: str) -> None:
    """Every ready configuration runs with a model that is downloaded; what a flag names is never left out."""
    words = ["--config_file", str(ROOT / "configs/krea2_lora_12gb.toml"), "--pretrained_model_name_or_path"]
    notes: list[Note] = []
    config = load_config([*words, name], notes)
    assert (config.model.vae, config.model.text_encoder) == (None, None)
    assert [note.line() for note in notes if "left out" in note.text] == [
        f"pretrained_model_name_or_path: {name} has its own; the configuration's vae, text_encoder are left out"
    ]
    assert load_config([*words, name, "--vae", "my.safetensors"]).model.vae == "my.safetensors"
    assert load_config([*words, "elsewhere/krea2.safetensors"]).model.vae == "models/qwen_image_vae.safetensors"
