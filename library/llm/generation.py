"""Text from a language model, one token at a time: what is drawn, and the loop that draws it.

Per token the logits go through, in this order (transformers' order, so that the same settings give the same
distribution):

    repetition penalty   of tokens that occurred: positive logits divided, negative ones multiplied (Keskar et al. 2019,
                         arXiv 1909.05858)
    temperature          logits divided; 0 is greedy, the most likely token
    top-k                the k most likely stay
    top-p                the fewest most likely tokens stay whose probabilities reach p (arXiv 1904.09751)
    min-p                tokens stay that have at least p times the most likely one's probability (arXiv 2407.01082)

The number a token is drawn with is a function of (seed, row, place), so a prompt gives the same text alone or in a
batch. Prompts of different lengths share a batch by left padding (``library.nn.kv_cache`` says why). The loop asks the
device for the new tokens only where somebody reads them: each step, when streaming or looking for stop tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from library.errors import NotFiniteError, UserError
from library.models.llm.model import TransformerLM
from library.nn.kv_cache import KVCache
from library.randomness import generator


@dataclass(frozen=True)
class SamplingSettings:
    """How a token is chosen, and when to stop.

    Attributes:
        max_new_tokens: at most so many per prompt.
        temperature: 0 is greedy.
        top_k, top_p, min_p: off at None.
        repetition_penalty: 1 is off.
        seed: of the drawn tokens.
        stop_tokens: a row ends with the first of these (which is part of it).
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        warm = 1e-4 <= self.temperature <= 1e6
        for name, fits, limit in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.greedy or warm, "0 (greedy), or from 0.0001 to 1000000"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p is None or 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "from 0.01 to 100"),
        ):
            if not fits:
                raise UserError(f"{name}: {getattr(self, name)} does not fit; it must be {limit}")
        filters = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        if self.greedy and filters:
            raise UserError(f"{filters[0]}: has no effect at temperature 0 (greedy); remove it or raise temperature")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0


def adjusted_logits(logits: Tensor, seen: Tensor | None, settings: SamplingSettings) -> Tensor:
    """Return the logits [B, V] that tokens are drawn from, fp32; excluded tokens are -inf.

    Args:
        logits: [B, V] of the next token.
        seen: bool [B, V], which tokens occurred in prompt and text; needed for a repetition penalty only.
        settings: greedy ones leave out all but the penalty.
    """
    logits = logits.float()
    if not bool(logits.amax(dim=-1).isfinite().all()):  # NaN or infinity somewhere, or -infinity everywhere
        raise NotFiniteError("the model computes NaN or infinity; lower the LoRA's strength, or give sound weights")
    if settings.repetition_penalty != 1.0:
        assert seen is not None
        penalised = torch.where(logits > 0, logits / settings.repetition_penalty, logits * settings.repetition_penalty)
        logits = torch.where(seen, penalised, logits)
    if settings.greedy:
        return logits
    if settings.temperature != 1.0:
        logits = logits / settings.temperature
    if settings.top_k is not None and settings.top_k < logits.shape[-1]:
        smallest = logits.topk(settings.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if settings.top_p is not None and settings.top_p < 1.0:
        # Rising, as transformers sorts, so that ties fall on the same side.
        ordered, places = logits.sort(dim=-1)
        dropped = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - settings.top_p
        dropped[:, -1] = False
        logits = logits.masked_fill(dropped.scatter(1, places, dropped), float("-inf"))
    if settings.min_p is not None:
        probabilities = logits.softmax(dim=-1)
        least = settings.min_p * probabilities.amax(dim=-1, keepdim=True)
        logits = logits.masked_fill(probabilities < least, float("-inf"))
    return logits


def choose(logits: Tensor, uniform: Tensor | None) -> Tensor:
    """Return one token a row [B, 1]: the largest logit, or where ``uniform`` [B, 1] in [0, 1) falls among the summed
    probabilities.
    """
    if uniform is None:
        return logits.argmax(dim=-1, keepdim=True)
    sums = logits.softmax(dim=-1).cumsum(dim=-1)
    chosen = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
    # rounding may put the number behind the last token that has any probability
    last = logits.shape[-1] - 1 - logits.isfinite().flip(-1).int().argmax(dim=-1, keepdim=True)
    return torch.minimum(chosen, last)


def stream_tokens(
    model: TransformerLM,
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings,
    cache: KVCache | None = None,
) -> Iterator[list[int | None]]:
    """Yield, step by step, the new token of every prompt; None for those that have ended.

    Args:
        model: in eval mode, on any device.
        prompts: tokens of each, at least one; lengths may differ.
        settings: how to choose and when to stop.
        cache: of one prompt, which begins with the tokens that are in it; it has room for prompt and new tokens, and
            keeps what was computed. Default: an empty one.
    """
    # What split weights are gathered into is trained on later, which tensors of inference mode are no good for.
    quietly = torch.no_grad() if isinstance(model, FSDPModule) else torch.inference_mode()
    return quietly(_stream)(model, prompts, settings, cache)


def _stream(
    model: TransformerLM, prompts: Sequence[Sequence[int]], settings: SamplingSettings, cache: KVCache | None
) -> Iterator[list[int | None]]:
    _check(model, prompts, settings)
    device = model.embedding.weight.device
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    padding = torch.tensor([longest - length for length in lengths], device=device)
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    if cache is None:
        cache = _new_cache(model, len(prompts), longest + settings.max_new_tokens, padding)
    tokens = tokens[:, cache.length :]
    uniform = None if settings.greedy else _uniform(len(prompts), settings, device)
    seen = _seen(model, prompts, device) if settings.repetition_penalty != 1.0 else None
    stops, ended = set(settings.stop_tokens), [False] * len(prompts)
    for step in range(settings.max_new_tokens):
        logits = adjusted_logits(model.next_logits(tokens, cache), seen, settings)
        tokens = choose(logits, None if uniform is None else uniform[:, step : step + 1])
        if seen is not None:
            seen.scatter_(1, tokens, True)
        new = tokens[:, 0].tolist()
        yield [None if done else token for token, done in zip(new, ended, strict=True)]
        ended = [done or token in stops for token, done in zip(new, ended, strict=True)]
        if all(ended):
            return


def generate_tokens(
    model: TransformerLM,
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings,
    is_stopping: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """Return the new tokens of every prompt, without the prompt; see :func:`stream_tokens`.

    ``is_stopping`` is asked after each token: the texts then end there.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    for new in stream_tokens(model, prompts, settings):
        if is_stopping():
            break
        for text, token in zip(texts, new, strict=True):
            if token is not None:
                text.append(token)
    return texts


def _uniform(rows: int, settings: SamplingSettings, device: torch.device) -> Tensor:
    """Return the numbers [rows, max_new_tokens] that tokens are drawn with."""
    drawn = [
        torch.rand(settings.max_new_tokens, generator=generator(settings.seed, "generation", row))
        for row in range(rows)
    ]
    return torch.stack(drawn).to(device)


def _seen(model: TransformerLM, prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    seen = torch.zeros(len(prompts), model.config.vocab_size, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        seen[row, torch.tensor(prompt, device=device)] = True
    return seen


def _new_cache(model: TransformerLM, rows: int, columns: int, padding: Tensor) -> KVCache:
    try:
        return model.new_cache(rows, columns, padding)
    except (RuntimeError, MemoryError):  # what torch's allocators raise
        raise UserError(
            f"max_new_tokens: no memory to keep {rows} x {columns} tokens of prompt and answer; lower max_new_tokens"
        ) from None


def _check(model: TransformerLM, prompts: Sequence[Sequence[int]], settings: SamplingSettings) -> None:
    config = model.config
    if not prompts or any(not prompt for prompt in prompts):
        raise UserError("a prompt has no tokens; give some text, or begin with the tokenizer's first token")
    largest = max(token for prompt in prompts for token in prompt)
    if largest >= config.vocab_size:
        raise UserError(f"token {largest} is beyond the model's {config.vocab_size}; use the model's own tokenizer")
    needed = max(len(prompt) for prompt in prompts) + settings.max_new_tokens
    if not config.has_rope and needed - 1 > config.context:
        raise UserError(
            f"prompt and max_new_tokens make {needed}, the model has {config.context} positions; lower max_new_tokens"
        )
