"""Templates as other programs read them: rendered and encoded by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from library.llm.chat_templates import BUILT_IN, Message, load_chat_template, write_jinja_template
from library.llm.tokenizers import load_tokenizer
from tests.llm.test_chat_batches import CONVERSATION, LLAMA3_MARKS, tokenizer_folder

MARKS = {
    "llama3": LLAMA3_MARKS,
    "llama2": ("<s>", "</s>"),
    "chatml": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "plain": ("<|endoftext|>",),
}


@pytest.mark.parametrize("answer_next", [False, True])
@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_transformers_makes_the_same_tokens_of_the_file(tmp_path: Path, name: str, answer_next: bool) -> None:
    folder = tokenizer_folder(tmp_path, MARKS[name])
    template = load_chat_template(name, load_tokenizer(folder), folder)
    write_jinja_template(name, folder)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    asked = CONVERSATION[:-1] if answer_next else CONVERSATION
    for conversation in (asked, asked[1:], [Message(m.role, f" {m.content}\n") for m in asked]):
        messages = [message._asdict() for message in conversation]
        made = theirs.apply_chat_template(messages, add_generation_prompt=answer_next, return_dict=True)["input_ids"]
        assert made == template.tokens(conversation, answer_next)[0]


@pytest.mark.parametrize("name", ["llama2", "plain"])
def test_what_the_template_has_no_place_for_is_refused_there_too(tmp_path: Path, name: str) -> None:
    folder = tokenizer_folder(tmp_path, MARKS[name])
    write_jinja_template(name, folder)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    with pytest.raises(TemplateError, match="in turn"):
        theirs.apply_chat_template([{"role": "assistant", "content": "Hello"}])


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_model_with_the_file_talks_in_it(tmp_path: Path, name: str) -> None:
    folder = tokenizer_folder(tmp_path, MARKS[name])
    write_jinja_template(name, folder)
    tokenizer = load_tokenizer(folder)
    own, built_in = load_chat_template("auto", tokenizer, folder), load_chat_template(name, tokenizer, folder)
    assert own.name == "tokenizer"
    messages: Sequence[Message] = CONVERSATION
    assert own.tokens(messages) == built_in.tokens(messages)
