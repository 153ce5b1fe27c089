"""A language model's LoRA in the tools: merged into its model, written with, resized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from library.llm.chat_templates import Message, load_chat_template
from library.llm.generation import SamplingSettings, generate_tokens
from library.llm.tokenizer_files import load_tokenizer
from library.llm.tokenizers import train_bpe
from library.models.llm.files import load_lm
from library.models.registry import lora_targets
from library.training.tasks.chat_lora import template_of
from networks.files.adapters import load_lora
from networks.files.writing import save_adapter
from tests.models.llm.lms import reference
from tests.runs import printed, refusal
from tools import merge_lora
from tools.generate import generate, parser

TOKENS = torch.arange(40).view(2, 20)


def write_pair(folder: Path, name: str) -> PreTrainedModel:
    """Write a model and a LoRA that peft made of it, of all linear layers; return the model with the LoRA."""
    model = reference(name)
    model.save_pretrained(folder / "model")
    torch.manual_seed(1)
    transposed = name == "gpt2"
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules="all-linear", fan_in_fan_out=transposed, task_type="CAUSAL_LM"
    )
    peft = get_peft_model(model, config)
    for key, parameter in peft.named_parameters():
        if "lora_B" in key:
            parameter.data.normal_(std=0.1)
    peft.save_pretrained(folder / "lora")
    return peft.eval()


def merge(*words: object) -> str:
    return printed(merge_lora, *words)


@pytest.mark.parametrize("name", ["gpt2", "llama3", "llama3.2"])
def test_a_lora_of_pefts_merges_into_transformers_folder(tmp_path: Path, name: str) -> None:
    peft = write_pair(tmp_path, name)
    merge("--model", tmp_path / "model", "--lora", tmp_path / "lora", "--save_to", tmp_path / "merged")
    expected = peft(TOKENS).logits
    for read in (load_lm(tmp_path / "merged", torch.float32)(TOKENS),
                 AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(TOKENS).logits):  # fmt: skip
        assert (read - expected).abs().max() <= 1e-5 * expected.abs().max()  # fp32, added to the weight instead
    merge("--model", tmp_path / "model", "--lora", f"{tmp_path / 'lora'}:0.0", "--save_to", tmp_path / "same")
    same, model = (load_lm(tmp_path / folder, torch.float32)(TOKENS) for folder in ("same", "model"))
    assert torch.equal(same, model)


def test_gpt2s_published_file_without_the_models_prefix_is_merged_too(tmp_path: Path) -> None:
    peft = write_pair(tmp_path, "gpt2")
    model = reference("gpt2")
    model.transformer.save_pretrained(tmp_path / "model")  # "h.0.attn.c_attn.weight", as openai-community/gpt2 has it
    merge("--model", tmp_path / "model", "--lora", tmp_path / "lora", "--save_to", tmp_path / "merged")
    ours, expected = load_lm(tmp_path / "merged", torch.float32)(TOKENS), peft(TOKENS).logits
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_merge_into_fp8_and_a_lora_of_another_size_are_refused(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", "llama3")
    write_pair(tmp_path / "b", "llama2")
    both = ("--lora", tmp_path / "a/lora", "--save_to", tmp_path / "merged")
    for words, said in (
        (("--model", tmp_path / "a/model", "--save_precision", "fp8"), "language models are not merged into quantised"),
        (("--model", tmp_path / "b/model"), "it was trained on another model"),
    ):
        assert said in refusal(merge_lora, *words, *both)
    assert not (tmp_path / "merged").exists()


def test_loras_of_language_models_become_one_file_that_peft_knows(tmp_path: Path) -> None:
    peft = write_pair(tmp_path, "llama3")
    merge("--lora", f"{tmp_path / 'lora'}:0.5", f"{tmp_path / 'lora'}:0.5", "--save_to", tmp_path / "both.safetensors")
    targets = lora_targets()["llama"]
    save_adapter(tmp_path / "folder", load_lora(tmp_path / "both.safetensors", targets).weights, targets, "peft")
    again = PeftModel.from_pretrained(reference("llama3"), tmp_path / "folder")
    torch.testing.assert_close(again(TOKENS).logits, peft(TOKENS).logits, rtol=1e-4, atol=1e-5)


def test_the_template_that_a_lora_was_taught_in_outlives_merging(tmp_path: Path) -> None:
    write_pair(tmp_path, "llama3")
    file = tmp_path / "lora/adapter_model.safetensors"
    save_file(load_file(file), file, {"tandem.chat_template": "plain"})
    merge("--lora", tmp_path / "lora", tmp_path / "lora", "--save_to", tmp_path / "both.safetensors")
    assert template_of(tmp_path / "both.safetensors") == ("plain", {})
    printed_line = merge("--model", tmp_path / "model", "--lora", tmp_path / "lora", "--save_to", tmp_path / "merged")
    assert "taught in the template that" in printed_line
    train_bpe(["hello there"] * 3, 260).save(tmp_path / "merged")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "merged")
    asked = theirs.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert asked.endswith("User: hello\nAssistant:")


def test_generate_writes_with_a_lora_in_the_asked_template(tmp_path: Path) -> None:
    write_pair(tmp_path, "llama3")
    words = ["--model", str(tmp_path / "model"), "--lora", f"{tmp_path / 'lora'}:1", "--max_new_tokens", "8"]
    big = reference("llama3")  # whose vocabulary is smaller than one of bytes
    big.resize_token_embeddings(320)
    big.save_pretrained(tmp_path / "model")
    tokenizer = train_bpe(["User: hello there\nAssistant: hi"] * 4, 300)
    tokenizer.save(tmp_path / "model")
    options = parser().parse_args(["text", *words, "--prompt", "hello", "--temperature", "0", "--chat",
                                   "--chat_template", "plain"])  # fmt: skip
    (made,) = generate(options)
    with_lora = PeftModel.from_pretrained(big, tmp_path / "lora").eval()
    template = load_chat_template("plain", load_tokenizer(tmp_path / "model"), tmp_path / "model")
    prompt = template.prompt_tokens([Message("user", "hello")])
    expected = with_lora.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=tokenizer.eos, pad_token_id=0
    )[0, len(prompt) :]
    assert made == tokenizer.decode(expected.tolist(), skip_special=True)
    without = generate_tokens(load_lm(tmp_path / "model", torch.float32), [prompt], SamplingSettings(8, temperature=0))
    assert tokenizer.decode(without[0], skip_special=True) != made
