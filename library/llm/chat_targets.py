"""Which tokens of a chat the assistant said, its end marks included: what a model has to learn to say.

    messages, trained -> texts, as the template renders them, and where in each the answers are -> tokens and targets

A model says an answer when it has the prompt: the messages before, rendered up to where the answer begins. So an answer
is what the chat rendered up to it (whole) has more than that prompt. Where the template marks what was generated
(``{% generation %}``), it is the marked part of that, without the header and with the mark that ends the turn. A turn
that is ended by nothing but the next message's first special token (GLM's ``<|user|>``) has that as its end; where
there is none either, the tokenizer's token that ends texts.

Usually the answers of a chat all stand in its text as a whole. Templates that write a turn otherwise once others follow
(Qwen 3 and DeepSeek-R1 leave out earlier thinking, Mistral moves the system message to the last question) make one
example for each such turn, as the model had it when it said it.

DeepSeek-R1's template leaves out the thinking even of the last answer, which the model writes, as the prompt ends in
``<think>``. Such an answer is put behind the prompt as it is said: thinking (maybe none), ``</think>``, answer.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from library.errors import UserError
from library.llm.chat_templates import PROBE, ChatTemplate, Message, common, plain

THINKING = ("reasoning_content", "thinking", "reasoning")  # transformers' names for it, in its order

Span = tuple[int, int]
Tools = Sequence[Mapping[str, Any]]


@dataclass
class EncodedChat:
    """A chat as examples.

    Attributes:
        examples: of each the tokens, and of each token whether it is a target.
        notes: what the template leaves out of it, in a few words each.
    """

    examples: list[tuple[list[int], list[bool]]] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)


@dataclass
class _Written:
    """A rendered text.

    Attributes:
        text: up to its last answer, or a few blanks further.
        end: where the mark ends that ends that answer.
        spans: where the answers to learn are.
        prompt: how much of the text is a prompt that is encoded by itself, as the text's tokens are others; 0 of most.
    """

    text: str
    end: int
    spans: list[Span]
    prompt: int = 0


def encode_chat(
    template: ChatTemplate,
    messages: Sequence[Message],
    trained: Sequence[bool],
    tools: Tools = (),
    train_on_all: bool = False,
) -> EncodedChat:
    """Return the tokens of a chat, and which of them are targets.

    Args:
        template: how it is written.
        messages: in order.
        trained: for each whether it is to be learnt; the assistant's only.
        tools: JSON schemas of functions.
        train_on_all: every token of the whole chat is a target.

    Raises:
        UserError: the template refuses the chat, or a turn cannot be trained; it is named.
    """
    template.refuse_text_marks(messages)
    chat = EncodedChat()
    whole: list[_Written] = []
    if train_on_all:
        text = template.render(messages, tools)[0]
        whole.append(_Written(text, len(text), [(0, len(text))]))
    written = list(whole)
    for index in reversed([index for index, is_trained in enumerate(trained) if is_trained]):
        answer = _answer(template, messages, index, tools)
        begun, is_whole = answer.text[: answer.end], not answer.prompt
        longer = next((each for each in written if is_whole and not each.prompt and each.text.startswith(begun)), None)
        if longer is None:
            written.append(answer)
        elif longer not in whole:
            longer.spans = [*answer.spans, *longer.spans]
    if written:
        last = len(messages) if train_on_all else max(index for index, is_trained in enumerate(trained) if is_trained)
        chat.notes |= _left_out(messages[:last], tools, plain(written[0].text))
    for each in reversed(written):
        tokens, places = _encode(template, each)
        is_target = [False] * len(tokens)
        for first, last in zip(places[::2], places[1::2], strict=True):
            is_target[first:last] = [True] * (last - first)
        chat.examples.append((tokens, is_target))
    return chat


def _encode(template: ChatTemplate, written: _Written) -> tuple[list[int], list[int]]:
    """Return the tokens, and how many of them come before where each span begins and ends."""
    cuts = [place for span in written.spans for place in span]
    if not written.prompt:
        return template.encode(written.text, cuts)
    prompt = template.encode(written.text[: written.prompt])[0]
    answer, places = template.encode(written.text[written.prompt :], [cut - written.prompt for cut in cuts])
    return prompt + answer, [len(prompt) + place for place in places]


def _answer(template: ChatTemplate, messages: Sequence[Message], index: int, tools: Tools) -> _Written:
    """Return the chat up to the answer ``index``, with what of it the model says."""
    message, where = messages[index], f"message {index + 1} (assistant)"
    text, marked = template.render(messages[: index + 1], tools)
    thinking, said = _thinking_of(message)
    begin, behind_prompt = _behind_prompt(template, messages[: index + 1], tools, text, thinking)
    if behind_prompt != text:
        text, marked = behind_prompt, []
    for what, wanted in (("text", said), *((f"call of {name}", name) for name in message.called)):
        if not _holds(plain(text[begin:]), wanted):
            raise UserError(
                f"{where}: the chat template {template.name} leaves out its {what}, so this turn cannot be trained; "
                "choose another template, or remove the record"
            )
    following = messages[index + 1].role if index + 1 < len(messages) else "tool" if message.called else "user"
    text, end = _ended(template, text, following)
    spans = [(max(first, begin), last) for first, last in marked if last > begin] or [(begin, end)]
    spans[-1] = (spans[-1][0], end)
    return _Written(text, end, spans, 0 if template.divides(text, begin) else begin)


def _behind_prompt(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools, text: str, thinking: str
) -> tuple[int, str]:
    """Return where the last of ``messages`` begins, and the chat with it behind the prompt that asks for it.

    That is ``text``, the rendered chat, unless it does not begin with the prompt or lacks the thinking.
    """
    before, where = messages[:-1], f"message {len(messages)} (assistant): the chat template {template.name}"
    prompt = template.render_if_taken(before, tools, answer_next=True) if before else None
    if prompt is not None and text.startswith(prompt) and _holds(plain(text[len(prompt) :]), thinking):
        return len(prompt), text
    header = template.render([*before, Message("assistant", PROBE)], tools)[0].partition(PROBE)[0]
    closed = re.search(r"</think>\s*$", header)
    if not text.startswith(header):  # it is rendered without thinking, of which the template may write an empty block
        header = re.sub(r"<think>\s*</think>\s*$", "", header)
    begun = prompt[common(prompt, template.render(before, tools)[0]) :] if prompt is not None and before else ""
    is_open = begun.rfind("<think>") > begun.rfind("</think>")
    begins_alike = prompt is None or template.marks(header) <= template.marks(prompt)
    if not (text.startswith(header) and begins_alike) or (thinking and "</think>" in begun and not is_open):
        remedy = "leave its thinking out" if thinking else "remove the record"
        raise UserError(
            f"{where} begins it with {_differing(text, prompt or header)!r}, its prompt with "
            f"{_differing(prompt or header, text)!r}, so this turn cannot be trained; change chat_template_args, or "
            f"{remedy}"
        )
    answer = text[len(header) :]
    has_thinking = bool(thinking) and _holds(plain(answer), thinking)
    if thinking and not has_thinking and "</think>" not in template.sources["default"]:
        raise UserError(
            f"{where} leaves out its thinking, so this turn cannot be trained; write it into the text, between "
            "<think> and </think>, or remove it"
        )
    if prompt is None and (has_thinking or not thinking):
        return len(header), text
    prompt = header if prompt is None else prompt
    begins_line = is_open and (prompt.endswith("\n") or (closed and not thinking))
    opened = ("" if is_open else "<think>") + ("" if begins_line else "\n")
    if has_thinking and is_open:
        answer = opened + re.sub(r"^\s*<think>\s*", "", answer)
    elif not has_thinking:
        answer = re.sub(r"^\s*<think>\s*</think>\s*", "", answer)
        if is_open or thinking:
            thought = template.as_text(f"{thinking}\n" if thinking else "", "assistant")
            close = closed[0] if closed else "</think>\n\n"
            answer = opened + thought + close + answer.lstrip()
    return len(prompt), prompt + answer


def _differing(text: str, other: str) -> str:
    """Return the characters of ``text`` from where it is not like ``other``, a few."""
    place = common(text, other)
    return plain(text[max(0, place - 12) : place + 12])


def _thinking_of(message: Message) -> tuple[str, str]:
    """Return what an answer thinks, in a key of its own or between marks in its text, and what it says."""
    content = message.content or ""
    if apart := next((message.more[key] for key in THINKING if message.more.get(key)), None):
        return str(apart).strip(), content.strip()
    before, _, behind = content.rpartition("</think>")
    return before.rpartition("<think>")[2].strip(), behind.strip()


def _ended(template: ChatTemplate, text: str, following: str) -> tuple[str, int]:
    """Return ``text`` with what ends its last answer, and where that ends."""
    if (end := template.end_of(text)) is not None:
        return text, end
    mark = template.mark_before(following) or template.mark_before("user") or template.names.get("eos_token", "")
    blanks = mark[: len(mark) - len(mark.lstrip())]
    text += mark.lstrip() if text.endswith(blanks) else mark
    return text, len(text)


def _left_out(messages: Sequence[Message], tools: Tools, text: str) -> set[str]:
    """Return what of a chat besides the answers is not in its rendered ``text``."""
    parts = [(f"a {m.role} message", m.content or "") for m in messages if m.role != "assistant"]
    schemas = [tool.get("function", tool) for tool in tools]
    parts += [("tools", str(schema.get("description") or schema.get("name", ""))) for schema in schemas]
    return {what for what, wanted in parts if not _holds(text, wanted)}


def _holds(text: str, wanted: str) -> bool:
    """Return whether ``text`` has ``wanted``, as it is or as in JSON, Python or HTML, however the blanks are."""
    if wanted in text:  # as nearly always
        return True
    squeezed = _without_blanks(text)
    return any(_without_blanks(form) in squeezed for form in (wanted, json.dumps(wanted)))


def _without_blanks(text: str) -> str:
    """Return ``text`` without blanks, backslashes and quotes, and without what stands for blanks in JSON."""
    return re.sub(r"\\[nrt]|[\s\\\"']", "", html.unescape(text))
