"""A chat with a language model: prompts that fit its context, and the KV cache of the tokens already computed.

    chat = ChatSession(model.config, load_prompt_template("auto", tokenizer, folder, model.config.eos))
    settings = SamplingSettings(temperature=0.7)
    prompt, remarks = chat.prompt("", [], "What is RoPE?", settings.max_new_tokens)
    for text in chat.answer(model, prompt, settings):
        print(text, end="", flush=True)

The cache stays from answer to answer. A prompt begins like the cached tokens, usually with all but the newest message;
only the rest goes through the model.

When the context is full, the oldest turns are left out, of a text without turns its oldest tokens. That shifts all
later positions, so they are computed again. It happens rarely, as a quarter of the context is freed at once.

The chat holds neither the model nor what was said. Call ``forget_cache`` when the model's weights change.

An answer may be stopped after any piece; the keys and values of what was generated stay in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from library.errors import UserError
from library.llm.chat_templates import PromptTemplate, Turn, common
from library.llm.generation import SamplingSettings, stream_tokens
from library.llm.tokenizers import IncrementalDecoder
from library.models.llm.model import TransformerLM
from library.models.llm.spec import LMConfig
from library.nn.kv_cache import KVCache

Ending = Literal["model", "max_new_tokens", "context", "stopped"]
_MORE_CAPACITY = 256  # columns of the cache beside a prompt; doubled as needed, as a context of 131,072 is gigabytes


class PromptTooLong(UserError):
    """A prompt has more tokens than the model's context."""


@dataclass(frozen=True)
class AnswerStats:
    """What an answer took.

    Attributes:
        tokens: those that were generated.
        cached: number of the prompt's tokens that were in the cache.
        computed: number of those that were not.
        seconds: from the question to the end.
        ending: what ended it: the model, a limit, or the caller ("stopped").
    """

    tokens: tuple[int, ...]
    cached: int
    computed: int
    seconds: float
    ending: Ending


class ChatSession:
    """Answers of one model.

    Attributes:
        stats: of the last answer.
        context: tokens that prompt and answer may have.
    """

    stats: AnswerStats

    def __init__(self, config: LMConfig, template: PromptTemplate) -> None:
        """Take the configuration of the model that will answer, and its template with its tokenizer."""
        self.template, self.context = template, config.context
        self.stop_tokens = (*template.tokenizer.stop_tokens, *template.ends, *config.eos)
        self.forget_cache()

    def forget_cache(self) -> None:
        """Compute all keys and values anew for the next answer: the model's weights have changed."""
        self._cache: KVCache | None = None
        self._cached: list[int] = []  # the tokens that are in it

    def prompt(self, system: str, turns: Sequence[Turn], text: str, wanted: int) -> tuple[list[int], list[str]]:
        """Return the tokens of turns and of what is said now, and a remark if the oldest had to be left out.

        Room is made for ``wanted`` tokens of an answer or a quarter of the context.

        Raises:
            UserError: the template has no place for the system message.
        """
        whole, quarter = self.template.prompt(system, turns, text), max(1, self.context // 4)
        missing = len(whole) + min(wanted, quarter) - self.context - 1
        if missing <= 0:
            return whole, []
        missing = -(-missing // quarter) * quarter  # in such steps the beginning shifts rarely
        if not self.template.has_turns:
            begin = len(self.template.tokenizer.begins)
            fitting, what = whole[:begin] + whole[begin + missing :], f"{missing} tokens"
        else:
            fitting, left_out = whole, 0
            while len(whole) - len(fitting) < missing and left_out < len(turns):
                left_out += 1
                fitting = self.template.prompt(system, turns[left_out:], text)
            what = f"{left_out} of {len(turns) + 1} turns"
        return fitting, [f"the context of {self.context} tokens is full; the oldest {what} are left out"]

    def answer(
        self, model: TransformerLM, prompt: Sequence[int], settings: SamplingSettings, shown: Collection[str] = ()
    ) -> Generator[str]:
        """Yield the model's answer piece by piece, one a token; a piece is empty while a character is incomplete.

        Args:
            model: of the configuration, in eval mode.
            prompt: tokens.
            settings: how tokens are chosen; their stop tokens are the model's.
            shown: special tokens that are part of the text.

        Raises:
            PromptTooLong: no token fits behind the prompt.
        """
        started = time.perf_counter()
        if len(prompt) > self.context:
            raise PromptTooLong(
                f"the message makes a prompt of {len(prompt)} tokens, the context has room for {self.context}; "
                "shorten the message"
            )
        room = min(settings.max_new_tokens, self.context + 1 - len(prompt))  # the last token needs no place
        cache, tokens = self._ready_cache(model, list(prompt)), list[int]()
        cached = cache.length
        decoder = IncrementalDecoder(self.template.tokenizer, shown)
        chosen = replace(settings, max_new_tokens=room, stop_tokens=self.stop_tokens)
        ending: Ending = "stopped"
        try:
            for (token,) in stream_tokens(model, [prompt], chosen, cache):
                assert token is not None
                tokens.append(token)
                yield decoder.add(token)
                if cache.length == cache.capacity:
                    cache.grow(min(2 * cache.capacity, self.context + 1))
            at_limit: Ending = "max_new_tokens" if room == settings.max_new_tokens else "context"
            ending = "model" if tokens[-1] in self.stop_tokens else at_limit
            yield decoder.rest()
        finally:
            self._cached = [*prompt, *tokens][: cache.length]
            seconds = time.perf_counter() - started
            self.stats = AnswerStats(tuple(tokens), cached, len(prompt) - cached, seconds, ending)

    def _ready_cache(self, model: TransformerLM, prompt: list[int]) -> KVCache:
        """Return a cache with room for the prompt that holds as much of its beginning as was computed."""
        capacity = min(len(prompt) + _MORE_CAPACITY, self.context + 1)
        if self._cache is None:
            self._cache = model.new_cache(1, capacity)
        same = common(self._cached, prompt[:-1])  # at least one token has to give the next one's logits
        self._cache.rewind(same)
        self._cached = prompt[:same]
        if capacity > self._cache.capacity:
            self._cache.grow(max(capacity, min(2 * self._cache.capacity, self.context + 1)))
        return self._cache
