"""From files to batches: what is in the shards, who reads which window, and that a position says it all."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch import Tensor

from library.data.batches import DataParallelRank
from library.errors import UserError
from library.llm.documents import find_files, read_documents
from library.llm.token_batches import TokenBatches, TokenShards, held_out_batches
from library.llm.tokenizer_files import load_tokenizer
from tools.prepare_text import parser, prepare

DOCUMENTS = [f"Document {i}: " + "the cat sat on the mat and 12 dogs ran. " * (i % 7 + 1) for i in range(60)]


def write_corpus(folder: Path) -> list[Path]:
    """Write the documents as text, jsonl and parquet; return the paths in order."""
    import pyarrow
    import pyarrow.parquet

    (folder / "texts").mkdir(parents=True)
    for i, text in enumerate(DOCUMENTS[:20]):
        (folder / "texts" / f"{i:02d}.txt").write_text(text)
    lines = [json.dumps({"body": text, "other": 1}) for text in DOCUMENTS[20:40]]
    (folder / "b.jsonl").write_text("\n".join(lines) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.table({"body": [*DOCUMENTS[40:], None]}), folder / "c.parquet")
    return [folder / "texts", folder / "b.jsonl", folder / "c.parquet"]


def run(folder: Path, *flags: str) -> Path:
    """Prepare the corpus of ``folder``; return where the shards are."""
    paths = [*map(str, write_corpus(folder / "in"))] if not (folder / "in").exists() else [str(folder / "in")]
    defaults = ["--text_key", "body", "--save_to", str(folder / "out"), "--validation_share", "0.2"]
    prepare(parser().parse_args([*paths, "--train_tokenizer", "300", *defaults, *flags]))
    return folder / "out"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("corpus"), "--shard_tokens", "700")


def documents_of(folder: Path, split: str) -> list[str]:
    """Return the texts of a split, divided where its tokens say that one ends."""
    shards, tokenizer = TokenShards(folder, split), load_tokenizer(folder)
    found: list[list[int]] = [[]]
    for token in shards.read(0, shards.tokens).tolist():
        found[-1].append(token)
        if token == tokenizer.eos:
            found.append([])
    assert found.pop() == []
    assert len(found) == shards.documents
    return [tokenizer.decode(tokens[:-1]) for tokens in found]


def test_every_document_is_whole_and_in_one_split(corpus: Path) -> None:
    train, held_out = documents_of(corpus, "train"), documents_of(corpus, "validation")
    assert sorted(train + held_out) == sorted(DOCUMENTS)
    assert train == sorted(train, key=DOCUMENTS.index)  # in order
    assert 3 <= len(held_out) <= 24  # 20 % of 60; four standard deviations are 12.4
    assert len(list(corpus.glob("train_*.bin"))) > 2
    assert max(file.stat().st_size for file in corpus.glob("train_*.bin")) <= 700 * 2


@pytest.mark.parametrize(("world", "size", "accumulation"), [(1, 5, 2), (2, 3, 1), (3, 2, 4)])
def test_an_epoch_is_every_window_once_whatever_the_number_of_processes(
    corpus: Path, world: int, size: int, accumulation: int
) -> None:
    shards = TokenShards(corpus, "train")
    whole = shards.read(0, shards.tokens)

    def windows(batch: Tensor) -> list[tuple[int, ...]]:
        return [tuple(row.tolist()) for row in batch]

    alone = [row for batch in TokenBatches(shards, 16, 1, seed=5) for row in windows(batch)]
    shares = [TokenBatches(shards, 16, size, 5, DataParallelRank(world, rank, accumulation)) for rank in range(world)]
    ranks = [list(zip(share, share.micro_steps(), strict=True)) for share in shares]
    step, weights, seen = [], list[float](), 0
    for together in zip(*ranks, strict=True):  # all compute as many batches
        real = [row for batch, micro in together if micro.weight for row in windows(batch)]
        step += real
        assert {(m.done, m.samples) for _, m in together} == {(len(real), len(real))}
        weights += [micro.weight / len(batch) for batch, micro in together if micro.weight]
        if together[0][1].ends_step:
            assert step == alone[seen : seen + world * size * accumulation]
            # engines divide by processes and accumulation, and a batch's loss is a mean
            assert weights == [pytest.approx(world * accumulation / len(step))] * len(weights)
            step, weights, seen = [], [], seen + len(step)
    assert (step, seen) == ([], len(alone))
    starts = [i for i in range(16) if tuple(whole[i : i + 17]) in set(alone)]
    assert len(starts) == 1  # one offset
    expected = {tuple(whole[i : i + 17].tolist()) for i in range(starts[0], starts[0] + len(alone) * 16, 16)}
    assert set(alone) == expected
    assert alone != sorted(alone, key=lambda row: int(np.argmax(whole == row[0])))


def test_a_batch_is_a_function_of_the_position(corpus: Path) -> None:
    shards = TokenShards(corpus, "train")
    batches = TokenBatches(shards, 16, 4, seed=1)
    first = list(batches)
    batches.set_position(1)
    second = list(batches)
    assert len(torch.cat(first)) == len(torch.cat(second)) == batches.windows
    assert not torch.equal(first[0], second[0])
    resumed = TokenBatches(shards, 16, 8, seed=1)  # another batch size goes on where the first was
    resumed.set_position(0, 7 * 4)
    assert torch.equal(next(iter(resumed)), torch.cat(first[7:9]))
    assert not torch.equal(TokenBatches(shards, 16, 4, seed=2).read(0, range(4)), first[0])


def test_held_out_windows_come_in_order(corpus: Path) -> None:
    shards = TokenShards(corpus, "validation")
    alone = torch.cat(list(held_out_batches(shards, 16, 3, 10**9)))
    assert torch.equal(alone[:, :-1].flatten(), torch.from_numpy(shards.read(0, alone.shape[0] * 16)))
    assert len(torch.cat(list(held_out_batches(shards, 16, 3, 64)))) == 4


def test_a_separator_divides_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo<|endoftext|>three\n<|endoftext|>\n\n<|endoftext|>four")
    texts = list(read_documents(tmp_path / "a.txt", separator="<|endoftext|>"))
    assert texts == ["one\ntwo", "three\n", "four"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{', "a.jsonl:2: not valid JSON"),
        ("a.jsonl", '{"content": "x"}', "a.jsonl:1: no key 'text'; set --text_key"),
        ("a.jsonl", '{"text": 3}', "a.jsonl:1: 'text' holds no text"),
        ("a.parquet", "x", "not a readable parquet file"),
    ],
)
def test_files_that_cannot_be_read_are_named(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        [list(read_documents(file)) for file in find_files([tmp_path / name])]


def test_a_corpus_is_not_replaced_by_mistake_and_damage_is_found(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("|".join(DOCUMENTS))
    folder = run(tmp_path, "--separator", "|")
    with pytest.raises(UserError, match="holds a prepared corpus"):
        run(tmp_path)
    run(tmp_path, "--separator", "|", "--overwrite")
    shard = folder / "train_00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"train_00000\.bin: missing or of another size"):
        TokenShards(folder, "train")


def test_any_changed_byte_of_a_corpus_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("|".join(DOCUMENTS))
    folder, draw = run(tmp_path, "--separator", "|", "--shard_tokens", "1000"), random.Random(0)

    def read_all() -> list[int]:
        tokens: list[int] = []
        for split in ("train", "validation"):
            shards = TokenShards(folder, split)
            tokens += shards.read(0, shards.tokens).tolist()
        return tokens

    read_all()
    assert len(list(folder.glob("train_*.bin"))) > 1
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for place in {0, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(20))}:
            changed = bytearray(whole)
            changed[place] ^= 1 << draw.randrange(8)
            path.write_bytes(changed)
            with pytest.raises(UserError, match=rf"{path.name}: damaged.*; run tools/prepare_text.py again"):
                read_all()
        path.unlink()
        with pytest.raises(UserError, match=rf"{path.name}: .*run tools/prepare_text.py"):
            read_all()
        path.write_bytes(whole)
    read_all()


def test_a_corpus_that_changes_while_it_is_read_ends_in_an_error_and_not_in_other_tokens(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("|".join(DOCUMENTS))
    shards = TokenShards(run(tmp_path, "--separator", "|"), "train")
    shards.read(5, 17)  # its block has been looked at
    path = shards.folder / "train_00000.bin"
    whole = path.read_bytes()
    with open(path, "r+b") as file:
        file.seek(20)
        file.write(bytes([whole[20] ^ 1]))
    with pytest.raises(UserError, match=r"train_00000\.bin: damaged"):
        shards.read(5, 17)
    os.truncate(path, 8)  # a process that has the file mapped would be killed by SIGBUS
    with pytest.raises(UserError, match=r"train_00000\.bin: damaged"):
        shards.read(5, 17)
    path.unlink()
    with pytest.raises(UserError, match=r"train_00000\.bin: cannot be read"):
        shards.read(5, 17)


def test_a_folder_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no .txt, .md, .jsonl, .parquet file in it; name"):
        find_files([tmp_path])


def test_texts_with_too_few_words_for_the_vocabulary_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 9)
    flags = ["--train_tokenizer", "5000", "--save_to", str(tmp_path / "out")]
    prepare(parser().parse_args([str(tmp_path / "a.txt"), *flags, "--validation_share", "0"]))
    tokens = load_tokenizer(tmp_path / "out").vocab_size
    text = " ".join(capsys.readouterr().out.split())
    assert tokens < 400
    assert f"the texts give {tokens} tokens, not 5000" in text


def texts(path: Path) -> list[str]:
    return [text for file in find_files([path]) for text in read_documents(file)]


def test_a_snapshot_of_the_hub_is_the_one_that_main_names(tmp_path: Path) -> None:
    hub = tmp_path / "datasets--owner--name"
    (hub / "blobs").mkdir(parents=True)
    for revision in ("aaa", "bbb"):
        data = hub / "snapshots" / revision / "data"
        data.mkdir(parents=True)
        (data.parent / "README.md").write_text("the dataset's card")
        for split in ("train", "test"):
            blob = hub / "blobs" / f"{revision}{split}"
            pyarrow.parquet.write_table(pyarrow.table({"text": [f"{revision} {split}"]}), blob)
            (data / f"{split}-00000-of-00001.parquet").symlink_to(blob)
    with pytest.raises(UserError, match="no snapshot that refs/main names"):
        find_files([hub])
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("bbb\n")
    assert sorted(texts(hub)) == ["bbb test", "bbb train"]


def test_columns_of_text_alone_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    for kind in (pyarrow.string(), pyarrow.large_string()):
        table = pyarrow.table({"n": [1, 2, 3], "text": pyarrow.array(["a", None, "c"], kind)})
        pyarrow.parquet.write_table(table, path)
        assert list(read_documents(path)) == ["a", "c"]
        with pytest.raises(UserError, match="no column 'body'; set --text_key of prepare_text.py to one of n, text"):
            list(read_documents(path, "body"))
        with pytest.raises(UserError, match="column 'n' holds int64, not text"):
            list(read_documents(path, "n"))
    path.write_bytes(b"no parquet file at all")
    with pytest.raises(UserError, match=r"rows\.parquet: not a readable parquet file"):
        list(read_documents(path))


def test_a_named_file_of_any_suffix_is_text_and_a_folder_keeps_to_those_known(tmp_path: Path) -> None:
    for name in ("LICENSE", "notes.rst", "main.py", "a.txt"):
        (tmp_path / name).write_text(name)
        assert texts(tmp_path / name) == [name]
    assert texts(tmp_path) == ["a.txt"]
    (tmp_path / "weights.bin").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match=r"weights\.bin: not UTF-8"):
        texts(tmp_path / "weights.bin")


def test_a_folder_of_arrow_files_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "data-00000-of-00001.arrow").touch()
    with pytest.raises(UserError, match="Dataset.to_parquet writes one from arrow files"):
        find_files([tmp_path])
