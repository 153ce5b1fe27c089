"""Turn texts into token shards for train_llm.py.

    python tools/prepare_text.py my_texts --train_tokenizer 8192 --save_to data/mine
    python tools/prepare_text.py corpus.jsonl more/*.parquet --tokenizer Llama-3.2-1B --save_to data/llama

Texts are .txt and .md files (one document each, or several with --separator), .jsonl (a document a line), .parquet (a
document a row), and folders of these, such as a dataset in the Hugging Face hub's cache; files of other
suffixes are text too if they are named. The folder that is written holds the tokenizer: it is all that training needs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.errors import UserError, counted, exit_on_user_error
from library.llm.documents import find_files, read_documents
from library.llm.tokenizer_files import load_tokenizer
from library.llm.tokenizers import train_bpe
from library.training.report.progress import counting
from tools.command import answer_early, count, number, seed_number, tool_console, tool_parser


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = tool_parser(__doc__)
    parser.add_argument("texts", nargs="+", metavar="PATH", help="files and folders")
    parser.add_argument("--save_to", type=Path, required=True, metavar="FOLDER", help="where the shards go")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--tokenizer", metavar="PATH", help="a tokenizer's file, or the folder of it or its model")
    which.add_argument("--train_tokenizer", type=count, metavar="N", help="train a BPE of N tokens on these texts")
    parser.add_argument("--text_key", default="text", help="jsonl key or column (default: %(default)s)")
    parser.add_argument("--separator", metavar="TEXT", help="divides text files into documents, e.g. '<|endoftext|>'")
    parser.add_argument(
        "--validation_share", type=number(least=0, most=1), default=0.01, metavar="X", help="default: %(default)s"
    )
    parser.add_argument("--seed", type=seed_number, default=0, help="of the choice of held-out documents")
    parser.add_argument("--shard_tokens", type=count, default=100_000_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--overwrite", action="store_true", help="replace a corpus that is there")
    return parser


answer_early(__name__, lambda: parser().parse_args())

from library.llm.token_batches import INDEX, Split, SplitIndex, write_corpus


def prepare(options: argparse.Namespace) -> dict[Split, SplitIndex]:
    """Tokenise what the command line names; return what was written."""
    files = find_files(options.texts)
    folder: Path = options.save_to
    if (folder / INDEX).exists() and not options.overwrite:
        raise UserError(f"{folder}: holds a prepared corpus; choose another folder, or give --overwrite")
    if not 0 <= options.validation_share < 1:
        raise UserError(f"--validation_share: {options.validation_share:g} is no share; give 0 to 1, such as 0.01")
    for old in [folder / INDEX, *folder.glob("train_*.*"), *folder.glob("validation_*.*")]:
        old.unlink(missing_ok=True)
    console = tool_console()

    def documents(advance: Callable[[int], None]) -> Iterator[str]:
        for file in files:
            yield from read_documents(file, options.text_key, options.separator)
            advance(file.stat().st_size)

    size = sum(file.stat().st_size for file in files)
    with counting(console) as start:
        if options.tokenizer is None:
            tokenizer = train_bpe(documents(start("tokenizer, bytes", size)), options.train_tokenizer)
            if tokenizer.vocab_size < options.train_tokenizer:
                found = f"{tokenizer.vocab_size} tokens, not {options.train_tokenizer}"
                console.print(f"note: --train_tokenizer: the texts give {found}; every word of them is one token then")
        else:
            tokenizer = load_tokenizer(options.tokenizer)
        tokenizer.save(folder)
        texts, share = documents(start("tokenising, bytes", size)), options.validation_share
        written = write_corpus(texts, folder, folder, share, options.seed, options.shard_tokens)
    for name, split in written.items():
        shards = f"{split.tokens:,} tokens, {counted(len(split.shards), 'shard')}"
        console.print(f"{name}: {counted(split.documents, 'document')}, {shards}")
    console.print(f"{folder / INDEX}")
    return written


@exit_on_user_error
def main() -> None:
    """Parse the command line and prepare."""
    prepare(parser().parse_args())


if __name__ == "__main__":
    main()
