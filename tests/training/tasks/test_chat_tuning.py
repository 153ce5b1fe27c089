"""All weights of a published model trained on, on texts and on chats: steps, resume, what is kept of it and saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers import PreTrainedTokenizerFast as FastTokenizer

from library.config.load import load_for
from library.config.scripts import LLM
from library.errors import UserError
from library.llm.tokenizers import train_bpe
from library.training.plan import resolve_pretraining
from library.training.run import Run
from tests.pretraining_runs import WORDS, run, weights
from tests.runs import metrics, printed, same
from tests.tools.test_gguf_tools import in_gguf
from tools import convert_llm
from tools.prepare_text import parser, prepare

MARKS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<pad>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
)
TALK = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
FRESH = ("preset", "width", "layers", "heads")  # what the runs of the other tests set


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An instruct model as transformers saves it, with two ends, and the same as GGUF."""
    top = tmp_path_factory.mktemp("published")
    tokenizer = FastTokenizer(
        tokenizer_object=train_bpe([" ".join(WORDS)] * 3, 300, [*MARKS, "<unk>"]).inner,
        bos_token=MARKS[0], eos_token=MARKS[4], pad_token="<pad>", unk_token="<unk>",
        chat_template=TEMPLATE,
    )  # fmt: skip
    torch.manual_seed(0)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in MARKS}
    ends, pad = [ids[MARKS[4]], ids[MARKS[1]]], ids["<pad>"]
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {"initializer_range": 0.1}  # with the usual 0.02 so narrow a model learns slowly
    special = {"bos_token_id": 0, "eos_token_id": ends, "pad_token_id": pad}
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=64, tie_word_embeddings=True, **sizes, **special
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(temperature=0.6, do_sample=True, **special)
    model.save_pretrained(top / "folder")
    tokenizer.save_pretrained(top / "folder")
    numbers = {"padding_token_id": pad, "unknown_token_id": tokenizer.unk_token_id, "eot_token_id": ends[1]}
    more = {f"tokenizer.ggml.{key}": number for key, number in numbers.items()}
    in_gguf(top / "folder", top / "model.gguf", "F32", more | {"tokenizer.chat_template": TEMPLATE})
    said = [(f"{WORDS[i]} {WORDS[i + 8]}", " ".join([WORDS[15 - i]] * (i % 3 + 1))) for i in range(8)]
    talks = [[{"role": "user", "content": one}, {"role": "assistant", "content": other}] for one, other in said]
    (top / "talks.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in talks) + "\n")
    (top / "texts.jsonl").write_text(json.dumps({"text": " ".join(WORDS * 30)}) + "\n")
    return top


def assert_is_whole(saved: Path, published: Path) -> None:
    """Compare what transformers reads beside the weights with what it reads of the published folder."""
    theirs, ours = (AutoTokenizer.from_pretrained(folder) for folder in (published, saved))
    assert ours.chat_template == theirs.chat_template
    for next_one in (False, True):
        rendered = [each.apply_chat_template(TALK, add_generation_prompt=next_one) for each in (theirs, ours)]
        assert rendered[0]["input_ids"] == rendered[1]["input_ids"]
    for name in ("pad_token_id", "unk_token_id", "eos_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for kind in (AutoConfig, GenerationConfig):
        theirs, ours = (kind.from_pretrained(folder) for folder in (published, saved))
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            assert getattr(ours, name) == getattr(theirs, name), (kind, name)


@pytest.mark.parametrize("source", ["folder", "model.gguf"])
def test_it_is_kept_in_pretraining_and_conversion(source: str, published: Path, tmp_path: Path) -> None:
    words = ["--tokenizer", str(published / source), "--validation_share", "0"]
    prepare(parser().parse_args([str(published / "texts.jsonl"), *words, "--save_to", str(tmp_path / "tokens")]))
    run(tmp_path / "tokens", tmp_path / "out", **dict.fromkeys(FRESH), init_from=published / source, max_train_steps=3)
    assert_is_whole(tmp_path / "out/model", published / "folder")
    printed(convert_llm, "--model", published / source, "--save_to", tmp_path / "converted")
    assert_is_whole(tmp_path / "converted", published / "folder")
    if source == "folder":
        for made in ("out/model", "converted"):
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                assert (tmp_path / made / name).read_bytes() == (published / source / name).read_bytes()
            assert GenerationConfig.from_pretrained(tmp_path / made).temperature == 0.6


def test_a_corpus_of_another_tokenizer_is_saved_with_its_own_and_that_is_said(
    published: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(corpus, tmp_path, **dict.fromkeys(FRESH), init_from=published / "folder", max_train_steps=3)
    assert "was not made with the tokenizer of" in capsys.readouterr().out
    tokenizer, config = (kind.from_pretrained(tmp_path / "model") for kind in (AutoTokenizer, AutoConfig))
    assert tokenizer.chat_template is None
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, None)


def tune(published: Path, output: Path, source: str = "folder", **settings: Any) -> Run:
    """Train a short run on the conversations; ``settings`` override."""
    defaults: dict[str, Any] = {"train_data": [published / "talks.jsonl"], "learning_rate": 1e-2, "max_train_steps": 6}
    defaults |= {"train_batch_size": 2, "gradient_accumulation_steps": 2, "init_from": published / source}
    return run(None, output, **dict.fromkeys((*FRESH, "context", "data_dir")) | defaults | settings)


def written_by_transformers(published: Path) -> dict[str, Tensor]:
    """Return the conversations as a padded batch for transformers, with -100 where nothing is learnt."""
    tokenizer, rows = AutoTokenizer.from_pretrained(published / "folder"), []
    for line in (published / "talks.jsonl").read_text().splitlines():
        talk = json.loads(line)["messages"]
        asked = (
            tokenizer.apply_chat_template(talk[:1], tokenize=False) + "<|start_header_id|>assistant<|end_header_id|>"
        )
        before, whole = (tokenizer(t, add_special_tokens=False).input_ids for t in (asked, render(tokenizer, talk)))
        assert whole[: len(before)] == before
        rows.append((whole, [-100] * len(before) + whole[len(before) :]))
    batch = [
        torch.nn.utils.rnn.pad_sequence([torch.tensor(row[i]) for row in rows], True, [0, -100][i]) for i in (0, 1)
    ]
    return {"input_ids": batch[0], "labels": batch[1]}


def render(tokenizer: Any, talk: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(talk, tokenize=False)


@pytest.mark.parametrize("settings", [{}, {"packing": True, "max_length": 50}], ids=["rows", "packed"])
def test_a_step_is_adamws_on_the_loss_of_transformers(
    published: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    constant = {"lr_scheduler": "constant", "lr_warmup_steps": None, "max_train_steps": 1, "learning_rate": 1e-3}
    tune(published, tmp_path, gradient_accumulation_steps=4, **constant, **settings)  # all that there is in a step
    model = LlamaForCausalLM.from_pretrained(published / "folder", dtype=torch.float32).train()
    batch = written_by_transformers(published)
    loss = model(**batch).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim == 1) is flat] for flat in (False, True))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95)).step()
    line = metrics(tmp_path)[0]
    # fp32 sums in another order
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for (name, one), other in zip(ours.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    "settings", [{}, {"packing": True, "max_length": 50, "full_bf16": True, "gradient_checkpointing": True}]
)
def test_a_resumed_run_ends_with_the_same_bits(published: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    more = {"save_every_n_steps": 3, "save_state": True, "validation_split": 0.2, "save_best": True} | settings
    tune(published, tmp_path / "whole", **more)
    resume = tmp_path / "whole/model-step00000003-state"
    tune(published, tmp_path / "rest", resume=resume, **more)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "rest"))
    assert not same(weights(tmp_path / "whole"), weights(tmp_path / "whole", "model-step00000003"))
    assert (tmp_path / "whole/model-best/chat_template.jinja").is_file()
    for change, value in (("train_batch_size", 4), ("train_on", "all")):
        with pytest.raises(UserError, match=f"was trained with {change}"):
            tune(published, tmp_path / "other", resume=resume, **more | {change: value})


@pytest.mark.parametrize("source", ["folder", "model.gguf"])
def test_it_learns_the_answers_and_transformers_chats_with_it(source: str, published: Path, tmp_path: Path) -> None:
    talks = published / "talks.jsonl"
    more = {
        "validation_data": [talks],
        "sample_prompts": ["the mat"],
        "sample_temperature": 0.0,
        "sample_tokens": 20,
        "mixed_precision": "bf16",
    }
    tune(published, tmp_path, source, max_train_steps=80, **more)
    before, after = (metrics(tmp_path)[place]["val_loss"] for place in (0, -1))
    assert after < 0.2 < before
    assert_is_whole(tmp_path / "model", published / "folder")
    model, tokenizer = (kind.from_pretrained(tmp_path / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    for line in talks.read_text().splitlines()[:2]:
        asked, answer = json.loads(line)["messages"]
        prompt = render(tokenizer, [asked]) + "<|start_header_id|>assistant<|end_header_id|>"
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        said = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(said) == answer["content"] + "<|eot_id|>"


def test_a_base_model_is_saved_with_the_template_it_was_taught_in(published: Path, place: Path, tmp_path: Path) -> None:
    tune(published, tmp_path, init_from=place / "llama", max_train_steps=3)
    config, tokenizer = (kind.from_pretrained(tmp_path / "model") for kind in (AutoConfig, AutoTokenizer))
    assert render(tokenizer, TALK) == "User: the cat\nAssistant: sat<|endoftext|>"
    assert config.eos_token_id == [2, tokenizer.convert_tokens_to_ids("<|endoftext|>")]  # 2 as it was published


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "both": ({"data_dir": "x"}, "data_dir: give either data_dir (texts"),
    "neither": ({"train_data": None, "gradient_accumulation_steps": None}, "data_dir: give either data_dir (texts"),
    "fresh": (
        {"init_from": None, "preset": "llama-tiny"},
        "init_from: conversations teach a model that has been trained",
    ),
    "context": ({"context": 32}, "context: has no effect without data_dir; conversations have max_length; remove it"),
    "tokens": ({"tokens_per_batch": 64}, "tokens_per_batch: has no effect without data_dir; remove it"),
    "validate": (
        {"validate_every_n_steps": 2},
        "validate_every_n_steps: has no effect without data_dir or validation_",
    ),
    "best": ({"save_best": True, "save_every_n_steps": 2}, "save_best: nothing is held out to validate on; set valid"),
    "lora": ({"network_dim": 8}, "network_dim: is about LoRAs, which train_lora.py trains"),
    "model": (
        {"pretrained_model_name_or_path": "x"},
        "pretrained_model_name_or_path: is called init_from where",
    ),
    "long": ({"max_length": 65}, "max_length: 65 is more than the model's context of 64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(case: str, published: Path, tmp_path: Path) -> None:
    settings, said = REFUSED[case]
    with pytest.raises(UserError) as caught:
        tune(published, tmp_path, **settings)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_rate_is_that_of_what_is_trained() -> None:
    for given, rate in ((["--preset", "llama-tiny"], 6e-4), (["--init_from", "x"], 2e-5)):
        plan = resolve_pretraining(load_for(LLM, ["--data_dir", "x", *given]))
        assert (plan.optimizer.learning_rate, plan.optimizer.clip_during_warmup) == (rate, "--init_from" in given)
        prodigy = resolve_pretraining(load_for(LLM, ["--data_dir", "x", *given, "--optimizer_type", "Prodigy"]))
        assert prodigy.optimizer.learning_rate == 1.0
