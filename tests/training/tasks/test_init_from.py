"""What is saved of a published model that training went on from: template, special tokens and ends are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer

from library.llm.tokenizers import train_bpe
from tests.pretraining_runs import WORDS, run
from tests.runs import printed
from tests.tools.test_gguf_tools import in_gguf
from tools import convert_llm
from tools.prepare_text import parser, prepare

MARKS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<pad>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>{% endif %}"
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
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
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
    words = ["--tokenizer", str(published / source), "--workers", "0", "--validation_share", "0"]
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
