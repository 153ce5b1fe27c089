"""Other words for options: each finds one that is there; a wrong key's remedy names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from library.config.load import load_config
from library.config.scripts import LANGUAGE_LORA, LLM, LORA, fields, meant_by, synonyms
from library.errors import UserError
from library.files import read_toml

HERE = Path(__file__).resolve().parents[2] / "library/config"


def test_every_synonym_means_options_that_exist() -> None:
    known = {*fields(LORA), *fields(LANGUAGE_LORA), *fields(LLM)}
    unknown = {word: strange for word, keys in synonyms().items() if (strange := {*keys} - known)}
    assert not unknown
    written = read_toml(HERE / "synonyms.toml")[0]
    assert all(word == word.lower() and " " not in word and keys.split() for word, keys in written.items())
    assert all(len(keys.split()) == len({*keys.split()}) for keys in written.values()), "one twice"


@pytest.mark.parametrize(
    ("word", "key"),  # as people say it, and as ai-toolkit, OneTrainer, SimpleTuner, sd-scripts and musubi-tuner do
    [("vram", "memory"), ("preview", "sample_prompts"), ("quantize", "fp8_scaled"), ("regularization", "preserve"),
     ("lora_rank", "network_dim"), ("gradient_accumulation", "gradient_accumulation_steps"),
     ("epochs", "max_train_epochs"),
     ("dit", "pretrained_model_name_or_path"), ("timestep_shift", "discrete_flow_shift"), ("Batch", "train_batch_size"),
     ("netwrk_dim", "network_dim"), ("nothing of the kind", None)],
)  # fmt: skip
def test_a_wrong_name_means_the_option_that_others_call_so(word: str, key: str | None) -> None:
    assert meant_by(word, fields(LORA)) == key


def test_the_remedy_for_an_unknown_key_knows_other_trainers_words(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("lora_rank = 8\n")
    with pytest.raises(UserError) as refused:
        load_config(["--config_file", str(path), "--batch_size", "2"])
    assert f"{path}:1: lora_rank: unknown key; did you mean 'network_dim'?" in str(refused.value)
    assert "command line: --batch_size: unknown flag; did you mean 'train_batch_size'?" in str(refused.value)
