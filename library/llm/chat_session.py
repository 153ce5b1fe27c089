"""A chat with a language model: what was said, as tokens, and the keys and values already computed for them.

    chat = ChatSession(model.config, load_prompt_template("auto", tokenizer, folder, model.config.eos))
    for text in chat.answer(model, "What is RoPE?", SamplingSettings(temperature=0.7)):
        print(text, end="", flush=True)

The cache stays from turn to turn. A prompt shares its beginning with what is in the cache, usually all but the newest
message; only the rest goes through the model. (What the model said stays the tokens it said, see
``library.llm.chat_templates``.)

When the context is full, the oldest turns are left out, enough of them to make a quarter of the context free: their
removal moves everything behind them, which has to be computed again, and so this happens every few turns only. A
text without turns loses its oldest tokens instead.

A chat does not hold the model: several may be open while another model, or another LoRA, takes its place in
memory. Who exchanges weights says so, by ``switch`` or ``forget_cache``.

Whoever iterates over an answer may stop at any piece, or be stopped by an exception (Ctrl-C): what was said until
then is part of the chat, and the cache holds what was computed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from library.errors import UserError
from library.llm.chat_templates import Message, PromptTemplate, TextTemplate, Turn, common
from library.llm.generation import SamplingSettings, stream_tokens
from library.llm.tokenizers import IncrementalDecoder
from library.models.llm.model import TransformerLM
from library.models.llm.spec import LMConfig
from library.nn.kv_cache import KVCache

Ending = Literal["said", "max_new_tokens", "context", "stopped"]
_FIRST_CAPACITY = 256  # columns of a new cache; doubled as needed, as a context of 131,072 is gigabytes


@dataclass(frozen=True)
class AnswerStats:
    """What an answer took.

    Attributes:
        tokens: generated.
        cached: tokens of the prompt that were in the cache.
        computed: tokens of the prompt that were not.
        seconds: from the question to the end.
        ending: the model ended ("said"), a limit did, or whoever listened.
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
        system: the system message; may be set at any time.
        remarks: one line each about what the last answer had to leave out.
        stats: of the last answer.
        context: tokens that fit.
    """

    def __init__(
        self, config: LMConfig, template: PromptTemplate, system: str = "", context: int | None = None
    ) -> None:
        """Begin a chat.

        Args:
            config: of the model that will answer.
            template: how turns become tokens, with the model's tokenizer.
            system: message that precedes everything.
            context: tokens that prompt and answer may have; default: what the model was made for.
        """
        template.prompt(system, [], "?")
        self.system, self.turns = system, list[Turn]()
        self.remarks, self.stats = list[str](), None
        self._wanted_context = context
        self._attach(config, template)

    stats: AnswerStats | None

    def _attach(self, config: LMConfig, template: PromptTemplate) -> None:
        largest, wanted = config.context, self._wanted_context
        if wanted is not None and (wanted < 8 or (wanted > largest and not config.has_rope)):
            raise UserError(f"context: {wanted} does not fit; this model takes 8 to {largest} tokens")
        self.template, self.context = template, wanted or largest
        self.stop_tokens = (*template.tokenizer.stop_tokens, *template.ends, *config.eos)
        self._left_out = 0  # turns, or tokens of a text, at the beginning
        self.forget_cache()

    @property
    def messages(self) -> list[Message]:
        """Return all that was said, in order."""
        said = [Message("system", self.system)] if self.system else []
        for turn in self.turns:
            said += [Message("user", turn.question), Message("assistant", turn.answer)]
        return said

    def reset(self) -> None:
        """Forget all turns; the system message stays, and the cache of it."""
        self.turns.clear()
        self.remarks, self.stats, self._left_out = [], None, 0

    def take_back(self, turn: int) -> None:
        """Forget ``turn``, counted from 0, and all that followed; what was computed before it stays in the cache."""
        del self.turns[turn:]
        self.remarks, self.stats = [], None
        if self.template.has_turns:
            self._left_out = min(self._left_out, turn)
        else:
            self._left_out = 0  # tokens, of a text that is another now

    def restore(self, turns: Sequence[Turn]) -> None:
        """Take turns that were said before; tokens that do not say what their answer does are left out."""
        tokenizer = self.template.tokenizer
        self.reset()
        for turn in turns:
            known = all(0 <= token < tokenizer.vocab_size for token in turn.said)
            same = known and tokenizer.decode(list(turn.said), skip_special=True) == turn.answer
            self.turns.append(turn if same else replace(turn, said=()))

    def forget_cache(self) -> None:
        """Compute everything again for the next answer, as the model's weights are others now."""
        self._cache: KVCache | None = None
        self._cached: list[int] = []  # the tokens that are in it

    def begin_another(self) -> ChatSession:
        """Return an empty chat with the same model, template and system message."""
        other = copy.copy(self)
        other.turns = []
        other.reset()
        other.forget_cache()
        return other

    def switch(self, config: LMConfig, template: PromptTemplate) -> bool:
        """Go on with another model; return whether the turns so far could be kept.

        They cannot between a model with turns and one that continues a text.
        """
        kept = template.has_turns == self.template.has_turns
        if not kept:
            self.reset()
            self.system = ""
        self._attach(config, template)
        self.turns = [replace(turn, said=()) for turn in self.turns]  # tokens of another tokenizer
        return kept

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
        cached, said, tokens = cache.length, "", list[int]()
        ending: Ending = "stopped"
        decoder = IncrementalDecoder(self.template.tokenizer)
        try:
            for (token,) in stream_tokens(model, [prompt], chosen, cache):
                assert token is not None
                tokens.append(token)
                piece = decoder.add(token)
                said += piece
                yield piece
            ending = self._ending(tokens, room, settings)
            piece = decoder.rest()
            said += piece
            yield piece
        finally:
            self._cached = [*prompt, *tokens][: cache.length]
            if tokens:
                self.turns.append(Turn(text, said, tuple(tokens), ending == "said"))
            seconds = time.perf_counter() - started
            self.stats = AnswerStats(len(tokens), cached, len(prompt) - cached, seconds, ending)

    def _ending(self, tokens: list[int], room: int, settings: SamplingSettings) -> Ending:
        if tokens[-1] in self.stop_tokens:
            return "said"
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
        begin = self.template.beginning
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
