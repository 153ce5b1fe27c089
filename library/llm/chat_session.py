"""A chat with a language model: its turns as tokens, and the KV cache of those already computed.

    chat = ChatSession(model.config, load_prompt_template("auto", tokenizer, folder, model.config.eos))
    for text in chat.answer(model, "What is RoPE?", SamplingSettings(temperature=0.7)):
        print(text, end="", flush=True)

The cache stays from turn to turn. A prompt begins like the cached tokens, usually with all but the newest message; only
the rest goes through the model. (Answers are kept as the tokens that were generated, see
``library.llm.chat_templates``.)

When the context is full, the oldest turns are left out, enough of them to free a quarter of the context. Leaving one
out shifts all later positions, so they are computed again; freeing a quarter makes that rare. A text without turns
loses its oldest tokens instead.

The chat does not hold the model. Call ``forget_cache`` when the model's weights change.

An answer may be stopped after any piece: what was generated until then is part of the chat, and its keys and values
stay in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from library.errors import UserError
from library.llm.chat_templates import PromptTemplate, TextTemplate, Turn, common
from library.llm.generation import SamplingSettings, stream_tokens
from library.llm.tokenizers import IncrementalDecoder
from library.models.llm.model import TransformerLM
from library.models.llm.spec import LMConfig
from library.nn.kv_cache import KVCache

Ending = Literal["model", "max_new_tokens", "context", "stopped"]
_FIRST_CAPACITY = 256  # columns of a new cache; doubled as needed, as a context of 131,072 is gigabytes


@dataclass(frozen=True)
class AnswerStats:
    """What an answer took.

    Attributes:
        tokens: generated.
        cached: tokens of the prompt that were in the cache.
        computed: tokens of the prompt that were not.
        seconds: from the question to the end.
        ending: what ended it: the model, a limit, or the caller ("stopped").
    """

    tokens: int
    cached: int
    computed: int
    seconds: float
    ending: Ending


class ChatSession:
    """Turns with one model.

    Attributes:
        turns: all of them, those that no longer fit the context too.
        system: the system message.
        remarks: one line each about what the last answer had to leave out.
        stats: of the last answer.
        context: tokens that prompt and answer may have.
    """

    def __init__(self, config: LMConfig, template: PromptTemplate, system: str = "") -> None:
        """Begin a chat.

        Args:
            config: of the model that will answer.
            template: how turns become tokens, with the model's tokenizer.
            system: message that precedes everything.
        """
        self.template, self.context = template, config.context
        self.stop_tokens = (*template.tokenizer.stop_tokens, *template.ends, *config.eos)
        self.forget_cache()
        self.restore([], system)

    stats: AnswerStats | None

    def restore(self, turns: Sequence[Turn], system: str = "") -> None:
        """Continue another conversation; a cached beginning that both share stays cached.

        A turn's tokens are dropped where they do not decode to its answer: they come from another tokenizer.

        Raises:
            UserError: the template has no system message.
        """
        self.template.prompt(system, [], "?")
        tokenizer = self.template.tokenizer
        self.system, self.turns = system, list[Turn]()
        self.remarks, self.stats = list[str](), None
        self._left_out = 0  # turns, or tokens of a text, at the beginning
        for turn in turns:
            known = all(0 <= token < tokenizer.vocab_size for token in turn.tokens)
            same = known and tokenizer.decode(list(turn.tokens), skip_special=True) == turn.answer
            self.turns.append(turn if same else replace(turn, tokens=()))

    def forget_cache(self) -> None:
        """Compute all keys and values anew for the next answer: the model's weights have changed."""
        self._cache: KVCache | None = None
        self._cached: list[int] = []  # the tokens that are in it

    def answer(self, model: TransformerLM, text: str, settings: SamplingSettings) -> Iterator[str]:
        """Yield the model's answer piece by piece, one a token; a piece is empty while a character is incomplete.

        Args:
            model: of the configuration, in eval mode.
            text: what the user says.
            settings: how tokens are chosen; their stop tokens are the model's. The seed counts up with the turns, or
                every answer would be drawn with the same numbers.
        """
        started = time.perf_counter()
        prompt = self._fitted(text, settings.max_new_tokens)
        room = min(settings.max_new_tokens, self.context + 1 - len(prompt))  # the last token needs no place
        chosen = replace(
            settings, max_new_tokens=room, seed=settings.seed + len(self.turns), stop_tokens=self.stop_tokens
        )
        cache = self._ready_cache(model, prompt, len(prompt) + room)
        cached, answer, tokens = cache.length, "", list[int]()
        ending: Ending = "stopped"
        decoder = IncrementalDecoder(self.template.tokenizer)
        try:
            for (token,) in stream_tokens(model, [prompt], chosen, cache):
                assert token is not None
                tokens.append(token)
                piece = decoder.add(token)
                answer += piece
                yield piece
            ending = self._ending(tokens, room, settings)
            piece = decoder.rest()
            answer += piece
            yield piece
        finally:
            self._cached = [*prompt, *tokens][: cache.length]
            if tokens:
                self.turns.append(Turn(text, answer, tuple(tokens), ending == "model"))
            seconds = time.perf_counter() - started
            self.stats = AnswerStats(len(tokens), cached, len(prompt) - cached, seconds, ending)

    def _ending(self, tokens: list[int], room: int, settings: SamplingSettings) -> Ending:
        if tokens[-1] in self.stop_tokens:
            return "model"
        if room == settings.max_new_tokens:
            return "max_new_tokens"
        self.remarks.append(f"the context of {self.context} tokens is full; the answer ends here")
        return "context"

    def _fitted(self, text: str, wanted: int) -> list[int]:
        """Return the prompt, with enough left out for an answer of ``wanted`` tokens or a quarter of the context."""
        self.remarks = []
        quarter = max(1, self.context // 4)
        fits = self._fitted_text if isinstance(self.template, TextTemplate) else self._fitted_turns
        prompt, left_out = fits(text, min(wanted, quarter), quarter)
        if len(prompt) > self.context:
            raise UserError(
                f"the message makes a prompt of {len(prompt)} tokens, the context has room for {self.context}; "
                "shorten the message"
            )
        if left_out > self._left_out:
            what = f"{left_out} of {len(self.turns) + 1} turns" if self.template.has_turns else f"{left_out} tokens"
            self.remarks.append(f"the context of {self.context} tokens is full; the oldest {what} are left out")
        self._left_out = left_out
        return prompt

    def _fitted_turns(self, text: str, least: int, quarter: int) -> tuple[list[int], int]:
        """Return the prompt and the number of turns left out: if not ``least`` tokens are free, until a quarter is."""
        left_out, needed = self._left_out, least
        while True:
            prompt = self.template.prompt(self.system, self.turns[left_out:], text)
            if self.context + 1 - len(prompt) >= needed or left_out == len(self.turns):
                return prompt, left_out
            left_out, needed = left_out + 1, quarter

    def _fitted_text(self, text: str, least: int, quarter: int) -> tuple[list[int], int]:
        """Return the prompt and the number of tokens left out, as for turns; what is typed may lose its beginning."""
        assert isinstance(self.template, TextTemplate)
        begin = self.template.tokenizer.begins
        whole = self.template.prompt(self.system, self.turns, text)[len(begin) :]
        left_out = self._left_out
        free = self.context + 1 - len(begin) - (len(whole) - left_out)
        if free < least:
            left_out += quarter - free
        return begin + whole[left_out:], left_out

    def _ready_cache(self, model: TransformerLM, prompt: list[int], capacity: int) -> KVCache:
        """Return a cache for ``capacity`` tokens that holds as much of the prompt's beginning as was computed."""
        if self._cache is None:
            self._cache = model.new_cache(1, max(capacity, min(_FIRST_CAPACITY, self.context + 1)))
        same = common(self._cached, prompt[:-1])  # at least one token has to give the next one's logits
        self._cache.rewind(same)
        self._cached = prompt[:same]
        if capacity > self._cache.capacity:
            self._cache.grow(max(capacity, min(2 * self._cache.capacity, self.context + 1)))
        return self._cache
