"""GGUF files that are written: what the ``gguf`` package reads of them, and what is read of them here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
from gguf import GGMLQuantizationType
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from library.errors import UserError
from library.gguf_header import read_gguf_metadata
from library.llm.gguf_writing import write_gguf
from library.llm.tokenizer_files import load_tokenizer
from library.llm.tokenizers import train_bpe
from library.models.llm.files import TransformersFiles, load_lm, open_lm
from tests.llm.test_tokenizers import GGUF_TEXT, MARKS, TEXT, gpt2_bpe, llama3_file, published, sentencepiece_model
from tests.models.llm.lms import ARCHITECTURES, SIZES, VOCABULARY, neighbours, reference, relative, tokens
from tests.runs import printed
from tools import convert_llm, evaluate_llm

TEXTS = (GGUF_TEXT, GGUF_TEXT[::-1], *TEXT, "", "  ", "<|im_start|>x <|endoftext|>")
_LLAMA31 = SIZES["llama3.1"]["rope_parameters"]
# llama.cpp has SmolLM 3's interval in its code
CHANGES = {"smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 5}}
NAMES = ["llama2", "llama3.1", "llama3.2", "linear", "yarn", "biases", "mistral", "mistral without a window"]
NAMES += ["qwen2", "qwen3", "qwen3 with biases", "smollm3"]
KINDS = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}


def write_tokenizer(folder: Path, size: int = VOCABULARY) -> None:
    """Write a tokenizer of less than ``size`` tokens, the letters of ASCII."""
    letters = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ"]
    vocabulary = {token: i for i, token in enumerate([*letters, "in", "Ġt", "the"])}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, [("i", "n"), ("Ġ", "t")], ignore_merges=True))
    inner.pre_tokenizer, inner.decoder = published("llama-bpe").pre_tokenizer, decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>", "<|begin|>"])
    inner.save(str(folder / "tokenizer.json"))
    said = {"eos_token": "<|end|>", "pad_token": "<|end|>", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said), encoding="utf-8")


def as_stored(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Return what llama.cpp's converter stores of a tensor that transformers calls ``name``."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None or config.model_type not in ("llama", "mistral", "smollm3"):
        return tensor
    return neighbours(tensor, heads)


@torch.no_grad()
@pytest.mark.parametrize("precision", ["fp32", "q8_0"])
@pytest.mark.parametrize("name", NAMES)
def test_the_package_reads_what_its_own_quantisation_makes_of_a_folder(
    name: str, precision: str, tmp_path: Path
) -> None:
    theirs = reference(name, **{"hidden_size": 64, "intermediate_size": 96} | CHANGES.get(name, {}))
    theirs.config.eos_token_id, theirs.config.pad_token_id = [99, 100], 99
    theirs.save_pretrained(tmp_path / "folder")
    write_tokenizer(tmp_path / "folder")
    out = tmp_path / "m.gguf"
    printed(convert_llm, "--model", tmp_path / "folder", "--save_to", out, "--save_precision", precision)
    reader = gguf.GGUFReader(out)
    config = theirs.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    found = {tensor.name: tensor for tensor in reader.tensors}
    expected = dict(theirs.state_dict())
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    for key, tensor in expected.items():
        read = found.pop(names.get_name(key, try_suffixes=(".weight", ".bias")))
        kind = GGMLQuantizationType.F32 if tensor.ndim == 1 else GGMLQuantizationType[KINDS[precision]]
        kind = GGMLQuantizationType.F16 if kind.name == "Q8_0" and tensor.shape[-1] % 32 else kind
        assert read.tensor_type is kind, key
        assert np.array_equal(read.data, gguf.quants.quantize(as_stored(key, tensor, config).numpy(), kind)), key
    assert set(found) == ({"rope_freqs.weight"} if "3." in name else set())
    if precision == "fp32":
        assert relative(load_lm(out, torch.float32)(tokens()), theirs(tokens()).logits) < 1e-5
        ours, before = open_lm(out)[0], open_lm(tmp_path / "folder")[0]
        same = ("layers", "context", "norm_eps", "rope_theta", "eos", "pad", "no_rope", "window", "head_dim", "tied")
        assert [getattr(ours, key) for key in same] == [getattr(before, key) for key in same]
        assert read_gguf_metadata(out)["tokenizer.chat_template"] == "{{ messages[0].content }}"


def written(tokenizer: Path, folder: Path) -> Path:
    """Write a model of one layer with the tokenizer in ``tokenizer`` as GGUF."""
    size = load_tokenizer(tokenizer).vocab_size + 5
    # the vocabulary is the shared part of such a model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    write_gguf(TransformersFiles(folder / "model"), folder / "m.gguf", "F16", tokenizer)
    return folder / "m.gguf"


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "stablelm2"])
def test_a_split_is_known_by_what_it_does(pre: str, tmp_path: Path) -> None:
    inner = published("qwen2" if pre == "stablelm2" else pre)
    if pre == "stablelm2":  # the same split; characters stay as they are
        inner.normalizer = normalizers.Sequence([])
    inner.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    number = inner.token_to_id
    inner.save(str(tmp_path / "tokenizer.json"))
    said = {"bos_token": MARKS[1], "eos_token": MARKS[2], "pad_token": MARKS[0], "unk_token": MARKS[0]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said), encoding="utf-8")
    file = written(tmp_path, tmp_path)
    metadata = read_gguf_metadata(file)
    assert metadata["tokenizer.ggml.pre"] == pre
    for key, mark in (("bos", MARKS[1]), ("eos", MARKS[2]), ("padding", MARKS[0]), ("unknown", MARKS[0])):
        assert metadata[f"tokenizer.ggml.{key}_token_id"] == number(mark)
    types = metadata["tokenizer.ggml.token_type"]
    assert [types[number(mark)] for mark in MARKS] == [3, 3, 3]  # control
    assert types[number("<think>")] == 4  # user-defined
    assert types[-5:] == [5] * 5  # unused
    before, ours = load_tokenizer(tmp_path), load_tokenizer(file)
    for text in (*TEXTS, "a <think> b"):
        for special in (False, True):
            assert ours.encode(text, special) == before.encode(text, special)
        assert ours.decode(ours.encode(text)) == before.decode(before.encode(text))
    assert (ours.begins, ours.eos) == (before.begins, before.eos)


@pytest.mark.parametrize("kind", ["trained here", "llama3", "gpt2"])
def test_a_tokenizer_that_is_no_published_json_is_written(kind: str, tmp_path: Path) -> None:
    if kind == "trained here":
        train_bpe([text for text in TEXT for _ in range(3)], 330).save(tmp_path)
    else:
        {"llama3": llama3_file, "gpt2": gpt2_bpe}[kind](tmp_path)
    ours = load_tokenizer(tmp_path)
    again = load_tokenizer(written(tmp_path, tmp_path))
    assert all(again.encode(text, special) == ours.encode(text, special) for text in TEXTS for special in (False, True))


def sentencepiece_bpe(folder: Path, user_defined: list[str]) -> None:
    """Train a SentencePiece model of Llama 2's kind."""
    (folder / "corpus.txt").write_text("\n".join([GGUF_TEXT] * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "tokenizer"), vocab_size=400, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        user_defined_symbols=user_defined, minloglevel=2,
    )  # fmt: skip


@pytest.mark.parametrize("as_json", [False, True])
def test_a_sentencepiece_model_is_written_with_its_scores(as_json: bool, tmp_path: Path) -> None:
    # transformers puts a blank behind a plain added token, SentencePiece does not
    sentencepiece_bpe(tmp_path, [] if as_json else ["[INST]"])
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    if as_json:  # as transformers converts it: pairs instead of scores, blanks put in by the normaliser
        pieces = {theirs.id_to_piece(i): i for i in range(theirs.vocab_size())}
        pairs = [
            (pieces[whole], whole[:i], whole[i:])
            for whole in pieces
            for i in range(1, len(whole))
            if whole[:i] in pieces and whole[i:] in pieces and theirs.get_score(pieces[whole]) <= 0
        ]
        merges = [pair for _, *pair in sorted(pairs, key=lambda pair: (pair[0], pieces[pair[1]], pieces[pair[2]]))]
        bpe = models.BPE(pieces, [tuple(pair) for pair in merges], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
        inner = tokenizers.Tokenizer(bpe)
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        inner.decoder = decoders.Sequence(steps)
        inner.add_special_tokens(["<unk>", "<s>", "</s>"])
        inner.save(str(tmp_path / "tokenizer.json"))
    file = written(tmp_path, tmp_path)
    metadata, ours = read_gguf_metadata(file), load_tokenizer(file)
    assert metadata["tokenizer.ggml.model"] == "llama"
    types = metadata["tokenizer.ggml.token_type"]
    assert (types[0], types[1], types[theirs.piece_to_id("<0x0A>")]) == (2, 3, 6)
    if not as_json:
        assert types[theirs.piece_to_id("[INST]")] == 4
        scores = [theirs.get_score(i) for i in range(theirs.vocab_size())]
        assert metadata["tokenizer.ggml.scores"][: len(scores)] == scores
    for text in (GGUF_TEXT, GGUF_TEXT[::-1], "  two  ", "中文"):
        assert ours.encode(text) == theirs.encode(text)


def test_what_gguf_has_no_word_for_is_refused_in_a_line(tmp_path: Path) -> None:
    inner = published("gpt-2")
    for i, changed in enumerate(
        (
            {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
            {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), published("gpt-2").pre_tokenizer])},
            {"normalizer": normalizers.Lowercase()},
        )
    ):
        (tmp_path / str(i)).mkdir()
        other = tokenizers.Tokenizer.from_str(inner.to_str())
        for key, value in changed.items():
            setattr(other, key, value)
        other.save(str(tmp_path / str(i) / "tokenizer.json"))
        with pytest.raises(UserError, match="GGUF has no word for how this tokenizer changes or splits text"):
            written(tmp_path / str(i), tmp_path / str(i))
    (tmp_path / "nfkc").mkdir()
    sentencepiece_model(tmp_path / "nfkc")  # SentencePiece's default normalises
    with pytest.raises(UserError, match="GGUF has no word for"):
        written(tmp_path / "nfkc", tmp_path / "nfkc")
    assert not list(tmp_path.rglob("*.gguf*"))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {}, "a gpt2 is not written as GGUF, llama, qwen2, qwen3, smollm3 are; write a folder"),
        ("smollm3 by list", {}, "no_rope_layers: GGUF has no key for them, every fourth is left out there"),
        ("yarn in detail", {}, "rope_scaling: GGUF has no key for truncate = false"),
        (
            "qwen3",
            {"sizes": {"rope_parameters": _LLAMA31}},
            "rope_scaling: llama.cpp does not read llama3 in kind qwen3",
        ),
        ("llama3", {"vocab": 50}, r"3\d\d tokens, the model has 131; take its own --tokenizer"),
        ("llama3", {"large": True}, "model.embed_tokens.weight exceeds fp16's 65504; choose another --save_precision"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_and_nothing_is_left(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = reference(name, **changes.get("sizes", {}))
    if "large" in changes:
        model.get_input_embeddings().weight.data[3, 2] = 1e5
    model.save_pretrained(tmp_path / "folder")
    write_tokenizer(tmp_path / "folder")
    if "vocab" in changes:
        published("gpt-2").save(str(tmp_path / "folder/tokenizer.json"))
    before = set(tmp_path.iterdir())
    with pytest.raises(UserError, match=message):
        write_gguf(TransformersFiles(tmp_path / "folder"), tmp_path / "m.gguf", "F16")
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_folder_and_file_have_one_perplexity(precision: str, tmp_path: Path) -> None:
    model = reference("llama3.2").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "folder")
    write_tokenizer(tmp_path / "folder")
    (tmp_path / "text.txt").write_text("the rain in spain\nstays mainly in the plain", encoding="utf-8")
    printed(
        convert_llm, "--model", tmp_path / "folder", "--save_to", tmp_path / "m.gguf", "--save_precision", precision
    )
    found = []
    for path in (tmp_path / "folder", tmp_path / "m.gguf"):
        scores = tmp_path / f"{path.stem}.json"
        printed(evaluate_llm, "--model", path, "--perplexity", tmp_path / "text.txt", "--save_to", scores)
        found.append(next(iter(json.loads(scores.read_text())["perplexity"].values())))
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-4)
    with pytest.raises(SystemExit):
        printed(convert_llm, "--model", tmp_path / "folder", "--save_to", tmp_path / "m.gguf")
