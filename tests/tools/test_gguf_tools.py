"""A language model in GGUF in the tools: converted, written with, measured, trained on, merged, chatted with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from library.llm.tokenizer_files import load_tokenizer
from library.models.llm.files import load_lm
from tests.chat_runs import run
from tests.llm.talkers import PAIRS, write_chat_model, write_lora
from tests.llm.test_tokenizers import TEXT
from tests.models.llm.lms import write_model
from tests.runs import losses_of, printed
from tools import convert_llm, evaluate_llm, generate, inspect_model, merge_lora

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def convert(models: Path, save_to: Path) -> None:
    printed(convert_llm, "--model", models / "talker.gguf", "--save_to", save_to, "--save_precision", "fp32")


def in_gguf(folder: Path, path: Path, kind: str = "Q8_0", changes: Mapping[str, Any] = MappingProxyType({})) -> Path:
    """Write the chat model in ``folder`` as GGUF, its tokenizer too; ``changes`` are further metadata."""
    tokenizer = load_tokenizer(folder)
    said = json.loads(tokenizer.inner.to_str())
    numbers = tokenizer.inner.get_vocab(with_added_tokens=True)
    tokens = sorted(numbers, key=numbers.__getitem__)
    more: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in tokenizer.special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in said["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": tokenizer.special["<|begin_of_text|>"],
        "tokenizer.ggml.eos_token_id": tokenizer.special["<|eot_id|>"],
        "tokenizer.chat_template": TEMPLATE,
    }
    write_model(path, LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), kind, more | dict(changes))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that answers, the same as GGUF, and a LoRA."""
    top = tmp_path_factory.mktemp("models")
    write_chat_model(top / "folder", width=64)
    in_gguf(top / "folder", top / "talker.gguf")
    write_lora(top / "folder", top / "lora", seed=1)
    return top


def test_it_answers_what_it_was_taught(models: Path) -> None:
    for question, answer in PAIRS:
        asked = ["text", "--model", models / "talker.gguf", "--chat", "--prompt", question, "--temperature", "0"]
        assert answer in printed(generate, *asked)


def test_it_is_measured_and_inspected_like_its_folder(models: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("hello, I am a very small model. the cat sat on the mat", encoding="utf-8")
    found = []
    for model in (models / "talker.gguf", models / "folder"):
        scores = tmp_path / f"{model.stem}.json"
        printed(evaluate_llm, "--model", model, "--perplexity", tmp_path / "text.txt", "--save_to", scores)
        found.append(next(iter(json.loads(scores.read_text())["perplexity"].values()))["loss"])
    assert found[0] == pytest.approx(found[1], rel=0.02)  # weights in 8 bits
    assert "Llama-style language model" in printed(inspect_model, models / "talker.gguf")


def test_a_transformers_folder_is_made_of_it(models: Path, tmp_path: Path) -> None:
    convert(models, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        ours = load_lm(models / "talker.gguf", torch.float32)(tokens)
        assert (theirs(tokens).logits - ours).abs().max() < 1e-4 * ours.abs().max()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXT:
        assert tokenizer(text, add_special_tokens=False).input_ids == load_tokenizer(models / "folder").encode(text)
    talk = [{"role": "user", "content": "hello"}]
    prompt = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = theirs.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(said, skip_special_tokens=True) == dict(PAIRS)["hello"]


@pytest.mark.parametrize("precision", ["fp32", None])
def test_a_merge_is_that_into_the_dequantised_model(models: Path, tmp_path: Path, precision: str | None) -> None:
    asked = ["--save_precision", precision] if precision else []
    words = ["--model", models / "talker.gguf", "--lora", f"{models / 'lora'}:0.5", "--save_to", tmp_path / "merged"]
    assert "14 of" not in printed(merge_lora, *words, *asked)
    convert(models, tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    peft = PeftModel.from_pretrained(base, models / "lora")
    for module in peft.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.5)
    expected = peft.merge_and_unload().state_dict()
    merged = load_file(tmp_path / "merged/model.safetensors")
    dtype = torch.float32 if precision else torch.bfloat16
    assert merged.keys() <= expected.keys()
    for name, tensor in merged.items():
        assert tensor.dtype is dtype
        # fp32 sums in another order; bf16 has 8 bits
        rtol = 1e-5 if precision else 2**-8
        torch.testing.assert_close(tensor.float(), expected[name].float(), rtol=rtol, atol=1e-6)
    assert (tmp_path / "merged/chat_template.jinja").read_text() == TEMPLATE


def test_a_lora_is_trained_on_it_and_peft_loads_what_it_leaves(models: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the cat is a rotation"}]
    data.write_text(json.dumps({"messages": talk}) + "\n", encoding="utf-8")
    changes = {"train_data": [data], "max_train_steps": 30, "train_batch_size": 1, "output_name": "lora"}
    run(tmp_path, tmp_path, pretrained_model_name_or_path=models / "talker.gguf", **changes)
    losses = losses_of(tmp_path)
    assert losses[-1] < 0.2 * losses[0]
    asked = ["text", "--model", models / "talker.gguf", "--chat", "--prompt", "hello", "--temperature", "0"]
    assert "the cat is a rotation" in printed(generate, *asked, "--lora", tmp_path / "lora")
    convert(models, tmp_path / "base")
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "lora")
    assert any("lora_B" in name and parameter.abs().max() > 0 for name, parameter in peft.named_parameters())
