"""A caption's tokens are trained on or said to be cut: of every family, any caption and any limit."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from library.config.schema import ModelConfig
from library.models.family_by_name import model_family
from tests.models.test_caption_lengths import MODELS as OF_ANY_LENGTH
from tests.tiny import tiny_flux_pipeline
from tests.tiny_flux2 import tiny_dev_pipeline, tiny_flux2_pipeline

WRITERS: dict[str, Callable[..., Path]] = {name: write for name, (write, _) in OF_ANY_LENGTH.items()} | {
    "flux": tiny_flux_pipeline,
    "flux_kontext": partial(tiny_flux_pipeline, model_type="flux_kontext"),
    "flux2_klein": tiny_flux2_pipeline,
    "flux2_dev": tiny_dev_pipeline,
}
WHOLE = {"qwen_image_edit", "qwen_image_edit_plus", "qwen_image_21", "qwen_image_21_edit"}  # in the pipelines too


@pytest.fixture(scope="module", params=WRITERS)
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(WRITERS[request.param](tmp_path_factory.mktemp(request.param) / "pipeline"))
    settings = {"zero_cond_t": True} if request.param == "qwen_image_edit_plus" else {}
    config = ModelConfig(model_type=request.param, pretrained_model_name_or_path=folder, **settings)
    found = model_family(config).load_text_encoder(torch.float32)
    assert (found.most_tokens is None) == (request.param in WHOLE)
    return found


def limited(encoder: Any, room: int) -> Any:
    """Let an encoder read ``room`` of a caption's tokens."""
    if hasattr(encoder, "_tokenizers"):
        encoder.release()  # the tokenizers too
        encoder.most_tokens = room + 1  # the end's too
        encoder._tokenizers["text_encoder_2"] = (encoder._tokenizers["text_encoder_2"][0], room + 1)
        return encoder._tokenizers["text_encoder_2"][0]
    before = len(encoder.tokenizer(encoder.prompt_of("\0").partition("\0")[0]).input_ids)
    encoder.most_tokens = room + before - encoder.dropped + encoder.reserved
    return encoder.tokenizer


def embeds(encoder: Any, caption: str) -> torch.Tensor:
    return encoder.encode([caption])[0]["prompt_embeds"]


def test_what_is_read_and_what_is_cut_are_all_of_a_caption(encoder: Any) -> None:
    """Every tokenizer takes a digit for a token, so that the embeddings themselves tell how many are read."""
    if encoder.most_tokens is None:
        assert [count.cut for count in encoder.count(["", "9" * 5000])] == [0, 0]
        assert encoder.too_long(["9" * 5000]) == {}
        return
    rng = random.Random(1)
    for is_cut in (False, True) * 3:
        room = rng.randint(3, 60)
        tokenizer = limited(encoder, room)
        digits = "".join(rng.choices("123456789", k=rng.randint(room + 1, 90) if is_cut else rng.randint(2, room)))
        (count,) = encoder.count([digits])
        total = len(tokenizer(digits, add_special_tokens=False).input_ids)  # T5 puts a blank before them
        assert sum(count) == total
        assert (count.kept, count.cut > 0) == (min(total, room), total > room)
        read, whole = count.kept - (total - len(digits)), embeds(encoder, digits)
        assert not torch.equal(whole, embeds(encoder, f"{digits[: read - 1]}0{digits[read:]}"))
        if count.cut:
            assert torch.equal(whole, embeds(encoder, digits[:read] + "0" * (len(digits) - read)))


def test_any_text_is_counted_to_its_end(encoder: Any) -> None:
    if encoder.most_tokens is None:
        return
    rng, tokenizer = random.Random(2), limited(encoder, 25)
    letters = "abc ,.{}\nÉ\u0301\u00e9\u4e2d\u0e01\u3300\ufdfa\U0001f600"
    texts = ["".join(rng.choices(letters, k=rng.randint(0, 70))).strip() for _ in range(200)]
    totals = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    counts = encoder.count(texts)
    assert [sum(count) for count in counts] == totals
    for _ in range(20):
        limited(encoder, room := rng.randint(260, 400))  # templates of single bytes take 240 tokens
        lengths = [room - 1, room, room + 1, 3 * room]
        long = ["x1" * (length // 2) + "y" * (length % 2) for length in lengths]
        assert (
            encoder.too_long(long).keys() == {text for text, one in zip(long, encoder.count(long)) if one.cut} != set()
        )
