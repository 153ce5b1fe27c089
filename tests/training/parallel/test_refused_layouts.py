"""What does not go with a layout is refused, each by the one key to change; without the layout it is allowed."""

from __future__ import annotations

import pytest

from library.config.pretrain_schema import PretrainConfig
from library.config.rules import find_conflicts
from library.config.schema import TrainConfig

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
    for name, value in (("microbatches", 2), ("pp_balance", "weights")):
        assert refused(config, needed, {f"parallel.{name}": value}) == [name]
    if config is PretrainConfig:  # of a batch of eight
        assert refused(config, needed, {"parallel.pp": 2, "parallel.microbatches": 9}) == ["microbatches"]
