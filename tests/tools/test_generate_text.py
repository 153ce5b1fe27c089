"""``generate.py text`` end to end: what it prints and saves is what the library generates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from library.errors import UserError
from library.llm.generation import SamplingSettings, generate_tokens
from library.llm.tokenizer_files import load_tokenizer
from library.llm.tokenizers import Tokenizer, train_bpe
from library.models.llm.files import export_hf, load_lm
from library.models.llm.model import TransformerLM
from library.models.llm.spec import llama
from tests.forked import ROOT, run_script
from tools.generate import generate, parser

MARKS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with Llama 3's marks in its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer: Tokenizer = train_bpe(["the cat sat on the mat"] * 9, 290, MARKS)
    tokenizer.save(folder)
    model = TransformerLM(llama(32, 2, 4, 2, 64, tokenizer.vocab_size, 64))
    export_hf(model.initialise(torch.Generator().manual_seed(0)), folder)
    return folder


def run(folder: Path, *words: str) -> list[str]:
    options = parser().parse_args(["text", "--model", str(folder), "--max_new_tokens", "12", *words])
    return generate(options)


def expected(folder: Path, tokens: list[int], **settings: object) -> str:
    tokenizer = load_tokenizer(folder)
    chosen = SamplingSettings(12, stop_tokens=tokenizer.stop_tokens, **settings)
    (made,) = generate_tokens(load_lm(folder, torch.float32), [tokens], chosen)
    return tokenizer.decode(made, skip_special=True)


def test_one_prompt_is_streamed_as_it_is_generated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (made,) = run(folder, "--prompt", "the cat", "--seed", "3", "--top_k", "50")
    tokens = [0, *load_tokenizer(folder).encode("the cat")]
    assert made == expected(folder, tokens, seed=3, top_k=50)
    assert capsys.readouterr().out == f"the cat{made}\n"


def test_several_prompts_are_a_batch_and_are_saved(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("the cat sat\n\nthe\n")
    file = [
        "--from_file",
        str(tmp_path / "prompts.txt"),
        "--temperature",
        "0",
        "--save_to",
        str(tmp_path / "out.jsonl"),
    ]
    texts = run(folder, *file)
    tokenizer = load_tokenizer(folder)
    assert texts == [expected(folder, [0, *tokenizer.encode(p)], temperature=0) for p in ("the cat sat", "the")]
    saved = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert saved == [{"prompt": "the cat sat", "text": texts[0]}, {"prompt": "the", "text": texts[1]}]


def test_a_chat_prompt_goes_through_the_template(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    (made,) = run(folder, "--prompt", "the mat", "--chat", "--system", "sat", "--temperature", "0")
    template = (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nsat<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nthe mat<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert made == expected(folder, tokenizer.encode(template, special=True), temperature=0)


def test_an_fp8_base_writes_too(folder: Path) -> None:
    assert len(run(folder, "--prompt", "the", "--fp8_scaled", "--dtype", "bf16")) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either --prompt"),
        (["--prompt", "x", "--system", "y"], "--system: has no effect without --chat"),
        (["--prompt", "x", "--temperature", "0", "--top_p", "0.5"], "top_p: has no effect at temperature 0"),
        (["--from_file", "nowhere"], "nowhere: no such file; check the path"),
        (["--from_file", "latin.txt"], r"not UTF-8 \(byte 3\); save it as UTF-8"),
        (["--prompt", "x", "--tokenizer", "nowhere"], "nowhere: no such file"),
        (
            ["--prompt", "x", "--model", "nowhere"],
            "--model 'nowhere' does not exist; give a local file or folder, or a name on",
        ),
    ],
)
def test_mistakes_are_named(
    words: list[str], message: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(UserError, match=message):
        run(folder, *words)


def test_a_model_that_computes_nan_writes_nothing(folder: Path, tmp_path: Path) -> None:
    broken, out = tmp_path / "broken", tmp_path / "out.jsonl"
    shutil.copytree(folder, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"].fill_(
        torch.finfo(weights["model.norm.weight"].dtype).max
    )  # finite; its products are not
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    done = run_script(
        ROOT / "tools/generate.py",
        ["text", "--model", str(broken), "--prompt", "the", "a", "--save_to", str(out)],
        tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: the model computes NaN or infinity; ")
    assert "Traceback" not in done.stderr
    assert not out.exists()
