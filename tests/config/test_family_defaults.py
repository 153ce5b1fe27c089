"""The defaults of the families: those of diffusers' pipelines, and the same wherever a configuration is from."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
from diffusers.modular_pipelines.flux3 import before_denoise, denoise

from library.config import load_config
from library.config.family_defaults import FAMILY, family_defaults, presets
from library.config.load import load_for
from library.config.markers import options
from library.config.model_types import IMAGE_MODELS, LANGUAGE_MODELS, MODEL_TYPES
from library.config.scripts import LANGUAGE_LORA, LORA
from library.errors import UserError
from library.models.family_by_name import family_class, model_family
from library.training.flow import resolve_sampling
from library.training.plan import as_in_state, family_options, with_precision
from library.training.sampling.prompts import usual_prompt
from tests.runs import ROOT, call
from tests.tiny_z_image import tiny_z_pipeline
from tools import migrate_config

REQUIRED = ["--pretrained_model_name_or_path", "m", "--dataset_config", "d"]
# of a card, where the pipeline's own default is another: black-forest-labs/FLUX.1-Kontext-dev, Tongyi-MAI/Z-Image
IN_THEM_TOO = {"lr_scheduler", "max_train_steps", "seed", "gradient_checkpointing", "save_every_n_steps"}
CARDS = {"flux_kontext": 2.5, "z_image": 4.0}
COUNT_FROM_0 = ("krea2", "z_image")  # whose pipelines' guidance of 0 is none


def config_of(model_type: str, *more: str) -> Any:
    return load_config(["--model_type", model_type, *REQUIRED, *more])


def published(model_type: str) -> dict[str, Any]:
    """Return steps and guidance of diffusers' pipeline, as its call has them by default."""
    if model_type.startswith("flux3"):
        blocks = [c for module in (before_denoise, denoise) for _, c in inspect.getmembers(module, inspect.isclass)]
        parameters = [inspect.signature(block.__init__).parameters for block in blocks]
        return {name: p.default for each in parameters for name, p in each.items()
                if name in ("num_inference_steps", "guidance_scale") and p.default is not p.empty}  # fmt: skip
    call = inspect.signature(getattr(diffusers, MODEL_TYPES[model_type].pipeline).__call__).parameters
    wanted = ("num_inference_steps", "guidance_scale", "true_cfg_scale", "height")
    return {name: call[name].default for name in wanted if name in call}


@pytest.mark.parametrize("model_type", IMAGE_MODELS)
def test_samples_are_made_as_diffusers_makes_them_by_default(model_type: str) -> None:
    """A17. What the pipelines call guidance is the input of distilled models, and of others the strength of CFG."""
    family, theirs = family_class(model_type), published(model_type)
    usual = usual_prompt(SimpleNamespace(name=model_type, distilled=False, guidance_input=family.guidance_input))  # type: ignore[arg-type]
    assert usual.steps == theirs["num_inference_steps"]
    if family.guidance_input:
        assert (usual.guidance, usual.cfg) == (CARDS.get(model_type, theirs["guidance_scale"]), 1.0)
    else:
        asked = CARDS.get(model_type) or theirs.get("true_cfg_scale") or theirs["guidance_scale"]
        assert usual.cfg - (model_type in COUNT_FROM_0) == asked
    assert usual.width == usual.height == (theirs.get("height") or 1024)  # default_sample_size 128 of eight pixels


@pytest.mark.parametrize("model_type", IMAGE_MODELS)
def test_a_family_has_the_same_defaults_on_the_command_line_in_a_file_and_in_the_form(
    model_type: str, tmp_path: Path
) -> None:
    edited = pytest.importorskip("library.config.edit", reason="without the page's packages there is no form").edited
    of_flags, values = config_of(model_type), family_defaults(model_type)
    text = f'model_type = "{model_type}"\npretrained_model_name_or_path = "m"\ndataset_config = "d"\n'
    (tmp_path / "run.toml").write_text(edited(edited(text, "network_dim", "7", LORA), "network_dim", "", LORA))
    of_file = load_config(["--config_file", str(tmp_path / "run.toml")])
    assert family_options(of_flags) == family_options(of_file)
    network, optimizer = of_flags.network, of_flags.optimizer
    assert (network.network_dim, network.network_alpha) == (values["network_dim"], values["network_dim"])
    assert (optimizer.learning_rate, optimizer.optimizer_type) == (values["learning_rate"], values["optimizer_type"])
    if MODEL_TYPES[model_type].takes_guidance:  # in training, apart from sampling
        assert of_flags.flow.guidance_scale == values["guidance_scale"] != values["sample_guidance"]
    # nobody has set them: for another family they are others'
    assert not network.model_fields_set | optimizer.model_fields_set
    other = type(of_flags).model_validate(of_flags.model_dump(exclude_unset=True) | {"model": {
        "model_type": "krea2", "pretrained_model_name_or_path": "m"}})  # fmt: skip
    assert (other.network.network_dim, other.network.network_alpha, other.optimizer.learning_rate) == (32, 32, 3e-4)


@pytest.mark.parametrize(
    ("model_type", "flags", "counts", "idle"),
    [
        ("flux", [], "network_dim network_alpha guidance_scale", "discrete_flow_shift"),
        ("flux", ["--network_weights", "a", "--dim_from_weights"], "learning_rate", "network_dim network_alpha"),
        ("flux", ["--timestep_sampling", "shift"], "discrete_flow_shift", ""),
        ("krea2", [], "network_dim", "guidance_scale"),
    ],
)
def test_only_defaults_that_count_are_said(model_type: str, flags: list[str], counts: str, idle: str) -> None:
    """A default that is said has an effect: the same option, set, is refused or left out exactly where it is not."""
    said = family_options(config_of(model_type, *flags)).keys()
    assert set(counts.split()) <= said
    assert not set(idle.split()) & said
    for key, value, field in options(config_of(model_type, *flags)):
        if field.default is FAMILY:
            noted: list[Any] = []
            try:
                load_config(["--model_type", model_type, *REQUIRED, *flags, f"--{key}", str(value)], noted)
            except UserError as error:
                noted = [error]
            without = [str(one) for one in noted if "has no effect" in str(one)]
            assert any(key in one for one in without) == (key not in said)


def test_alpha_is_the_rank_and_a_factor_is_one() -> None:
    assert config_of("flux", "--network_dim", "4").network.network_alpha == 4
    assert config_of("krea2", "--network_alpha", "1").network.network_alpha == 1
    assert config_of("krea2", "--optimizer_type", "Prodigy").optimizer.learning_rate == 1.0
    assert config_of("krea2", "--optimizer_type", "Prodigy", "--learning_rate", "0.5").optimizer.learning_rate == 0.5
    assert config_of("flux", "--learning_rate", "0", "--guidance_scale", "0").flow.guidance_scale == 0  # no "unset"


@pytest.mark.parametrize(
    ("flags", "on_gpu", "on_cpu"),
    [
        ([], "bf16", "no"),
        (["--full_bf16"], "bf16", "bf16"),
        (["--base_dtype", "fp16"], "fp16", "fp16"),
        (["--base_dtype", "fp32"], "bf16", "no"),
        (["--mixed_precision", "no"], "no", "no"),
    ],
)
def test_the_dtype_is_that_of_the_model_where_the_device_has_it(flags: list[str], on_gpu: str, on_cpu: str) -> None:
    config = config_of("flux", *flags)
    assert [with_precision(config, on).training.mixed_precision for on in (False, True)] == [on_gpu, on_cpu]


READY = [path for path in sorted((ROOT / "configs").rglob("*.toml")) if "\nmodel_type" in path.read_text()]


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_a_ready_configuration_has_the_tables_values_or_the_reason_beside_its_own(path: Path) -> None:
    text = path.read_text()
    keys = {key: value for table in tomllib.loads(text).values() for key, value in table.items()}
    values = family_defaults(keys["model_type"])
    own = [key for key in keys.keys() & values.keys() if keys[key] != values[key]]
    assert [key for key in own if not re.search(rf"^#.*\n{key} = |^{key} = [^#\n]*#", text, re.MULTILINE)] == []
    if path.stem.startswith("demo"):
        return
    of_family = {key for key, value in keys.items() if value == values.get(key)} | {"network_alpha"} & keys.keys()
    assert of_family - {"optimizer_type"} <= IN_THEM_TOO, "what the table says need not be said"
    script = LANGUAGE_LORA if keys["model_type"] in LANGUAGE_MODELS else LORA
    loaded = {key: value for key, value, _ in options(load_for(script, ["--config_file", str(path)]))}
    inert = {"max_train_steps", "save_every_n_steps"} if loaded["max_train_epochs"] else set()
    assert {key: loaded[key] for key in IN_THEM_TOO - {*own} - inert} == {
        key: values[key] for key in IN_THEM_TOO - {*own} - inert
    }


# of flux_train_network.py's and flux_2_train_network.py's argument parsers (sd-scripts 48d368f, musubi-tuner 30c658c)
PARSERS = {
    "networks.lora_flux": {
        "network_dim": 4, "network_alpha": 1.0, "learning_rate": 2e-6, "optimizer_type": "AdamW", "guidance_scale": 3.5,
        "mixed_precision": "no", "timestep_sampling": "sigma", "discrete_flow_shift": 3.0, "max_train_steps": 1600,
    },
    "networks.lora_flux_2": {
        "network_dim": 4, "network_alpha": 1.0, "learning_rate": 2e-6, "optimizer_type": "AdamW", "guidance_scale": 1.0,
        "mixed_precision": "no", "timestep_sampling": "sigma", "discrete_flow_shift": 1.0, "max_train_steps": 1600,
    },
}  # fmt: skip


@pytest.mark.parametrize("module", PARSERS)
def test_a_kohya_command_keeps_its_trainers_defaults_run_as_it_is_and_migrated(module: str, tmp_path: Path) -> None:
    command = ["--network_module", module, "--dataset_config", "d", "--network_train_unet_only"]
    command += ["--pretrained_model_name_or_path" if module.endswith("flux") else "--dit", "m"]
    script = "flux_train_network.py" if module.endswith("flux") else "flux_2_train_network.py"
    call(migrate_config, "--save_to", tmp_path / "my.toml", "--", "accelerate", "launch", script, *command)
    for config in (load_config(command), load_config(["--config_file", str(tmp_path / "my.toml")])):
        values = {key: value for key, value, _ in options(config)}
        assert {key: values[key] for key in PARSERS[module]} == PARSERS[module]


def test_languages_models_have_defaults_too() -> None:
    for model_type in LANGUAGE_MODELS:
        argv = ["--model_type", model_type, "--pretrained_model_name_or_path", "m", "--train_data", "d"]
        config = load_for(LANGUAGE_LORA, argv)
        assert (config.network.network_dim, config.network.network_alpha) == (16, 16)
        assert config.optimizer.learning_rate == presets(model_type)["learning_rate"][0] == 1e-4


def test_a_resumed_run_keeps_what_its_state_was_trained_with() -> None:
    """One of an earlier version has the defaults of then, which held for every family: no autocast, a shift of 3."""
    config = config_of("krea2", "--timestep_sampling", "shift")
    old = as_in_state(config, {"network_dim": 16, "network_alpha": 1.0, "optimizer_type": "AdamW"})
    assert (old.network.network_dim, old.network.network_alpha) == (16, 1.0)
    assert (old.training.mixed_precision, old.flow.discrete_flow_shift) == ("no", 3.0)
    now = with_precision(config, on_cpu=False)
    again = as_in_state(config, {key: value for key, (value, _) in family_options(now).items()})
    assert [value for value, _ in family_options(again).values()] == [v for v, _ in family_options(now).values()]
    given = as_in_state(config_of("krea2", "--network_alpha", "8", "--mixed_precision", "bf16"), {"network_alpha": 1.0})
    assert (given.network.network_alpha, given.training.mixed_precision) == (8, "bf16")  # what is set is set


@pytest.mark.parametrize("shift", [6.0, 3.0, 1.7])
def test_an_unset_shift_is_that_of_the_models_scheduler(shift: float, tmp_path: Path) -> None:
    """A21. Of a folder; of a single file the name tells base from Turbo, whose published schedulers have 6 and 3."""
    folder = tiny_z_pipeline(tmp_path / "z")
    scheduler = folder / "scheduler" / "scheduler_config.json"
    scheduler.write_text(scheduler.read_text().replace('"shift": 3.0', f'"shift": {shift}'))
    assert f'"shift": {shift}' in scheduler.read_text()
    config = load_config(["--model_type", "z_image", "--pretrained_model_name_or_path", str(folder),
                          "--dataset_config", "d", "--timestep_sampling", "shift"])  # fmt: skip
    family = model_family(config.model)
    assert resolve_sampling(config.flow, family).discrete_flow_shift == shift
    assert family.distilled == (shift == 3.0)
    given = config.flow.model_copy(update={"discrete_flow_shift": 2.0})
    assert resolve_sampling(given, family).discrete_flow_shift == 2.0
