"""Which options a resumed state must have been trained with; the options say it themselves."""

from __future__ import annotations

from library.config import load_config
from library.config.load import load_for
from library.config.markers import resume_keys
from library.config.scripts import LANGUAGE_LORA, LLM

OF_A_LORA = {
    "optimizer_type", "optimizer_args", "learning_rate", "text_encoder_lr", "network_type", "use_rslora",
    "init_lora_weights", "network_dim", "dim_from_weights", "network_alpha", "network_args", "full_bf16", "ema_decay",
    "fp8_base", "fp8_scaled", "fp8_granularity", "fp8_format", "fp8_exclude", "fp8_exclude_patterns", "fp8_rounding",
}  # fmt: skip
OF_CONVERSATIONS = {"chat_template", "train_on", "max_length", "packing", "train_batch_size", "validation_split"}
OF_PRETRAINING = {
    "preset", "context", "optimizer_type", "text_encoder_lr", "optimizer_args", "learning_rate", "weight_decay",
    "full_bf16", "seed", "ema_decay",
}  # fmt: skip


def test_each_training_has_its_resume_keys() -> None:
    model = ["--pretrained_model_name_or_path", "m"]
    assert resume_keys(load_config([*model, "--dataset_config", "d"])).keys() == OF_A_LORA
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
