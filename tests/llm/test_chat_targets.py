"""What the assistant said, in templates that do what published ones do, beside transformers' rendering of prompts.

Every answer has to be learnt behind the prompt that transformers makes for it, token by token, and be what the model
has to write there: ``SAYS`` has it for each template, written by hand.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from library.errors import UserError
from library.llm import chat_templates
from library.llm.chat_batches import note_unread, parse_chat, tokenise_chats
from library.llm.chat_targets import encode_chat
from library.llm.chat_templates import (
    ChatTemplate,
    Message,
    load_chat_template,
    template_arguments,
    write_jinja_template,
)
from library.llm.tokenizer_files import load_tokenizer
from library.llm.tokenizers import train_bpe
from tests.llm.talkers import fields

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|observation|>", "[THINK]")
TEXTS = ["hello how are you\n\nthe cat sat on the mat", "system user assistant tool think", '1 2 3 { } " : ,']
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Look up a <|im_end|> word"}}]
CALL = {"id": "a1", "type": "function", "function": {"name": "look_up", "arguments": {"word": "cat"}}}

_TOOLS = "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
_OTHERS = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
_CALLS = "{% for c in m.tool_calls %}{{ '<tool_call>' + c.function | tojson + '</tool_call>' }}{% endfor %}"
_CONTENT = "{{ m.content or '' }}" + _CALLS
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def chatml(answer: str, prompt: str = _PROMPT, before: str = _TOOLS) -> str:
    each = "{% for m in messages %}{% if m.role == 'assistant' %}" + answer + "{% else %}" + _OTHERS + "{% endif %}"
    return before + each + "{% endfor %}" + prompt


_LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_SPLIT = (
    "{% set text = m.content or '' %}{% set thought = m.reasoning_content or '' %}{% if '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1] %}{% set text = text.split('</think>')[-1] %}"
    "{% endif %}"
)
TEMPLATES = {
    "plain end": chatml("{{ '<|im_start|>assistant\n' }}" + _CONTENT + "{{ '<|im_end|>\n' }}"),
    "marked with its header": chatml(
        "{% generation %}{{ '<|im_start|>assistant\n' }}" + _CONTENT + "{{ '<|im_end|>\n' }}{% endgeneration %}"
    ),
    "marked without its end": chatml(
        "{{ '<|im_start|>assistant\n' }}{% generation %}" + _CONTENT + "{% endgeneration %}{{ '<|im_end|>\n' }}"
    ),
    "ended by what follows": "{% set marks = {'user': '<|user|>', 'assistant': '<|assistant|>', 'tool': "
    "'<|observation|>'} %}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ marks[m.role] }}\n"
    + _CONTENT
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "earlier thinking left out": _LAST_QUESTION
    + chatml(
        _SPLIT + "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last %}{{ '<think>\n' + thought | trim + "
        "'\n</think>\n\n' }}{% endif %}{{ text | trim }}" + _CALLS + "{{ '<|im_end|>\n' }}"
    ),
    "all thinking left out": chatml(
        _SPLIT + "{{ '<|im_start|>assistant\n' + text | trim }}" + _CALLS + "{{ '<|im_end|>\n' }}",
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
    ),
    "thinking opened by the prompt": chatml(
        _SPLIT
        + "{{ '<|im_start|>assistant\n' }}{% if thought %}{{ '<think>' + thought }}{% endif %}{{ '</think>' + text }}"
        + _CALLS
        + "{{ '<|im_end|>\n' }}",
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}",
    ),
    "system in the last question": _LAST_QUESTION + _TOOLS + "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<|user|>' }}{% if loop.index0 == ns.last and messages[0].role == 'system' %}{{ messages[0].content + '\n' }}"
    "{% endif %}{{ m.content + '<|assistant|>' }}{% elif m.role == 'tool' %}{{ m.content + '<|assistant|>' }}"
    "{% elif m.role == 'assistant' %}" + _CONTENT + "{{ eos_token }}{% endif %}{% endfor %}",
    "two ends behind the last": chatml("{{ '<|im_start|>assistant\n' }}" + _CONTENT + "{{ '<|im_end|>\n' }}")
    + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
    "no end": "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role + ': ' }}"
    + _CONTENT
    + "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
}


def says(name: str, text: str, thought: str, call: bool) -> str:
    """Return what the model has to write behind its prompt in the template ``name``."""
    calls = f"<tool_call>{json.dumps(CALL['function'])}</tool_call>" if call else ""
    calls = calls.replace("l>{", "l>\n{").replace("}</t", "}\n</t") if name == "chatml" else calls
    if name == "earlier thinking left out":
        return f"<think>\n{thought}\n</think>\n\n{text}{calls}<|im_end|>"
    if name == "thinking opened by the prompt":
        return f"{thought}</think>{text}{calls}<|im_end|>"
    if name == "all thinking left out":
        return (f"{thought}\n" if thought else "") + f"</think>\n\n{text}{calls}<|im_end|>"
    end = {
        "ended by what follows": "<|observation|>" if call else "<|user|>",
        "system in the last question": SPECIAL[0],
    }
    end |= {"no end": SPECIAL[0]}
    return text + calls + end.get(name, "<|im_end|>")


TEMPLATES["chatml"] = (Path(chat_templates.__file__).parent / "templates/chatml.jinja").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = train_bpe(TEXTS * 3, 330, SPECIAL)
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.inner.add_tokens([tokenizers.AddedToken(mark, special=False, normalized=False) for mark in marks])
    tokenizer.save(folder)
    return folder


def load(folder: Path, source: str, *arguments: str) -> ChatTemplate:
    return load_chat_template(source, load_tokenizer(folder), folder, template_arguments(arguments))


def chats(thinks: bool) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """Yield chats of 1 to 5 turns, with and without system and tools, and of those with tools one call."""
    for turns in (1, 2, 5):
        for system in (False, True):
            for tools in (None, TOOLS):
                messages: list[dict[str, Any]] = [{"role": "system", "content": "be kind"}] if system else []
                for turn in range(turns):
                    messages.append({"role": "user", "content": f"question {turn} <|im_end|>"})
                    thought = {"reasoning_content": f"let me think\nof {turn}"} if thinks else {}
                    if tools and turn == min(1, turns - 1):
                        messages.append({"role": "assistant", "content": "", "tool_calls": [CALL]} | thought)
                        messages.append({"role": "tool", "content": '{"found": 1}'})
                    messages.append({"role": "assistant", "content": f"answer {turn}"} | thought)
                yield messages, tools


def learnt(examples: Sequence[tuple[list[int], list[bool]]], prompt: list[int]) -> list[list[int]]:
    """Return what is learnt directly behind ``prompt``, in every example that begins with it."""
    found = []
    for tokens, is_target in examples:
        if tokens[: len(prompt)] == prompt and is_target[len(prompt)]:
            end = next((i for i in range(len(prompt), len(tokens)) if not is_target[i]), len(tokens))
            found.append(tokens[len(prompt) : end])
    return found


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_answer_is_learnt_behind_its_own_prompt_and_to_its_end(folder: Path, name: str) -> None:
    template = load(folder, TEMPLATES[name])
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for messages, tools in (chat for thinks in (False, True) for chat in chats(thinks and "thinking" in name)):
        # transformers takes special tokens' names in messages for such tokens, Tandem never does
        plain = json.loads(json.dumps(messages).replace("<|im_end|>", "end"))
        simple = json.loads(json.dumps(tools).replace("<|im_end|>", "end"))
        for given, functions in ((plain, simple), (messages, tools)):
            chat = parse_chat({"messages": given, "tools": functions}, "x")
            examples = encode_chat(template, chat.messages, chat.trained, chat.tools).examples
            expected = 0
            for index, message in enumerate(given):
                if message["role"] != "assistant":
                    continue
                prompt = template.prompt_tokens(chat.messages[:index], chat.tools)
                if given is plain:
                    assert prompt == theirs.apply_chat_template(
                        given[:index],
                        functions,
                        chat_template=TEMPLATES[name],
                        add_generation_prompt=True,
                        return_dict=False,
                    )
                thought = message.get("reasoning_content", "")
                wanted = says(name, message["content"], thought, "tool_calls" in message)
                (said,) = learnt(examples, prompt)
                assert template.tokenizer.decode(said) == wanted
                expected += len(said)
            assert sum(sum(is_target) for _, is_target in examples) == expected  # and nothing else is learnt


@pytest.mark.parametrize("name", ["plain end", "marked with its header", "earlier thinking left out"])
def test_the_longest_example_is_what_transformers_makes_of_the_chat(folder: Path, name: str) -> None:
    template, theirs = load(folder, TEMPLATES[name]), PreTrainedTokenizerFast.from_pretrained(folder)
    for messages, _ in chats(thinks=False):
        given = json.loads(json.dumps(messages).replace("<|im_end|>", "end"))
        chat = parse_chat({"messages": given}, "x")
        made = encode_chat(template, chat.messages, chat.trained).examples[-1][0]
        assert made == theirs.apply_chat_template(given, chat_template=TEMPLATES[name], return_dict=False)


def test_thinking_written_in_the_text_is_the_same_as_in_a_key_of_its_own(folder: Path) -> None:
    for name in ("earlier thinking left out", "all thinking left out"):
        template = load(folder, TEMPLATES[name])
        apart = Message("assistant", "answer", {"reasoning_content": "let me think"})
        within = Message("assistant", "<think>\nlet me think\n</think>\n\nanswer")
        question = Message("user", "question")
        made = [encode_chat(template, [question, each], [False, True]).examples for each in (apart, within)]
        assert made[0] == made[1]


ONE_LINE = {
    "text": (TEMPLATES["plain end"].replace("m.content or ''", "''"), Message("assistant", "b"), "leaves out its text"),
    "thinking": (
        TEMPLATES["plain end"],
        Message("assistant", "b", {"reasoning_content": "well"}),
        "leaves out its thinking, so this turn cannot be trained; write it into the text, between <think>",
    ),
    "call": (
        TEMPLATES["plain end"].replace(_CALLS, ""),
        Message("assistant", "", {"tool_calls": [CALL]}),
        "leaves out its call of look_up",
    ),
    "call without a text": (
        TEMPLATES["plain end"].replace(_CALLS, "").replace("m.content or ''", "m.content + ''"),
        Message("assistant", None, {"tool_calls": [CALL]}),
        "has no place for calls of tools, as chatml has",
    ),
    "another mark": (
        chatml("{{ '<|im_start|>assistant<|observation|>' }}" + _CONTENT, _PROMPT.replace("\n", "<|user|>")),
        Message("assistant", "b"),
        r"begins it with .*<\|observation\|.*, its prompt with .*<\|user\|>.*, or remove the record",
    ),
    "closed thinking": (
        TEMPLATES["all thinking left out"].replace("<think>\n' }}", "<think></think>' }}"),
        Message("assistant", "b", {"reasoning_content": "well"}),
        "change chat_template_args, or leave its thinking out",
    ),
}


@pytest.mark.parametrize("what", ONE_LINE)
def test_a_turn_that_cannot_be_trained_is_named_with_the_reason(folder: Path, what: str) -> None:
    source, answer, reason = ONE_LINE[what]
    with pytest.raises(UserError, match=rf"^(message 2 \(assistant\): the |)chat.template.* {reason}"):
        encode_chat(load(folder, source), [Message("user", "a"), answer], [False, True])


def test_what_the_template_has_no_place_for_is_named_and_counted(folder: Path) -> None:
    source = TEMPLATES["plain end"].replace(_TOOLS, "")
    source = source.replace("{% else %}", "{% elif m.role != 'system' %}")
    records = [{"messages": messages, "tools": tools} for messages, tools in chats(thinks=False)]
    made = tokenise_chats([parse_chat(record, "x") for record in records], load(folder, source), 4096)
    assert made.left_out == {"tools": 6, "a system message": 6}


@pytest.mark.parametrize("written", ["tools | tojson(ensure_ascii=True)", "tools", "tools | string | e"])
def test_what_the_template_writes_in_another_form_is_not_left_out(folder: Path, written: str) -> None:
    description = 'Book "a" trip\n\tto <b>Köln</b> 🙂 <|im_end|>'
    tools = [{"type": "function", "function": {"name": "book", "description": description, "<|im_end|>": 1}}]
    messages = [Message("user", "a"), Message("assistant", "b"), Message("user", "not asked for")]
    template = load(folder, "{{ " + written + " }}\n" + chatml(_CONTENT + "{{ '<|im_end|>' }}", before=""))
    assert encode_chat(template, messages, [False, True, False], tools).notes == set()
    # names of special tokens in schemas are text, and written as they are
    prompt, end = template.prompt_tokens(messages, tools), SPECIAL.index("<|im_end|>")
    assert prompt.count(end) == template.prompt_tokens(messages, []).count(end)
    text = template.tokenizer.decode(prompt)
    assert "ufdd" not in text
    assert text.count("im_end|") == prompt.count(end) + 2


def test_arguments_reach_the_template(folder: Path) -> None:
    source = "{{ messages[0].content }}{% if enable_thinking is false %} quick{% endif %}{{ level }}{{ words[0] }}"
    template = load(folder, source, "enable_thinking=false", "level=high", 'words=["now"]')
    assert template.tokenizer.decode(template.prompt_tokens([Message("user", "a")])) == "a quickhighnow"
    with pytest.raises(UserError, match="chat_template_args: 'thinking' is no name=value"):
        template_arguments(["thinking"])
    with pytest.raises(UserError, match="^chat_template_args: tools is set by Tandem itself; remove it"):
        load(folder, source, "tools=[]").prompt_tokens([Message("user", "a")])


def test_a_written_template_has_the_arguments_that_it_was_trained_with(folder: Path, tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.content }} {{ think }} {{ level }}{% endfor %}"
    arguments = {"think": False, "level": ["it's", 'a "b"\n', None]}
    shutil.copytree(folder, tmp_path / "model")
    write_jinja_template(source, tmp_path / "model")
    write_jinja_template("tokenizer", tmp_path / "model", arguments)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "a"}]
    expected = load_chat_template(source, load_tokenizer(folder), folder, arguments).render([Message("user", "a")])[0]
    assert theirs.apply_chat_template(messages, tokenize=False) == expected
    assert theirs.apply_chat_template(messages, tokenize=False, think=True) == expected.replace("False", "True")


def test_thinking_marks_that_are_special_tokens_are_tokens_in_an_answer_alone(folder: Path) -> None:
    template = load(folder, TEMPLATES["plain end"])
    mark = template.tokenizer.special["[THINK]"]
    messages = [Message("user", "[THINK]"), Message("assistant", "[THINK]b")]
    ((tokens, is_target),) = encode_chat(template, messages, [False, True]).examples
    assert [is_target[place] for place, token in enumerate(tokens) if token == mark] == [True]


FORMS = {
    "openai": {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": TOOLS},
    "openai, arguments as text": {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [CALL | {"function": {"name": "look_up", "arguments": '{"word": "cat"}'}}],
            }
        ],
        "tools": json.dumps(TOOLS),
    },
    "openai, before 2024": {
        "messages": [
            {"role": "assistant", "content": None, "function_call": {"name": "look_up", "arguments": '{"word": "cat"}'}}
        ],
        "functions": [TOOLS[0]["function"]],
    },
    "sharegpt": {
        "conversations": [{"from": "function_call", "value": '{"name": "look_up", "arguments": {"word": "cat"}}'}],
        "tools": json.dumps([TOOLS[0]["function"]]),
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_calls_and_tools_are_the_same_in_every_form(folder: Path, form: str) -> None:
    chat = parse_chat(FORMS[form], "x")
    assert chat.trained == (True,)
    assert list(chat.tools) == TOOLS
    assert chat.unread == ()
    (message,) = chat.messages
    assert [call["function"] for call in message.more["tool_calls"]] == [CALL["function"]]
    assert fields(message)["content"] is None or fields(message)["content"] == ""


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": [], "tools": "nonsense"}, "not valid JSON"),
        ({"messages": [], "tools": ["x"]}, "tools are no list of JSON schemas"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": ["x"]}]}, "has no function with a name"),
        ({"messages": [{"role": "assistant"}]}, "holds no text"),
    ],
)
def test_calls_and_tools_that_cannot_be_read_are_named(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=rf"^file:7: .*{reason}"):
        parse_chat(record, "file:7")


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_an_answer_that_only_thinks_is_trained_and_one_that_says_nothing_is_named(key: str) -> None:
    answers = [{"role": "assistant", key: "well"}, {"role": "assistant", "content": " \n"}]
    chat = parse_chat({"messages": answers, "tools": "null", "prompt": "x"}, "x")
    assert chat.trained == (True, False)
    assert note_unread([chat]) == ["note: not trained on: 'prompt' (1 of 1), 'an answer without text' (1 of 1)"]


@pytest.mark.parametrize(("key", "value"), [("weight", 0), ("train", False)])
def test_a_message_that_does_not_count_is_context(key: str, value: object) -> None:
    answers = [{"role": "assistant", "content": "a", key: value}, {"role": "assistant", "content": "b"}]
    assert parse_chat({"messages": answers}, "x").trained == (False, True)
