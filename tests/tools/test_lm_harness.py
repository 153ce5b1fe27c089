"""Our side of lm-evaluation-harness against its own for transformers' models, on the same random weights.

Skipped where the harness is not installed (``requirements/eval.txt``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from library.errors import UserError
from library.llm.tokenizers import load_tokenizer, train_bpe
from library.models.llm.files import load_lm

TEXT = "The cat sat on the mat, and a dog ran around it; nobody knew why. "
CONTEXT = 32


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Ours and the harness's own."""
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    from library.llm.lm_harness import HarnessModel

    folder = tmp_path_factory.mktemp("harness")
    tokenizer = train_bpe([TEXT], 290)
    tokenizer.save(folder)
    torch.manual_seed(0)
    sizes = {"n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=tokenizer.vocab_size, bos_token_id=0, eos_token_id=0, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    silent = lambda what, total: lambda n: None  # noqa: E731 - progress nobody looks at
    ours = HarnessModel(load_lm(folder, torch.float32), load_tokenizer(folder), CONTEXT, 3, silent)
    return ours, HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)


def requests(kind: str, arguments: list[tuple]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, own, i) for i, own in enumerate(arguments)]


def test_likelihoods_are_the_harness_own(sides: tuple[Any, Any]) -> None:
    ours, theirs = sides
    pairs = [("The cat", " sat"), ("The cat ", "sat"), ("", "The dog"), (TEXT * 3, " nobody knew"), ("a\n", "why. The")]
    asked = requests("loglikelihood", pairs)
    for own, other in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert own[0] == pytest.approx(other[0], rel=1e-4)
        assert own[1] == bool(other[1])


def test_rolling_likelihoods_are_the_harness_own(sides: tuple[Any, Any]) -> None:
    ours, theirs = sides
    asked = requests("loglikelihood_rolling", [(TEXT,), (TEXT * 5,), ("Why.",)])
    assert ours.loglikelihood_rolling(asked) == pytest.approx(theirs.loglikelihood_rolling(asked), rel=1e-4)


def test_written_texts_are_the_harness_own(sides: tuple[Any, Any]) -> None:
    ours, theirs = sides
    free = {"until": ["\u0001"], "max_gen_toks": 6, "do_sample": False}
    asked = [("The cat", dict(free)), (TEXT * 3, dict(free)), ("nobody", dict(free))]
    texts = theirs.generate_until(requests("generate_until", asked))
    assert ours.generate_until(requests("generate_until", asked)) == texts
    stop = texts[0][2:4]  # ends in the middle of what is written without it
    asked = [("The cat", free | {"until": [stop]}), ("nobody", dict(free))]
    stopped = ours.generate_until(requests("generate_until", asked))
    assert stopped == [texts[0].split(stop)[0], texts[2]]
    assert stopped == theirs.generate_until(requests("generate_until", asked))


def test_settings_that_are_not_known_are_refused(sides: tuple[Any, Any]) -> None:
    ours, _ = sides
    with pytest.raises(UserError, match="generation setting 'num_beams' is not supported"):
        ours.generate_until(requests("generate_until", [("a", {"num_beams": 3})]))
    with pytest.raises(UserError, match="--context: 32 leaves no room for 256"):
        ours.generate_until(requests("generate_until", [("a", {"until": ["x"]})]))


def test_tasks_that_cannot_be_had_are_named(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from library.llm.lm_harness import find_tasks

    with pytest.raises(UserError, match="no task 'hellaswga'; did you mean 'hellaswag'"):
        find_tasks(["hellaswga"], None)
    (tmp_path / "gone.yaml").write_text(
        "task: gone\ndataset_path: json\ndataset_kwargs: {data_files: {validation: /nowhere.jsonl}}\n"
        "validation_split: validation\noutput_type: multiple_choice\ndoc_to_text: a\ndoc_to_target: 0\n"
        "doc_to_choice: [a, b]\nmetric_list: [{metric: acc}]\n"
    )
    with pytest.raises(UserError, match="--tasks: the data of gone cannot be had"):
        find_tasks(["gone"], tmp_path)
