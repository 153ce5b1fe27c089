"""``evaluate_llm.py`` end to end, on a model of which every figure is known beforehand.

Its head is zero, so that all 257 tokens (256 bytes and one that ends texts) are always equally likely.
"""

from __future__ import annotations

import json
from math import log2
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from library.errors import UserError
from library.llm.tokenizer_files import load_tokenizer
from library.llm.tokenizers import train_bpe
from library.models.llm.files import export_hf
from library.models.llm.model import TransformerLM
from library.models.llm.spec import llama
from tests.forked import run_script
from tools.evaluate_llm import evaluate, parser

ROOT = Path(__file__).resolve().parents[2]
TEXT = "Eine größere Katze saß da."  # 26 characters, 29 bytes, 5 words
LINES = [
    {"ctx": "The cat", "endings": ["sat.", "slept for long."], "label": 0},  # bytes alone decide: the shortest wins
    {"ctx": "The dog", "endings": ["ran.", "barked at her."], "label": 1},
    {"ctx": "A bird", "endings": ["sang and sang.", "flew."], "label": 1},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    tokenizer = train_bpe(["x"], 257)
    tokenizer.save(folder / "model")
    model = TransformerLM(llama(32, 2, 4, 2, 64, tokenizer.vocab_size, 64))
    model.initialise(torch.Generator().manual_seed(0))
    torch.nn.init.zeros_(model.lm_head.weight)
    export_hf(model, folder / "model")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "long.jsonl").write_text("".join(json.dumps({"text": TEXT * 9}) + "\n" for _ in range(3)))
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return folder


def run(folder: Path, *words: str) -> dict:
    paths = [str(folder / word) if (folder / word).exists() else word for word in words]
    return evaluate(parser().parse_args(["--model", str(folder / "model"), *paths]))


def test_everything_is_measured_shown_and_saved(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    what = ["--perplexity", "text.txt", "long.jsonl", "--choices", "questions.jsonl"]
    found = run(folder, *what, "--save_to", str(tmp_path / "a" / "scores.json"))
    own = found["perplexity"][str(folder / "text.txt")]
    assert own["perplexity"] == pytest.approx(257, rel=1e-5)
    assert (own["tokens"], own["bytes"], own["words"], own["documents"]) == (28, 29, 5, 1)  # a byte is given
    assert own["bits_per_byte"] == pytest.approx(log2(257) * 28 / 29, rel=1e-6)
    assert own["word_perplexity"] == pytest.approx(257 ** (28 / 5), rel=1e-4)
    assert (own["context"], own["stride"]) == (64, 32)
    assert found["perplexity"][str(folder / "long.jsonl")]["tokens"] == 3 * (9 * 29 - 1)
    # the shortest ending wins (2 of 3 right); per character " " + ending costs (n + 1) / n bytes: the longest wins
    assert found["choices"][str(folder / "questions.jsonl")]["acc"] == pytest.approx(2 / 3)
    assert found["choices"][str(folder / "questions.jsonl")]["acc_norm"] == pytest.approx(1 / 3)
    assert json.loads((tmp_path / "a" / "scores.json").read_text()) == found
    shown = capsys.readouterr().out
    assert "66.67 ± 33.33 %" in shown
    assert "257" in shown
    assert "64, stride 32" in shown


def test_window_and_limit_are_as_asked(folder: Path) -> None:
    found = run(folder, "--perplexity", "long.jsonl", "--context", "16", "--stride", "4", "--limit", "2")
    (own,) = found["perplexity"].values()
    assert (own["documents"], own["context"], own["stride"], own["tokens"]) == (2, 16, 4, 2 * (9 * 29 - 1))
    (own,) = run(folder, "--choices", "questions.jsonl", "--limit", "2")["choices"].values()
    assert own["questions"] == 2
    assert own["acc"] == 0.5


def test_a_lora_of_peft_is_part_of_the_model(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    torch.nn.init.normal_(base.lm_head.weight)  # a head that tells hidden states apart
    base.save_pretrained(tmp_path / "model")
    load_tokenizer(folder / "model").save(tmp_path / "model")
    tuned = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "up_proj"]))
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:  # zero in a fresh adapter
            torch.nn.init.normal_(parameter, std=0.3)
    tuned.save_pretrained(tmp_path / "lora")
    ids = torch.tensor([load_tokenizer(folder / "model").encode(TEXT)])
    with torch.no_grad():
        expected = tuned(ids, labels=ids).loss.item()
        with tuned.disable_adapter():
            plain = tuned(ids, labels=ids).loss.item()
    assert abs(expected - plain) > 1e-2
    lora = str(tmp_path / "lora")
    for flags, loss in (["--lora", lora], expected), (["--lora", f"{lora}:0"], plain), ([], plain):
        (own,) = run(tmp_path, "--perplexity", str(folder / "text.txt"), *flags)["perplexity"].values()
        assert own["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to evaluate"),
        (["--choices", "questions.jsonl", "--stride", "3"], "--stride: has no effect without --perplexity"),
        (["--perplexity", "text.txt", "--save_to", "model"], "model is a folder"),
        (
            ["--perplexity", "text.txt", "--model", "nowhere"],
            "--model 'nowhere' does not exist; give a local file or folder, or a name on",
        ),
        (["--perplexity", "text.txt", "--batch_size", "0"], "--batch_size: '0' is no whole number from 1"),
        (["--perplexity", "text.txt", "--context", "8", "--stride", "9"], "--stride: 9 does not fit"),
        (["--perplexity", "nowhere.txt"], "no such file or folder"),
        (["--perplexity", "questions.jsonl"], r"questions\.jsonl:1: no key 'text'"),
        (["--perplexity", "text.txt", "--lora", "nowhere"], "nowhere"),
        (["--choices", "long.jsonl"], r"long\.jsonl:1: no key 'ctx'"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str, folder: Path) -> None:
    with pytest.raises(UserError, match=message):
        run(folder, *words)


def test_a_bad_file_ends_the_script_with_one_line(folder: Path) -> None:
    (folder / "bad.jsonl").write_text("{\n")
    words = ["--model", str(folder / "model"), "--choices", str(folder / "bad.jsonl")]
    done = run_script(ROOT / "tools/evaluate_llm.py", words, folder)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"error: {folder / 'bad.jsonl'}:1: not valid JSON")
