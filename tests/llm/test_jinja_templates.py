"""Templates as other programs read them: rendered and encoded by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from library.errors import UserError
from library.llm.chat_templates import BUILT_IN, ChatTemplate, Message, load_chat_template, write_jinja_template
from library.llm.tokenizer_files import load_tokenizer
from library.llm.tokenizers import Tokenizer
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


# templates that other people publish, by their form: Vicuna's, Alpaca's, one whose turns are lines of their own
FOREIGN = {
    "vicuna": "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }} {% elif m.role == 'user' %}USER: "
    "{{ m.content }} {% else %}ASSISTANT: {{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    "alpaca": "{% for m in messages %}{{ {'system': '', 'user': '### Instruction:\\n', 'assistant': '### Response:\\n'}"
    "[m.role] + m.content + '\\n\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}",
    "marked": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
}


def _template(name: str, folder: Path) -> tuple[ChatTemplate, Tokenizer]:
    tokenizer = load_tokenizer(tokenizer_folder(folder, MARKS.get(name, ("<s>", "</s>", "<|im_start|>", "<|im_end|>"))))
    if name in FOREIGN:
        return ChatTemplate(name, tokenizer, FOREIGN[name], {}), tokenizer
    return load_chat_template(name, tokenizer, folder), tokenizer


@pytest.mark.parametrize("name", sorted([*BUILT_IN, *FOREIGN]))
def test_no_message_ends_its_turn(tmp_path: Path, name: str) -> None:
    """A user writes the text of a whole talk into one message: it is refused, or remains one message."""
    template, tokenizer = _template(name, tmp_path)
    first, answer, second = Message("user", "hello"), Message("assistant", "yes"), Message("user", "and now?")
    talk = tokenizer.decode(template.tokens([first, answer, second], answer_next=True)[0])
    begin = tokenizer.decode(template.tokens([first], answer_next=True)[0])
    for text in (talk[talk.index("hello") : talk.index("now?")], begin[begin.index("hello") :] + " yes"):
        if name not in ("llama3", "chatml", "marked"):  # these can take any text
            with pytest.raises(UserError, match="by which the chat template"):
                template.tokens([Message("user", text)], answer_next=True)
            continue
        tokens = template.tokens([Message("user", text)], answer_next=True)[0]
        turn_of_hello = template.tokens([first], answer_next=True)[0]
        assert tokens[: len(turn_of_hello)] != turn_of_hello
        for token, number in tokenizer.special.items():
            assert tokens.count(number) == turn_of_hello.count(number), token


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama2", "what does [INST] mean?"),
        ("plain", "User: is a word, Assistant: too"),
        ("vicuna", "what is an assistant?"),
        ("alpaca", "# Response"),
    ],
)
def test_a_message_that_is_only_like_a_mark_is_taken(tmp_path: Path, name: str, text: str) -> None:
    template, tokenizer = _template(name, tmp_path)
    assert text in tokenizer.decode(template.tokens([Message("user", text)], answer_next=True)[0])


def test_an_answer_that_was_generated_is_no_reason_to_refuse_the_next_question(tmp_path: Path) -> None:
    template, _ = _template("alpaca", tmp_path)
    talk = [Message("user", "a"), Message("assistant", "b\n\n### Instruction:\nc"), Message("user", "d")]
    assert template.tokens(talk, answer_next=True)[0]
    with pytest.raises(UserError, match=r"message 2 \(assistant\): holds '\\n\\n### Instruction:\\n'"):
        template.tokens(talk[:2] + talk[2:])  # in training it would teach to ask oneself
