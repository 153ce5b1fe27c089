"""Chat templates: messages to the tokens of a prompt, as a model was trained with.

    tokenizer the Jinja template beside the tokenizer (``chat_template.jinja``, or in ``tokenizer_config.json``), or in
              the GGUF file
    llama3    <|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>...
    llama2    <s>[INST] <<SYS>>\nsystem\n<</SYS>>\n\nHello [/INST] Hi </s><s>[INST] ...
    chatml    <|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n
    plain     system\n\nUser: Hello\nAssistant: Hi<|endoftext|>User: ...             for base models without marks
    FILE      a Jinja template of one's own
    text      no messages at all: a base model continues what was typed, and what it wrote itself

A :class:`PromptTemplate` makes the prompt that a model goes on from. One with messages is a :class:`ChatTemplate`: its
Jinja is rendered by transformers and the text is encoded, whatever the template does to earlier turns. Which of the
tokens the assistant said, for training, is found in ``library.llm.chat_targets``.

Only a template's own marks become special tokens, not their names in a message; an assistant's message may hold those
of thinking (``[THINK]``). Some templates end a turn by ordinary text (``[/INST]``, ``\nAssistant:``, ``###
Response:``): a message that holds it is refused, as Meta's own code does with Llama 2's. So in no template can the text
of a message end its turn.

All but ``text`` are Jinja, which transformers, vLLM and llama.cpp's converter read from a model's folder too: the
built-in ones, in ``templates/`` beside this module, can be written there (:func:`write_jinja_template`).

Sources: Llama 3: https://www.llama.com/docs/model-cards-and-prompt-formats/meta-llama-3/; Llama 2: meta-llama/llama
``llama/generation.py``; ChatML: openai-python ``chatml.md`` as Qwen publishes it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from library.errors import UserError
from library.files import read_json, read_text, write_text
from library.gguf_header import gguf_file
from library.llm.tokenizer_files import read_gguf_templates
from library.llm.tokenizers import Tokenizer

JINJA_FILE = "chat_template.jinja"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BREAK = "\ufdd0"  # no character: put into special tokens' names in messages, and taken out again before encoding
_BREAKS = re.compile(rf"{_BREAK}|\\ufdd0")  # as it is, and as JSON and Python may write it
PROBE = "\ufdd1"  # no character: a message whose place in the rendered text is looked for
_NOTHING: Mapping[str, Any] = {}
_NOT_ARGUMENTS = {"messages", "tools", "conversations", "chat_template", "add_generation_prompt"}


class Message(NamedTuple):
    """What one side says.

    Attributes:
        role: system, user, assistant or tool.
        content: its text; None where it has none, as a call of a tool.
        more: what else templates read: tool_calls, tool_call_id, name, reasoning_content.
    """

    role: str
    content: str | None
    more: Mapping[str, Any] = _NOTHING

    @property
    def called(self) -> list[str]:
        """The names of the functions that it calls."""
        return [call["function"]["name"] for call in self.more.get("tool_calls") or ()]


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    Attributes:
        question, answer: as text.
        tokens: the answer as generated, for a text that is continued; empty if another model generated it.
        ended: the model itself ended its answer, by the last one of ``tokens``.
    """

    question: str
    answer: str
    tokens: tuple[int, ...]
    ended: bool


class PromptTemplate(ABC):
    """Makes prompts, with one tokenizer.

    Attributes:
        name: as a user writes it.
        has_turns: whether there are messages (else one text that is continued).
    """

    name: str
    has_turns: bool

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end an answer, besides those that end a text."""
        return ()

    @abstractmethod
    def prompt(self, system: str, turns: Sequence[Turn], text: str) -> list[int]:
        """Return the tokens of turns, and of what is said now, up to where the model goes on."""


class TextTemplate(PromptTemplate):
    """One text, which the model continues."""

    name = "text"
    has_turns = False

    def prompt(self, system: str, turns: Sequence[Turn], text: str) -> list[int]:
        """Return the prompt; what is typed begins a new line if there is text before. Nothing typed means: go on."""
        if system:
            raise UserError("a system message: this model only continues text; remove it, or choose another template")
        if not turns:
            return self.tokenizer.encode_prompt(text)
        tokens, open_end = [*self.tokenizer.begins], False
        for turn in turns:
            tokens += self._typed(turn.question, open_end)
            tokens += turn.tokens if self._spells(turn) else self.tokenizer.encode(turn.answer)
            open_end = not turn.ended
        return tokens + self._typed(text, open_end)

    def _spells(self, turn: Turn) -> bool:
        """Return whether the turn's tokens are its answer: they may come from another tokenizer."""
        known = set(turn.tokens) <= set(range(self.tokenizer.vocab_size))
        return known and self.tokenizer.decode(turn.tokens, skip_special=True) == turn.answer

    def _typed(self, text: str, after_text: bool) -> list[int]:
        return self.tokenizer.encode(f"\n{text}" if text and after_text else text)


class ChatTemplate(PromptTemplate):
    """A Jinja template, rendered by transformers.

    Attributes:
        sources: the Jinja by name: "default", and "tool_use" where there is another one for chats with tools.
        names: the special tokens that it may name (``bos_token``).
        arguments: what else it is given (``enable_thinking``).
    """

    has_turns = True

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        sources: Mapping[str, str],
        names: Mapping[str, str],
        arguments: Mapping[str, Any] = _NOTHING,
    ) -> None:
        super().__init__(tokenizer)
        self.name, self.sources, self.names, self.arguments = name, sources, names, arguments
        self._marks_before: dict[str, str] = {}  # by role
        self._special = _any_of(tokenizer.special)
        self._special_but_thinking = _any_of(name for name in tokenizer.special if "think" not in name.lower())

    @property
    def stored(self) -> str:
        """What a LoRA stores, for :func:`load_chat_template`: its name, or the text of one of one's own."""
        return self.name if self.name in CHAT_TEMPLATES else self.sources["default"]

    def prompt_tokens(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the tokens of ``messages`` up to where the assistant's next answer begins.

        Args:
            messages: in order.
            tools: JSON schemas of functions, as transformers' ``apply_chat_template`` takes them.

        Raises:
            UserError: the template has no place for a role or an order, or a message holds a text that ends its turn.
        """
        self.refuse_text_marks(messages, is_prompt=True)
        return self.encode(self.render(messages, tools, answer_next=True)[0])[0]

    def prompt(self, system: str, turns: Sequence[Turn], text: str) -> list[int]:
        """Return the prompt; an answer that was stopped or cut off ends as the template ends answers."""
        if not text.strip():
            raise UserError("the message is empty; write something")
        messages = [Message("system", system)] if system else []
        for turn in turns:
            messages += [Message("user", turn.question), Message("assistant", turn.answer)]
        return self.prompt_tokens([*messages, Message("user", text)])

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), answer_next: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, for :meth:`encode`, and where the template marks (``{% generation %}``) what was generated.

        Raises:
            UserError: the template refuses the messages.
        """
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        if taken := sorted(_NOT_ARGUMENTS & self.arguments.keys()):
            raise UserError(f"chat_template_args: {taken[0]} is set by Tandem itself; remove it")
        source = self.sources["tool_use" if tools and "tool_use" in self.sources else "default"]
        is_marked = _GENERATION.search(source) is not None
        try:
            texts, spans = render_jinja_template(
                [[self._fields(message) for message in messages]],
                tools=[self.as_text(tool) for tool in tools] or None,
                chat_template=source,
                return_assistant_tokens_mask=is_marked,
                add_generation_prompt=answer_next,
                **{**self.names, **self.arguments},
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            reason: object = error
            if any(message.content is None for message in messages):  # some want a text beside a call
                filled = [message._replace(content=message.content or "") for message in messages]
                text, spans = self.render(filled, tools, answer_next)
                if all(name in plain(text) for message in messages for name in message.called):
                    return text, spans
                reason = "it has no place for calls of tools, as chatml has"
            raise UserError(
                f"chat_template: {self.name} refuses the conversation ({reason}); correct it or choose another template"
            ) from None
        return texts[0], list(spans[0]) if is_marked else []

    def render_if_taken(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), answer_next: bool = False
    ) -> str | None:
        """Return the text, or None if the template refuses the messages."""
        try:
            return self.render(messages, tools, answer_next)[0]
        except UserError:
            return None

    def encode(self, text: str, cuts: Sequence[int] = ()) -> tuple[list[int], list[int]]:
        """Return the tokens of a rendered ``text``, and how many of them come before each of ``cuts``.

        Args:
            text: of :meth:`render`.
            cuts: places of characters, in order. A token that lies on both sides of a cut comes behind it.

        Special tokens divide the text, so only the part that a cut falls into is encoded a second time, up to there.
        Tokenizers that strip blanks beside special tokens, or treat a text's first word alone as one, have one part.
        """
        special, encode = self.tokenizer.special, self.tokenizer.encode
        has_breaks = plain(text) != text
        if not cuts and not has_breaks:
            return encode(text, special=True), []
        parts = [part for part in re.split(f"({self._special.pattern})", text) if part]
        encoded = [encode(plain(part), special=part in special) for part in parts]
        tokens = [*chain.from_iterable(encoded)]
        divided = has_breaks or tokens == (together := encode(text, special=True))
        if not divided:
            parts, encoded, tokens = [text], [together], together
        counts, part, begin, count = [], 0, 0, 0
        for cut in cuts:
            while part < len(parts) and begin + len(parts[part]) <= cut:
                part, begin, count = part + 1, begin + len(parts[part]), count + len(encoded[part])
            before = plain(parts[part][: cut - begin]) if begin < cut else ""
            counts.append(count + (common(encode(before, special=not divided), encoded[part]) if before else 0))
        return tokens, counts

    def divides(self, text: str, place: int) -> bool:
        """Return whether no token of a rendered ``text`` lies on both sides of ``place``."""
        first = max((found.end() for found in self._special.finditer(text, 0, place)), default=0)
        after = self._special.search(text, place)
        around = plain(text[first : after.start() if after else None])
        before = self.tokenizer.encode(plain(text[first:place]))
        return common(before, self.tokenizer.encode(around)) == len(before)

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end an answer: the template's own mark, or those that begin what may follow."""
        marks = [self.answer_end] if self.answer_end else [self.mark_before("user"), self.mark_before("tool")]
        encoded = [self.tokenizer.encode(mark.strip(), special=True) for mark in marks]
        return tuple(dict.fromkeys(tokens[0] for tokens in encoded if len(tokens) == 1))

    @cached_property
    def answer_end(self) -> str:
        """What ends an answer: what the template writes behind it, to the first special token; "" for nothing."""
        found = self._special.search(self._tail)
        return self._tail[: found.end()] if found else self._tail

    @cached_property
    def _tail(self) -> str:
        """What the template writes behind the last answer, without blanks at its end."""
        text = self.render_if_taken([Message("user", "?"), Message("assistant", PROBE)])
        return (text or "").rpartition(PROBE)[2].rstrip()

    def mark_before(self, role: str) -> str:
        """Return what stands between an answer and a message of ``role``, its first special token included, or ""."""
        if role not in self._marks_before:
            messages = [Message("user", "?"), Message("assistant", PROBE), Message(role, f"{PROBE}!")]
            between = (self.render_if_taken(messages) or "").partition(PROBE)[2].partition(f"{PROBE}!")[0]
            found = self._special.search(between)
            self._marks_before[role] = between[: found.end()] if found else ""
        return self._marks_before[role]

    def marks(self, text: str) -> Counter[str]:
        """Return how often a rendered ``text`` has each special token, those of thinking left out."""
        return Counter(self._special_but_thinking.findall(text))

    def end_of(self, text: str) -> int | None:
        """Return where the mark ends that ends the answer at the end of a rendered ``text``; None if there is none."""
        text = text.rstrip()
        if self._tail and text.endswith(self._tail):
            return len(text) - len(self._tail) + len(self.answer_end)
        found = [match.end() for match in self._special_but_thinking.finditer(text)]
        return len(text) if found[-1:] == [len(text)] else None

    def refuse_text_marks(self, messages: Sequence[Message], is_prompt: bool = False) -> None:
        """Raise a UserError for a message that holds the ordinary text by which such messages end."""
        for number, message in enumerate(messages, 1):
            mark = self._text_marks.get(message.role)
            if mark and mark in (message.content or "") and not (is_prompt and message.role == "assistant"):
                raise UserError(  # a model may say what it likes
                    f"message {number} ({message.role}): holds {mark!r}, by which the chat template {self.name} ends "
                    "such messages; write it otherwise, or choose a template whose marks are special tokens"
                )

    @cached_property
    def _text_marks(self) -> dict[str, str]:
        """The ordinary text that ends messages of a role, by role; those that end with a special token have none."""
        for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user")):
            messages = [Message(role, f"{PROBE}{number}{PROBE}") for number, role in enumerate(roles)]
            if (text := self.render_if_taken(messages)) is None:  # without a system message, then
                continue
            marks = {}
            for one, other in pairwise(messages):
                between = text.partition(str(one.content))[2].partition(str(other.content))[0]
                if between.strip() and not self._special.search(between):
                    marks[one.role] = between.strip(" ")
            return marks
        return {}

    def _fields(self, message: Message) -> dict[str, Any]:
        """Return ``message`` as templates read it; apply_chat_template leaves out what is None, too."""
        fields = {"role": message.role, "content": message.content, **message.more}
        return {key: self.as_text(value, message.role) for key, value in fields.items() if value is not None}

    def as_text(self, value: Any, role: str = "") -> Any:
        """Return ``value`` of a message with the names of special tokens in its texts cut in two."""
        return _broken(value, self._special_but_thinking if role == "assistant" else self._special)


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Return what finds the longest of ``names``; of no names nothing."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")


def _broken(value: Any, special: re.Pattern[str]) -> Any:
    """Return ``value`` with the names of special tokens in its texts cut in two."""
    if isinstance(value, str):
        return special.sub(lambda name: f"{name[0][:1]}{_BREAK}{name[0][1:]}", value)
    if isinstance(value, Mapping):
        return {_broken(key, special): _broken(each, special) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_broken(each, special) for each in value]
    return value


def plain(text: str) -> str:
    """Return a rendered ``text`` as it is encoded: the names of special tokens in messages whole."""
    return _BREAKS.sub("", text)


def common(first: Sequence[int] | str, second: Sequence[int] | str) -> int:
    """Return how many tokens or characters both begin with."""
    for place, (one, other) in enumerate(zip(first, second)):
        if one != other:
            return place
    return min(len(first), len(second))


# The templates beside this module, and the special tokens that each cannot do without.
BUILT_IN = {
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "llama2": ("bos_token", "eos_token"),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "plain": ("eos_token",),
}
CHAT_TEMPLATES = ("auto", "tokenizer", *BUILT_IN)


def built_in_template(name: str, tokenizer: Tokenizer, arguments: Mapping[str, Any] = _NOTHING) -> ChatTemplate:
    """Return the built-in template called ``name``; raises a UserError where the tokenizer lacks a token of it."""
    names = _end_names(tokenizer)
    if missing := [token for token in BUILT_IN[name] if token not in (*names, *tokenizer.special)]:
        raise UserError(
            f"chat_template: the tokenizer has no {missing[0]}, so no {name} chat; choose another template, or the "
            "tokenizer of an instruct model"
        )
    return ChatTemplate(name, tokenizer, {"default": _source(name)}, names, arguments)


def _end_names(tokenizer: Tokenizer) -> dict[str, str]:
    spelled = {number: token for token, number in tokenizer.special.items()}
    ends = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos}
    return {key: spelled[number] for key, number in ends.items() if number is not None}


def _source(name: str) -> str:
    return Path(__file__).with_name("templates").joinpath(f"{name}.jinja").read_text(encoding="utf-8")


def load_chat_template(
    name: str, tokenizer: Tokenizer, folder: str | Path, arguments: Mapping[str, Any] = _NOTHING
) -> ChatTemplate:
    """Return the template called ``name`` for the tokenizer that was read from ``folder``.

    Args:
        name: one of ``CHAT_TEMPLATES``, the file of a Jinja template, or its text. "auto" is the tokenizer's own where
            there is one; else the one whose marks it has; else Llama 2's for a vocabulary with <s> and </s>, and plain.
        tokenizer: the model's.
        folder: the model's, or its tokenizer's; or a file in it.
        arguments: what else the template is given.

    Raises:
        UserError: no such template, or the tokenizer lacks a token of it.
    """
    sources, names = jinja_sources(Path(folder).expanduser())
    if name in ("auto", "tokenizer") and sources:
        return ChatTemplate("tokenizer", tokenizer, sources, names, arguments)
    if name == "tokenizer":
        raise UserError(f"chat_template: {folder} has no template of its own; choose {', '.join(BUILT_IN)}")
    if name == "auto":
        name = _fitting(tokenizer)
    if name in BUILT_IN:
        return built_in_template(name, tokenizer, arguments)
    is_text = "{" in name  # as a LoRA stores a template of one's own
    source = name if is_text else _file_source(Path(name).expanduser())
    names = {**_end_names(tokenizer), **names}
    return ChatTemplate("of its own" if is_text else name, tokenizer, {"default": source}, names, arguments)


def _file_source(file: Path) -> str:
    if not file.is_file():
        raise UserError(
            f"chat_template: {file} is no file; name a Jinja template's file, or one of {', '.join(CHAT_TEMPLATES)}"
        )
    return read_text(file)


def template_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Return ``name=value`` pairs; a value is JSON where it can be read as such, else text."""
    arguments: dict[str, Any] = {}
    for pair in pairs:
        name, is_pair, value = pair.partition("=")
        if not (is_pair and name.isidentifier()):
            raise UserError(f"chat_template_args: {pair!r} is no name=value; write enable_thinking=false")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = {"True": True, "False": False, "None": None}.get(value, value)
    return arguments


def load_prompt_template(
    name: str, tokenizer: Tokenizer, folder: Path, ends: Sequence[int], arguments: Mapping[str, Any] = _NOTHING
) -> PromptTemplate:
    """Return the template called ``name``; "auto" looks at what was published with the model.

    Base models share the tokenizer, marks included, with the instruct models made from them. What tells an instruct
    model: there is a template beside its tokenizer, its configuration ends texts where turns end, or (Meta's own files
    say nothing) its folder's name. Other models are taken for base models.

    Args:
        name: as for :func:`load_chat_template`, or "text", which continues what is typed.
        tokenizer: the model's.
        folder: the model's.
        ends: the configuration's tokens that end a text.
        arguments: what else the template is given.
    """
    turn_ends = {tokenizer.special.get(mark) for mark in ("<|eot_id|>", "<|im_end|>")}
    instruct = any(word in folder.name.lower() for word in ("instruct", "chat")) or turn_ends.intersection(ends)
    if name == "text" or (name == "auto" and not instruct and not jinja_sources(folder)[0]):
        return TextTemplate(tokenizer)
    return load_chat_template(name, tokenizer, folder, arguments)


def _fitting(tokenizer: Tokenizer) -> str:
    if all(mark in tokenizer.special for mark in BUILT_IN["llama3"]):
        return "llama3"
    if "<|im_start|>" in tokenizer.special:
        return "chatml"
    return "llama2" if {"<s>", "</s>"} <= tokenizer.special.keys() else "plain"


def jinja_sources(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the templates beside a tokenizer by name, and the special tokens that they may name (``bos_token``).

    The one that is always used is called "default"; there may be another one for chats with tools ("tool_use").
    """
    if (gguf := gguf_file(folder)) is not None and not (gguf.parent / JINJA_FILE).is_file():
        return read_gguf_templates(gguf)
    folder = folder if folder.is_dir() else folder.parent
    values: dict[str, Any] = {}
    for file in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        values |= read_json(file) if file.is_file() else {}
    source = values.get("chat_template")
    if (file := folder / "chat_template.json").is_file():  # beside processors of images
        source = read_json(file).get("chat_template", source)
    if isinstance(source, list):
        source = {each["name"]: each["template"] for each in source}
    sources = source if isinstance(source, dict) else {"default": source}
    if (file := folder / JINJA_FILE).is_file():
        sources = {"default": read_text(file)}
        sources |= {file.stem: read_text(file) for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    named = {key: value for key, value in values.items() if key.endswith("_token") and value}
    texts = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
    names = {key: text for key, text in texts.items() if isinstance(text, str)}
    usable = {name: text for name, text in sources.items() if isinstance(text, str) and name.isidentifier()}
    return (usable if usable.get("default") else {}), names


def write_jinja_template(stored: str, folder: Path, arguments: Mapping[str, Any] = _NOTHING) -> Path:
    """Write a template into a model's folder, in place of one that is there; return its file.

    Args:
        stored: as a LoRA stores it: the name of a built-in one, "tokenizer" for the folder's own, or a Jinja text.
        folder: the model's.
        arguments: what the template was given.
    """
    path = folder / JINJA_FILE
    source = _source(stored) if stored in BUILT_IN else stored
    if stored == "tokenizer":
        source = jinja_sources(folder)[0].get("default", "")
    write_text(path, with_arguments(source, arguments))
    return path


def with_arguments(source: str, arguments: Mapping[str, Any]) -> str:
    """Return ``source`` with ``arguments`` as its own values, for programs that give it none."""
    values = (f"{{%- set {name} = {name} if {name} is defined else {value!r} %}}" for name, value in arguments.items())
    return "".join([*values, source])
