"""Settings that cannot work, or not with a layout, end with one line, before anything is encoded or loaded."""

from __future__ import annotations

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from library.config import load_config
from library.config.pretrain_schema import PretrainConfig
from library.config.rules import find_conflicts
from library.config.schema import TrainConfig
from library.errors import UserError
from tests.runs import arguments, metadata, run, write_dataset

CLIP = {"text_encoder_lr": [1e-3], "max_train_steps": 2}


@pytest.fixture(scope="module")
def states(base: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the states of a finished run of the transformer alone, and of one with CLIP."""
    folder = tmp_path_factory.mktemp("states")
    run(base, dataset, folder / "plain", max_train_steps=2, save_state=True)
    run(base, dataset, folder / "text", **CLIP, save_state=True)
    return folder


def _changed(base: Path, copy: Path, part: str) -> Path:
    """Copy a pipeline with other weights in one part."""
    shutil.copytree(base, copy)
    (file,) = (copy / part).glob("*.safetensors")
    save_file({name: tensor + 0.5 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return copy


def _refusal(base: Path, tmp_path: Path, **settings: object) -> str:
    """Return the message, after checking that nothing was cached for it."""
    data = write_dataset(tmp_path / "fresh")
    with pytest.raises(UserError) as caught:
        run(base, data, tmp_path / "out", **settings)
    assert list((tmp_path / "fresh").rglob("*.safetensors")) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_state_of_another_base_or_other_text_encoders(base: Path, states: Path, tmp_path: Path) -> None:
    other = _changed(base, tmp_path / "other", "transformer")
    resumed = {"resume": states / "plain" / "lora-state", "max_train_steps": 4}
    assert "was trained on another base model; set the one" in _refusal(other, tmp_path, **resumed)
    other = _changed(base, tmp_path / "text", "text_encoder")
    resumed = CLIP | {"resume": states / "text" / "lora-state", "max_train_steps": 4}
    assert "was trained with text_encoders = " in _refusal(other, tmp_path, **resumed)


def test_a_folder_of_the_images_is_no_place_for_a_run(base: Path, tmp_path: Path) -> None:
    data = write_dataset(tmp_path)
    (folder,) = {path.parent for path in tmp_path.rglob("*.png")}
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="holds images of the dataset, no place for plots; choose another"):
        run(base, data, folder)
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_to_validate_on_and_too_many_swapped_blocks(base: Path, tmp_path: Path) -> None:
    said = _refusal(base, tmp_path / "a", save_every_n_steps=1, save_best=True)
    assert said.startswith("save_best: nothing is held out to validate on; ")
    said = _refusal(base, tmp_path / "b", blocks_to_swap=40, gradient_checkpointing=True)
    assert said.startswith("blocks_to_swap: 40 is more than this model allows; set at most ")


def test_a_state_that_is_finished_or_damaged(base: Path, states: Path, tmp_path: Path) -> None:
    state = states / "plain" / "lora-state"
    assert "is at step 2 and the run ends at 2" in _refusal(base, tmp_path, resume=state, max_train_steps=2)
    for name in ("optimizer.safetensors", "schedule.json", "weights.safetensors"):
        copy = tmp_path / name.replace(".", "-")
        shutil.copytree(state, copy)
        (copy / name).write_bytes((copy / name).read_bytes()[:20])
        assert f"{copy}/{name.split('.')[0]}" in _refusal(base, tmp_path, resume=copy)


def test_weights_to_go_on_from_that_are_no_lora(base: Path, tmp_path: Path) -> None:
    save_file({"something.weight": torch.zeros(2, 2)}, tmp_path / "x.safetensors")
    assert "x.safetensors" in _refusal(base, tmp_path, network_weights=tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "settings",
    [
        {"text_encoder_lr": [0.5]},
        {"network_args": ["loraplus_lr_ratio=4"]},
        {"text_encoder_lr": [1.0], "network_args": ["loraplus_text_encoder_lr_ratio=2"]},
    ],
)
@pytest.mark.parametrize("optimizer", ["Prodigy", "dadaptation.DAdaptAdam"])
def test_several_rates_for_an_optimizer_that_takes_one(
    base: Path, tmp_path: Path, optimizer: str, settings: dict[str, object]
) -> None:
    message = _refusal(base, tmp_path, optimizer_type=optimizer, learning_rate=1.0, **settings)
    assert f"{optimizer} takes one learning rate for all weights and has several" in message


def test_a_lora_names_the_text_encoders_it_was_trained_with(base: Path, states: Path) -> None:
    named = metadata(states / "text")["tandem.text_encoder_fingerprint"]
    assert "tandem.text_encoder_fingerprint" not in metadata(states / "plain")
    assert named in (states / "text" / "lora-state" / "position.json").read_text()


def test_a_format_that_a_program_or_every_program_would_not_read(base: Path, tmp_path: Path) -> None:
    said = _refusal(base, tmp_path / "a", save_for=["diffusers", "sd-scripts"], max_train_steps=1)
    assert "save_for: sd-scripts reads no LoRA of " in said
    assert said.endswith(" from save_format diffusers; set save_format = kohya")
    text = {"text_encoder_lr": 1e-3, "network_args": ["train_t5xxl=True"], "save_format": "diffusers"}
    assert "save_format: no program reads text_encoder_2." in _refusal(base, tmp_path / "b", **text)


T5, ALONE, FP8 = {"network_args": ["train_t5xxl=True"]}, {"network_train_text_encoder_only": True}, {"fp8_base": True}
COMFY, LORA = {"save_format": "comfy"}, {"network_type": "lora"}
DORA, PISSA = COMFY | {"network_type": "dora"}, {"init_lora_weights": "pissa"}
DISTILLED = {"distill_from": "x", "distill_lora": "y"}
# settings, and a part of the line that refuses them
REFUSED: list[tuple[dict[str, object], str]] = [
    ({"validate_every_n_steps": 2}, "validate_every_n_steps: nothing is held out to validate on; set validation_split"),
    ({"resume": "nowhere"}, "resume: nowhere is not a training state"),
    ({"mixed_precision": "fp16"}, "mixed_precision: fp16 needs a GPU"),
    ({"network_weights": "nowhere.safetensors"}, "nowhere.safetensors"),
    ({"sample_prompts": "nowhere.txt"}, "sample_prompts: nowhere.txt: no such file"),
    ({"sample_prompts": "a cat --w 64"}, "a cat --w 64: no such file; prompts themselves stand in a list"),
    ({"pretrained_model_name_or_path": "nowhere"}, "nowhere"),
    ({"dataset_config": "nowhere.toml"}, "nowhere.toml"),
    ({"masked_loss": True}, "masked_loss is set but no subset has masks"),
    (COMFY | {"network_type": "loha", "network_dropout": 0.1}, "network_dropout: network_type loha has no such"),
    (DORA | {"network_args": ["module_dropout=0.1"]}, "module_dropout: network_type dora has no"),
    (DORA | PISSA, "init_lora_weights: pissa is for network_type lora"),
    ({"network_type": "boft"}, "'boft' does not fit: it is no longer trained; use lora, dora"),
    (LORA | {"init_lora_weights": "olora"}, "'olora' does not fit: this start is gone; use pissa"),
    (LORA | PISSA | {"network_dim": 200}, "network_dim: a rank of 200, where no layer"),
    ({"distill_weight": 0.5}, "distill_weight: has no effect without distill_from; remove it"),
    ({"distill_from": "x"}, "distill_from: it needs the LoRA as it was trained in bf16; set network_weights"),
    (DISTILLED | {"loss_type": "huber"}, "learns by the squared error, not huber"),
    ({"quantised_activations": "row"}, "quantised_activations: has no effect, the model has no fp8 weights; set fp8"),
    ({"quantised_compute": "dequant"}, "quantised_compute: has no effect, the model has no fp8 weights; set fp8_base"),
    (FP8 | {"quantised_compute": "quantised"}, "quantised_compute: products in fp8 need an Ada, Hopper or"),
    (FP8 | {"fp8_exclude_patterns": ["atn"]}, "excluded pattern 'atn' matches no linear layer; correct"),
    (FP8 | {"quantised_activations": "auto"}, "quantised_activations = auto: is read from a quantised file"),
    ({"text_encoder_lr": [1e-5, 1e-5]}, "the second value is T5's, which is not trained; add train_t5xxl=True"),
    (T5, "train_t5xxl=True has no learning rate; set text_encoder_lr"),
    (T5 | {"text_encoder_lr": [1e-5, 0]}, "train_t5xxl=True has no learning rate"),
    (ALONE, "no text encoder is trained; set text_encoder_lr"),
    (ALONE | CLIP | {"network_args": ["img_attn_dim=8"]}, "img_attn_dim is about the transformer, which is not"),
    ({"network_args": ["loraplus_text_encoder_lr_ratio=4"]}, "has no effect without text_encoder_lr; remove it"),
    ({"blocks_to_swap": 1, "torch_compile": True}, "torch_compile: backward of a compiled block would read"),
    (
        {"torch_compile": True, "gradient_checkpointing": True, "blocks_to_swap": 1, "activation_budget_mb": 9},
        "activation_budget_mb: compiled blocks keep attention's outputs only without blocks_to_swap",
    ),
    (
        {"dynamo_mode": "reduce-overhead", "gradient_checkpointing": True},
        "dynamo_mode: the graphs of reduce-overhead fail where blocks are recomputed",
    ),
]
# refused by the configuration
CONTRADICTING: list[tuple[dict[str, object], str]] = [
    ({"network_type": "lokr", "save_format": "diffusers"}, "save_format: no program loads network_type lokr from"),
    (DORA | {"network_args": ["factor=4"]}, "factor: has no effect on network_type dora"),
    (LORA | {"network_args": [" img_mlp_factor = 4"]}, "img_mlp_factor: has no effect on network_type lora"),
    ({"model_type": "z_image", "guidance_scale": 3.5}, "which takes no guidance"),
    ({"model_type": "z_image", "t5xxl": "t5.safetensors"}, 't5xxl: has no effect with model_type = "z_image"'),
    ({"model_type": "z_image", "zero_cond_t": True}, 'zero_cond_t: has no effect with model_type = "z_image"'),
    ({"memory": "auto", "blocks_to_swap": 2}, 'blocks_to_swap: memory = "auto" chooses it'),
    ({"memory": "auto", "gradient_checkpointing": True}, 'gradient_checkpointing: memory = "auto" chooses it'),
    ({"memory": "auto", "memory_dry_run": False}, 'memory_dry_run: memory = "auto" counts a step'),
    ({"memory": "auto", "shard": 2}, 'memory: "auto" tries the full model'),
    ({"activation_budget_mb": 100}, "activation_budget_mb: has no effect without gradient_checkpointing"),
    ({"cpu_offload_checkpointing": True}, "cpu_offload_checkpointing: has no effect without gradient_checkpointing"),
    ({"preserve": "prior", "pp": 2}, "preserve: asks the model twice in a step"),
    ({"preserve": "none", "preserve_class": "ring"}, "preserve_class: has no effect"),
    ({"preserve_outside_mask": True}, "preserve_outside_mask: has no effect"),
    ({"preserve": "prior", "preserve_share": 1.0}, "preserve_share"),
    ({"preserve": "prior", "prior_loss_weight": 0.0}, "prior_loss_weight: 0 leaves preserve = 'prior' without effect"),
]
# refused before a model or a dataset is looked for
AT_ONCE: list[tuple[dict[str, object], str]] = [
    ({"optimizer_type": "AdamWW"}, "no optimizer 'AdamWW'; did you mean 'AdamW'?"),
    ({"optimizer_args": ["weight_decai=0.1"]}, "did you mean 'weight_decay'?"),
    ({"network_weights": "nowhere.safetensors"}, "network_weights: nowhere.safetensors does not exist"),
    ({"resume": "nowhere"}, "resume: nowhere is not a training state (no such folder)"),
    ({"output_dir": "/proc/x"}, "output_dir: /proc/x cannot be written to"),
]
if not torch.cuda.is_available():
    REFUSED.append(({"attention": "cudnn", "max_train_steps": 1}, "attention: 'cudnn' cannot run"))
if find_spec("wandb") is None:
    REFUSED.append(({"log_with": "wandb"}, "log_with: wandb is not installed; pip install wandb, or use tensorboard"))


def test_settings_that_cannot_work_are_refused_in_one_line(
    base: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != "/proc" and access(path, mode))  # not root's
    nothing = tmp_path / "no-model", tmp_path / "no-data.toml"
    cases = [(base, dataset, *row) for row in REFUSED] + [(*nothing, *row) for row in AT_ONCE]
    for model, data, settings, message in cases:
        with subtests.test(f"{settings}"):
            with pytest.raises(UserError) as caught:
                run(model, data, tmp_path / "out", **settings)
            assert message in str(caught.value)
            assert "\n" not in str(caught.value)


def test_settings_that_contradict_each_other_are_refused_by_the_configuration(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for settings, message in CONTRADICTING:
        with subtests.test(f"{settings}"), pytest.raises(UserError, match=re.escape(message)):
            load_config(arguments(tmp_path, tmp_path / "data.toml", tmp_path / "out", **settings))


SHARD, TP, PP, ZERO = {"shard": 2}, {"tp": 2}, {"pp": 2}, {"zero": 1}
Config = type[TrainConfig | PretrainConfig]
SPLITS = (SHARD, TP, PP)
TWO, THREE = {"zero": 2}, {"zero": 3}
MAP = {"device_map": "balanced"}
COMPILED, DRY_RUN = {"accelerate.torch_compile": True}, {"training.memory_dry_run": True}
# the layouts, settings, and the key that the refusal begins with; None: they go together
IMAGES = [
    ((*SPLITS, ZERO, MAP), {"training.blocks_to_swap": 1}, "blocks_to_swap"),
    ((*SPLITS, ZERO), COMPILED, "torch_compile"),
    ((*SPLITS, ZERO), DRY_RUN, "memory_dry_run"),
    ((*SPLITS, ZERO, MAP), {"training.mixed_precision": "fp16"}, "mixed_precision"),
    ((*SPLITS, ZERO), {"optimizer.text_encoder_lr": 1e-4}, "text_encoder_lr"),
    ((SHARD, ZERO), {"training.mixed_precision": "bf16", "training.full_bf16": True}, "full_bf16"),
    ((TP,), {"training.mixed_precision": "bf16", "training.full_bf16": True}, None),
    ((SHARD, PP, THREE), {"network.network_type": "dora", "saving.save_format": "comfy"}, "save_format"),
    ((TP,), {"network.network_type": "dora"}, "network_type"),
    ((TP,), {"precision.fp8_scaled": True, "precision.quantised_activations": "row"}, "quantised_activations"),
    ((PP,), {"model.model_type": "z_image"}, "model_type"),
    ((ZERO, THREE), {"training.memory": "auto"}, "memory"),
    ((TWO,), {"optimizer.optimizer_type": "Adafactor"}, "optimizer_type"),
    ((TWO,), {"optimizer.optimizer_type": "Prodigy"}, "optimizer_type"),
    ((ZERO,), {"optimizer.optimizer_type": "AdamW8bit"}, "optimizer_type"),
    ((TWO, MAP), {"precision.fp8_scaled": True}, None),
    ((THREE,), {"precision.fp8_scaled": True}, "fp8_scaled"),
    ((THREE,), {"precision.fp8_base": True}, "fp8_base"),
]
OFFLOADED = {"training.gradient_checkpointing": True, "training.cpu_offload_checkpointing": True}
IMAGES.append(((MAP,), OFFLOADED, "cpu_offload_checkpointing"))
PRETRAINING = [
    ((SHARD, PP), {"training.full_bf16": True}, "full_bf16"),
    ((SHARD,), {"optimizer.optimizer_type": "Muon"}, "optimizer_type"),
    ((PP,), {"optimizer.optimizer_type": "Muon"}, None),
    ((PP,), {"optimizer.optimizer_type": "Prodigy"}, "optimizer_type"),
    ((PP,), COMPILED, "torch_compile"),
    (SPLITS, {}, None),
]


def refused(config: Config, needed: dict[str, object], settings: dict[str, object]) -> list[str]:
    """Return the first key of each refusal of ``settings``, named ``section.key``."""
    sections: dict[str, dict[str, object]] = {}
    for name, value in {**needed, **settings}.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return [conflict.keys[0] for conflict in find_conflicts(config.model_validate(sections))]


@pytest.mark.parametrize(
    ("config", "needed", "cases"),
    [
        (TrainConfig, {"model.pretrained_model_name_or_path": ".", "dataset.dataset_config": "data.toml"}, IMAGES),
        (PretrainConfig, {"model.preset": "llama-tiny", "data.data_dir": "."}, PRETRAINING),
    ],
    ids=["images", "pretraining"],
)
def test_what_does_not_go_with_a_layout_is_refused(
    config: Config, needed: dict[str, object], cases: list, subtests: pytest.Subtests
) -> None:
    for layouts, settings, key in cases:
        for layout in layouts:
            with subtests.test(f"{layout} {settings}"):
                parallel = {f"parallel.{name}": size for name, size in layout.items()}
                assert refused(config, needed, settings | parallel) == ([key] if key else [])
                if config is TrainConfig:
                    assert refused(config, needed, settings) == []
    for one, other, key in ((ZERO, SHARD, "zero"), (ZERO, TP, "zero"), (ZERO, PP, "zero"), (PP, SHARD, "shard")):
        parallel = {f"parallel.{name}": size for name, size in (one | other).items()}
        if config is TrainConfig or one is PP:
            assert refused(config, needed, parallel) == [key], parallel
    assert refused(config, needed, {"parallel.microbatches": 2}) == ["microbatches"]
    if config is PretrainConfig:  # of a batch of eight
        assert refused(config, needed, {"parallel.pp": 2, "parallel.microbatches": 9}) == ["microbatches"]
