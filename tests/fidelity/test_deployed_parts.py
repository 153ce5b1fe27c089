"""What a deployed folder brings besides weights, on every family's small model: what it changes is named, the rest not.

Parts are changed in their files by plain JSON and tensor operations. What is expected of a change follows from what
transformers and diffusers do with the field.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file, save_file

from library.config.schema import ModelConfig
from library.console import Console
from library.errors import UserError
from library.fidelity import deployed_parts
from library.fidelity.calibration import Calibration, CalibrationOptions
from library.fidelity.deployed import parse_deployment
from library.fidelity.deployed_parts import captions_of, complete, settle, words
from library.fidelity.runs import prepare_eval_set, run_variant
from library.fidelity.serving import REFERENCE, Models, Served, Variant
from tests.fidelity.planted_faults import shift_vocabulary
from tests.runs import write_dataset
from tests.tiny import tiny_flux_pipeline
from tests.tiny_ernie_image import tiny_ernie_pipeline
from tests.tiny_flux2 import tiny_dev_pipeline, tiny_flux2_pipeline
from tests.tiny_flux3 import tiny_flux3_pipeline
from tests.tiny_krea2 import tiny_krea2_pipeline
from tests.tiny_qwen import tiny_qwen_pipeline
from tests.tiny_qwen_21 import tiny_21_pipeline
from tests.tiny_z_image import tiny_z_pipeline

QUIET = Console(quiet=True)
STEPS = 4
PIPELINES: dict[str, Callable[[Path], Path]] = {
    "ernie_image": tiny_ernie_pipeline,
    "flux": tiny_flux_pipeline,
    "flux_fill": partial(tiny_flux_pipeline, model_type="flux_fill"),
    "flux2_klein": tiny_flux2_pipeline,
    "flux2_dev": tiny_dev_pipeline,
    "flux3_klein": tiny_flux3_pipeline,
    "krea2": tiny_krea2_pipeline,
    "qwen_image": tiny_qwen_pipeline,
    "qwen_image_21": tiny_21_pipeline,
    "z_image": tiny_z_pipeline,
}
FAST = ("flux", "z_image")
OF_QWEN = ("krea2", "qwen_image", "qwen_image_21")  # their VAE is Qwen-Image's


@dataclass
class Deployment:
    """A reference, and copies of it to spoil."""

    name: str
    base: Path
    folder: Path
    calibration: Calibration

    def copy(self) -> Path:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.base, self.folder)
        return self.folder

    def models(self, deploy: Path) -> Models:
        config = ModelConfig(model_type=self.name, pretrained_model_name_or_path=str(self.base))
        return Models(config, parse_deployment(str(deploy)), {}, torch.float32, torch.device("cpu"))

    def settled(self, steps: int = STEPS) -> tuple[Models, Variant, dict[str, str]]:
        models = self.models(self.folder)
        return models, *settle(models, complete(models, Variant(weights=True)), self.calibration, steps)

    def named(self, cause: str) -> str:
        """Return the words of the only cause, which ``cause`` must be."""
        models, variant, _ = self.settled()
        assert {*variant.changes()} == {"weights", cause}
        return words(models, variant.only(cause), cause, captions_of(self.calibration))


@cache
def prepared(name: str, folder: Path) -> Deployment:
    base = PIPELINES[name](folder / name)
    masks = {"inpaint_masks": '["rectangles"]'} if name == "flux_fill" else {}
    dataset = write_dataset(folder / f"data_{name}", images=2, **masks)
    for number, caption in enumerate(("a red hat", "its cat, 2")):
        (dataset.parent / "images" / f"{number}.txt").write_text(caption)
    config = ModelConfig(model_type=name, pretrained_model_name_or_path=str(base))
    made = Deployment(name, base, folder / f"deployed_{name}", None)  # type: ignore[arg-type]
    plan = Models(config, parse_deployment("cast"), {}, torch.float32, torch.device("cpu")).plan(
        CalibrationOptions(str(dataset), images=2, sigmas=(0.5,))
    )
    made.calibration = plan.prepare(QUIET)
    return made


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts")


@pytest.fixture(params=[name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PIPELINES])
def deployment(request: pytest.FixtureRequest, place: Path) -> Deployment:
    return prepared(request.param, place)


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_text_config(folder: Path, **values: Any) -> None:
    path = folder / "text_encoder" / "config.json"
    known = json.loads(path.read_text())
    inner = known.get("text_config", known)
    assert {*values} <= {*inner}
    inner |= values
    path.write_text(json.dumps(known))


def tokenizer_of(folder: Path) -> Path:
    return next(folder / name for name in ("tokenizer", "processor") if (folder / name / "tokenizer.json").exists())


def edit_tokenizer(folder: Path, how: Callable[[dict[str, Any]], None]) -> None:
    path = tokenizer_of(folder) / "tokenizer.json"
    known = json.loads(path.read_text())
    how(known)
    path.write_text(json.dumps(known))


def save_again(folder: Path) -> None:
    """Write JSON with its keys in another order, and weights in two shards, as other programs save them."""
    for path in folder.rglob("*.json"):
        known = json.loads(path.read_text())
        if path.name != "tokenizer.json":
            known = dict(reversed(known.items())) | ({"_name_or_path": "x"} if path.name == "config.json" else {})
        path.write_text(json.dumps(known, indent=1))
    for path in [*folder.glob("text_encoder*/*.safetensors"), *folder.glob("vae/*.safetensors")]:
        tensors = load_file(path)
        names = list(tensors)
        places = {name: f"{path.stem}-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
        path.unlink()
        for file in {*places.values()}:
            save_file({name: tensors[name] for name in names if places[name] == file}, path.with_name(file))
        index = {"metadata": {}, "weight_map": places}
        path.with_name(f"{path.name}.index.json").write_text(json.dumps(index))


# ------------------------------------------------------------------------------------------------ equal in effect


def test_the_same_parts_and_parts_saved_again_are_no_causes(deployment: Deployment) -> None:
    folder = deployment.copy()
    _, variant, same = deployment.settled()
    assert variant == Variant(weights=True)
    assert not any(same.values())
    save_again(folder)
    models, variant, same = deployment.settled()
    assert complete(models, Variant(weights=True)) != variant, "no file was seen as another"
    assert variant == Variant(weights=True)
    assert "get the same embeddings" in same["text"]
    assert "get the same latents" in same["vae"]
    assert "the same tokens" in same["tokenizer"]


def test_a_vocabulary_with_merges_beside_it_is_the_same_tokenizer(place: Path) -> None:
    deployment = prepared("flux", place)
    folder = deployment.copy() / "tokenizer"
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(each) for each in model["merges"])]))
    (folder / "tokenizer.json").unlink()
    _, variant, same = deployment.settled()
    assert variant == Variant(weights=True)
    assert "the same tokens" in same["tokenizer"]
    (folder / "merges.txt").unlink()
    with pytest.raises(UserError, match=r"tokenizer has vocab.json without merges.txt"):
        deployment.settled()


def test_what_does_not_touch_the_captions_is_a_line_and_no_cause(place: Path) -> None:
    deployment = prepared("flux2_dev", place)
    edit(tokenizer_of(deployment.copy()) / "tokenizer_config.json", model_max_length=99)
    edit(deployment.folder / "scheduler" / "scheduler_config.json", shift=1.7)  # dynamic: the static one is not used
    _, variant, same = deployment.settled()
    assert variant == Variant(weights=True)
    assert "model_max_length 99" in same["tokenizer"]
    assert "shift 1.7 instead of" in same["shift"]


# -------------------------------------------------------------------------------------------------------- faults


def test_a_shifted_vocabulary_is_named_and_measured(deployment: Deployment) -> None:
    edit_tokenizer(deployment.copy(), shift_vocabulary)
    said = deployment.named("tokenizer")
    count = len(captions_of(deployment.calibration))
    assert f"other tokens for {count} of {count} captions" in said
    assert "vocabulary" in said
    models, variant, _ = deployment.settled()
    jobs = [source.text for source in deployment.calibration.sources]
    found, own = (models.texts(each, jobs, changed=True) for each in (variant.only("tokenizer"), REFERENCE))
    errors = [float((found[0][name].float() - each.float()).abs().max()) for name, each in own[0].items()]  # type: ignore[index]
    assert max(errors) > 1e-2


def test_text_encoder_settings_are_named(deployment: Deployment) -> None:
    clip = deployment.name.startswith("flux_") or deployment.name == "flux"
    for values in (
        {"layer_norm_eps" if clip else "rms_norm_eps": 0.05},
        {"hidden_act": "relu"},
        {"num_attention_heads": 2} if clip else {"num_key_value_heads": 77},
    ):
        edit_text_config(deployment.copy(), **values)
        (field, value), *_ = values.items()
        if value == 77:
            with pytest.raises(UserError, match=rf"text_encoder config {field} 77 instead of"):
                deployment.settled()
        else:
            assert f"text_encoder config {field} {value} instead of" in deployment.named("text")


def test_noise_levels_of_another_scheduler_are_named(deployment: Deployment) -> None:
    path = deployment.copy() / "scheduler" / "scheduler_config.json"
    plain = json.loads(path.read_text())
    for values in (
        {"use_dynamic_shifting": not plain.get("use_dynamic_shifting"), "shift": 9.0},
        {"invert_sigmas": True},
        {"shift_terminal": 0.3},
        {"num_train_timesteps": 500},
        {"use_karras_sigmas": True},
    ):
        path.write_text(json.dumps(plain | values))
        said = deployment.named("shift")
        assert all(f"scheduler {field} {value} instead of" in said for field, value in values.items())
    path.write_text(json.dumps(plain | {"time_shift_type": "cubic"}))
    with pytest.raises(UserError, match="time_shift_type"):
        deployment.settled()


def test_another_sampler_is_seen_and_said_not_to_be_looked_at(place: Path) -> None:
    deployment = prepared("flux", place)
    path = deployment.copy() / "scheduler" / "scheduler_config.json"
    plain = json.loads(path.read_text())
    for values in (
        {"_class_name": "FlowMatchHeunDiscreteScheduler"},
        {"stochastic_sampling": True},
        {"solver_order": 3},
        {"use_flow_sigmas": True},
    ):
        path.write_text(json.dumps(plain | values))
        _, variant, same = deployment.settled()
        assert variant == Variant(weights=True)
        assert f"{next(iter(values.values()))} instead of" in same["shift"]
        assert "another sampler, which is not looked at" in same["shift"]
    path.write_text(json.dumps(plain | {"stochastic_sampling": True, "use_karras_sigmas": True}))
    _, variant, same = deployment.settled()
    assert {*variant.changes()} == {"weights", "shift"}
    assert "stochastic_sampling True instead of False: another sampler" in same["shift"]
    path.write_text(json.dumps(plain | {"use_karras_sigmas": True}))
    assert "in 2 steps, but not in 28" in deployment.settled(steps=2)[2]["shift"]
    path.write_text(json.dumps(plain | {"shift_terminal": 0.3}))
    models, variant, same = deployment.settled(steps=0)
    models.check(complete(models, Variant(weights=True)), 0, has_masks=False)  # not refused
    assert variant == Variant(weights=True)
    assert "shift_terminal 0.3 instead of None: not looked at, because nothing is sampled" in same["shift"]


def test_what_is_zero_in_the_reference_can_differ(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = prepared("flux", place)
    declared = Variant(vae=Served(dtype="bf16"))
    for level, wanted in ((1.0, declared), (0.0, REFERENCE)):
        made = {REFERENCE: [torch.zeros(3)], declared: [torch.full((3,), level)]}
        monkeypatch.setattr(deployed_parts, "_made", lambda _models, variant, *_rest, made=made: made[variant])
        variant, _ = settle(deployment.models(deployment.base), declared, deployment.calibration, STEPS)
        assert variant == wanted


def test_factors_of_another_vae_are_named(deployment: Deployment) -> None:
    path = deployment.copy() / "vae" / "config.json"
    known = json.loads(path.read_text())
    if deployment.name in OF_QWEN:
        mean = [0.5 + each for each in known["latents_mean"]]
        changes: dict[str, Any] = {"latents_mean": mean, "latents_std": [2 * each for each in known["latents_std"]]}
    elif deployment.name.startswith(("flux2", "flux3")):
        changes = {"batch_norm_eps": 0.5, "norm_num_groups": 4}
    elif deployment.name == "ernie_image":  # whose pipeline takes an epsilon of its own
        changes = {"norm_num_groups": 4}
    else:
        changes = {"scaling_factor": 0.9, "shift_factor": 0.4, "norm_num_groups": 4}
    for field, value in changes.items():
        edit(deployment.copy() / "vae" / "config.json", **{field: value})
        assert f"VAE {field}" in deployment.named("vae")


@pytest.mark.parametrize(
    ("name", "values", "word"),
    [
        ("flux", {"padding_side": "left"}, "padding_side left instead of right"),
        ("flux", {"model_max_length": 6}, "model_max_length 6 instead of 16"),
        ("flux2_klein", {"padding_side": "left"}, "padding_side left instead of right"),
        ("flux2_klein", {"pad_token": "<|im_end|>"}, "pad_token <|im_end|> instead of"),
    ],
)
def test_how_a_tokenizer_fills_up_and_cuts_is_named(name: str, values: dict[str, Any], word: str, place: Path) -> None:
    deployment = prepared(name, place)
    edit(deployment.copy() / "tokenizer" / "tokenizer_config.json", **values)
    assert word in deployment.named("tokenizer")


def test_timesteps_follow_the_schedulers_own_number_of_them(place: Path) -> None:
    """As diffusers' pipelines: timesteps of the scheduler over 1000 are what the transformer is told."""
    deployment = prepared("flux", place)
    edit(deployment.copy() / "scheduler" / "scheduler_config.json", num_train_timesteps=250)
    models, variant, _ = deployment.settled()
    eval_set = prepare_eval_set(models, deployment.calibration, REFERENCE, STEPS)
    told: list[float] = []
    network = models.base(deployed=False)
    network.register_forward_pre_hook(lambda _, args, kwargs: told.append(float(kwargs["timestep"])), with_kwargs=True)
    run_variant(models, variant.only("shift"), eval_set, QUIET, "x", network)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(deployment.folder / "scheduler")
    scheduler.set_timesteps(sigmas=models.sigmas(REFERENCE, STEPS, 16)[:-1], mu=0.0)  # mu 0: shifted already
    assert told[1 : 1 + STEPS] == pytest.approx((scheduler.timesteps / 1000).tolist())


def test_layers_that_a_folder_reads_of_its_text_encoder_are_named(place: Path) -> None:
    deployment = prepared("krea2", place)
    index = deployment.copy() / "model_index.json"
    layers = json.loads(index.read_text())["text_encoder_select_layers"]
    edit(index, text_encoder_select_layers=[*layers[:-1], layers[0]])
    assert "model_index.json layers" in deployment.named("text")


def test_a_pipeline_without_what_it_names_is_refused(deployment: Deployment) -> None:
    index = json.loads(next(deployment.copy().glob("*model_index.json")).read_text())
    for part in {"scheduler", tokenizer_of(deployment.folder).name} & {*index}:
        shutil.rmtree(deployment.copy() / part)
        with pytest.raises(UserError, match=rf"{part}: not there"):
            deployment.settled()


def test_a_file_by_a_flag_is_compared_by_its_embeddings(place: Path) -> None:
    """As ComfyUI's separate files: the same weights in another file are no cause, others are."""
    deployment = prepared("flux", place)
    models = deployment.models(deployment.base)
    tensors = load_file(deployment.base / "text_encoder_2" / "model.safetensors")
    for factor, causes in ((1.0, {"weights"}), (1.1, {"weights", "text"})):
        file = place / f"t5_{factor}.safetensors"
        save_file({name: tensor * factor for name, tensor in reversed(tensors.items())}, file)
        declared = Variant(weights=True, text=Served((("t5xxl", str(file)),)))
        variant, _ = settle(models, declared, deployment.calibration, STEPS)
        assert {*variant.changes()} == causes
