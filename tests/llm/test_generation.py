"""Generation: probabilities against transformers' processors, tokens against its generate and against no cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from library.errors import NotFiniteError, UserError
from library.llm.generation import SamplingSettings, adjusted_logits, choose, generate_tokens, stream_tokens
from library.models.llm.files import load_lm
from library.models.llm.model import TransformerLM
from tests.models.llm.lms import NAMES, VOCABULARY, write_reference

PROMPTS = [[5, 17, 3], [8], [99, 4, 31, 7, 66, 2, 2, 40], [1, 2]]
GREEDY = SamplingSettings(max_new_tokens=24, temperature=0)


@pytest.fixture(scope="module", params=NAMES)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TransformerLM, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    theirs = write_reference(folder, request.param)
    return load_lm(folder, torch.float32), theirs


def without_cache(model: TransformerLM, prompt: list[int], count: int) -> list[int]:
    """Return greedy tokens, the whole text going through the model for each."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            text.append(int(model(torch.tensor([text]))[0, -1, :VOCABULARY].argmax()))
    return text[len(prompt) :]


def test_a_batch_of_any_lengths_gives_what_each_prompt_gives_alone_without_cache(
    both: tuple[TransformerLM, PreTrainedModel],
) -> None:
    ours, _ = both
    assert generate_tokens(ours, PROMPTS, GREEDY) == [without_cache(ours, prompt, 24) for prompt in PROMPTS]


def test_greedy_tokens_equal_those_of_transformers(both: tuple[TransformerLM, PreTrainedModel]) -> None:
    ours, theirs = both
    given = torch.tensor([PROMPTS[2]])
    expected = theirs.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert generate_tokens(ours, [PROMPTS[2]], GREEDY)[0] == expected[0, given.shape[1] :].tolist()


@torch.no_grad()
def test_cached_logits_equal_uncached_ones_token_by_token(both: tuple[TransformerLM, PreTrainedModel]) -> None:
    ours, _ = both
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
    cache = ours.new_cache(1, 12)
    steps = [ours(tokens[:, :1], cache=cache)]  # a prompt of one token
    steps += [ours(tokens[:, i : i + 1], cache=cache) for i in range(1, 9)]
    steps += [ours(tokens[:, 9:], cache=cache)]  # and several at once behind what is cached
    torch.testing.assert_close(torch.cat(steps, dim=1), ours(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "chosen",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_k": 500},
        {"top_p": 0.8},
        {"top_p": 0.01},
        {"min_p": 0.2},
        {"repetition_penalty": 1.3},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1},
    ],
    ids=str,
)
def test_probabilities_equal_those_of_transformers_processors(chosen: dict) -> None:
    logits = 3 * torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(2))
    history = torch.randint(0, VOCABULARY, (4, 20), generator=torch.Generator().manual_seed(3))
    classes = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    theirs = LogitsProcessorList(cls(chosen[name]) for name, cls in classes.items() if name in chosen)
    seen = torch.zeros(4, VOCABULARY, dtype=torch.bool).scatter_(1, history, True)
    ours = adjusted_logits(logits, seen, SamplingSettings(**chosen))
    assert torch.equal(ours.softmax(-1), theirs(history, logits.clone()).softmax(-1))


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logits = torch.tensor([[0.0, 1.0, float("-inf"), 2.0, float("-inf")]]).expand(20000, -1)
    uniform = torch.rand(20000, 1, generator=torch.Generator().manual_seed(0))
    uniform[0], uniform[1] = 0.0, 1 - 2**-24  # the ends of what rand can give
    drawn = choose(logits, uniform)[:, 0]
    assert drawn[:2].tolist() == [0, 3]
    share = torch.bincount(drawn, minlength=5) / 20000
    # four standard deviations of a share of 20000 draws are below 0.0142
    assert (share - logits[0].softmax(-1)).abs().max() < 0.0142
    assert share[2] == share[4] == 0


def test_a_seed_gives_the_same_text_alone_and_in_a_batch(both: tuple[TransformerLM, PreTrainedModel]) -> None:
    ours, _ = both
    settings = SamplingSettings(max_new_tokens=12, temperature=1.3, top_p=0.95, seed=4)
    alone = generate_tokens(ours, [PROMPTS[0]], settings)
    assert generate_tokens(ours, [PROMPTS[0], PROMPTS[2]], settings)[0] == alone[0]
    assert generate_tokens(ours, [PROMPTS[0]], SamplingSettings(max_new_tokens=12, temperature=1.3, seed=5)) != alone


def test_a_row_ends_with_its_stop_token_and_others_go_on(both: tuple[TransformerLM, PreTrainedModel]) -> None:
    ours, _ = both
    free = generate_tokens(ours, PROMPTS[:2], GREEDY)
    stop = next(token for token in free[0] if token not in free[1]) if set(free[0]) - set(free[1]) else free[0][0]
    ended = generate_tokens(ours, PROMPTS[:2], SamplingSettings(24, temperature=0, stop_tokens=(stop,)))
    for text, whole in zip(ended, free, strict=True):
        assert text == (whole[: whole.index(stop) + 1] if stop in whole else whole)
    assert len(list(stream_tokens(ours, PROMPTS[:1], SamplingSettings(24, temperature=0, stop_tokens=(stop,))))) == len(
        ended[0]
    )


def test_padding_rows_are_never_generated(tmp_path: Path) -> None:
    write_reference(tmp_path, "llama3")
    padded = load_lm(tmp_path, torch.float32, pad_vocabulary_to=64)
    with torch.no_grad():
        padded.lm_head.weight[VOCABULARY:] = 0
        padded.lm_head.weight[VOCABULARY:, 0] = 1e6  # would win wherever the stream's first number is positive
    texts = generate_tokens(padded, PROMPTS, SamplingSettings(max_new_tokens=12, seed=1))
    assert max(token for text in texts for token in text) < VOCABULARY


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 0.0}, "top_p: 0.0 does not fit; it must be above 0 and at most 1"),
        ({"temperature": -1.0}, "temperature: -1.0 does not fit"),
        ({"temperature": 1e-45}, r"1e-45 does not fit; it must be 0 \(greedy\), or from 0.0001 to 1000000"),
        ({"temperature": 10**400}, "temperature: 1000"),
        ({"temperature": float("inf")}, "temperature: inf does not fit"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty: 1e-40 does not fit; it must be from 0.01 to 100"),
        ({"temperature": 0.0, "top_k": 3}, "top_k: has no effect at temperature 0"),
    ],
)
def test_settings_without_meaning_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SamplingSettings(**settings)


@pytest.mark.parametrize(
    "row", [[1.0, float("nan"), 2.0], [1.0, float("inf"), 2.0], [float("-inf")] * 3], ids=["NaN", "inf", "-inf"]
)
@pytest.mark.parametrize(
    "chosen", [{"temperature": 0.0}, {}, {"top_k": 1}, {"top_p": 0.5}, {"repetition_penalty": 2.0}]
)
def test_no_token_is_drawn_from_logits_that_are_no_numbers(row: list[float], chosen: dict[str, float]) -> None:
    seen = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(
        NotFiniteError, match=r"^the model computes NaN or infinity; lower the LoRA's strength, or give"
    ):
        adjusted_logits(torch.tensor([[0.0, 1.0, 2.0], row]), seen, SamplingSettings(**chosen))
    excluded = torch.tensor([[0.0, float("-inf"), 2.0]])  # a token that a model rules out is no fault
    assert choose(adjusted_logits(excluded, seen[:1], SamplingSettings(**chosen)), torch.tensor([[0.999]])).item() == 2


def test_the_coldest_temperature_and_the_hardest_penalty_still_draw_the_most_likely_token() -> None:
    logits = torch.tensor([[-3e4, 2e4, 3e4, float("-inf")]])
    cold = adjusted_logits(logits, None, SamplingSettings(temperature=1e-4))
    hard = adjusted_logits(logits, torch.ones(1, 4, dtype=torch.bool), SamplingSettings(repetition_penalty=0.01))
    assert choose(cold, torch.tensor([[0.999]])).item() == choose(hard, torch.tensor([[0.0]])).item() == 2


def test_prompts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_reference(tmp_path, "gpt2")
    model = load_lm(tmp_path, torch.float32)
    for prompts, count, message in (
        ([[]], 3, "has no tokens"),
        ([[VOCABULARY]], 3, "beyond the model's 131"),
        ([[1] * 60], 6, "make 66, the model has 64 positions"),
    ):
        with pytest.raises(UserError, match=message):
            generate_tokens(model, prompts, SamplingSettings(count))
    assert len(generate_tokens(model, [[1] * 60], SamplingSettings(5))[0]) == 5  # the last needs no place


def test_an_answer_longer_than_memory_is_refused(tmp_path: Path) -> None:
    write_reference(tmp_path, "llama3")
    model = load_lm(tmp_path, torch.float32)
    with pytest.raises(UserError, match=r"max_new_tokens: no memory to keep 1 x \d+ tokens .*; lower max_new_tokens"):
        next(stream_tokens(model, [[1, 2]], SamplingSettings(max_new_tokens=10**15)))
