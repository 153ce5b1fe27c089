"""Evaluate a language model: perplexity, and multiple choice by likelihood.

    python tools/evaluate_llm.py --model output/llama_tiny/llama_tiny --perplexity data/my_texts held_out.txt
    python tools/evaluate_llm.py --model Llama-3.2-1B --choices hellaswag_val.jsonl --limit 1000 --save_to scores.json

``library/llm/evaluation.py`` defines each measure. lm-evaluation-harness reads our model folders itself
(docs/llm.md, Evaluation); tools/generate.py text shows what a model writes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from library.console import Console, plain_table
from library.errors import UserError, exit_on_user_error
from library.files import write_text
from library.llm.documents import find_files, read_documents
from library.llm.tokenizer_files import load_tokenizer
from library.llm.tokenizers import Tokenizer
from library.models.hub import find_model
from library.training.report.progress import counting
from tools.command import (
    add_language_model,
    answer_early,
    count,
    load_language_model,
    lora_source,
    tool_console,
    tool_parser,
)

_CONTEXT = 2048  # at most, unless asked for more: what models were compared at when these measures were made


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = tool_parser(__doc__)
    model = parser.add_argument_group("model")
    model.add_argument("--model", required=True, help="language model: folder in any published layout, or GGUF file")
    add_language_model(model)
    model.add_argument("--lora", metavar="ADAPTER[:STRENGTH]", help="PEFT adapter folder, or the file in it")
    what = parser.add_argument_group("what to measure")
    what.add_argument("--perplexity", nargs="+", metavar="PATH", help="text files, folders or prepared corpora")
    what.add_argument("--choices", nargs="+", metavar="FILE", help="questions, jsonl in HellaSwag's format")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--context", type=count, metavar="N", help=f"tokens read; default: the model's, at most {_CONTEXT}"
    )
    how.add_argument("--stride", type=count, metavar="N", help="between windows of --perplexity; default: context / 2")
    how.add_argument(
        "--batch_size", type=count, default=8, metavar="N", help="windows or choices (default: %(default)s)"
    )
    how.add_argument("--limit", type=count, metavar="N", help="documents of each file, questions of each file")
    parser.add_argument("--save_to", type=Path, metavar="FILE", help="write everything measured as JSON")
    return parser


answer_early(__name__, lambda: parser().parse_args())

from library.llm.evaluation import (
    Document,
    accuracies,
    answer_questions,
    measure_perplexity,
    read_questions,
    shard_documents,
    text_documents,
)
from library.llm.token_batches import INDEX, TokenShards

_PERPLEXITY_ROWS = {
    "loss": "loss of a token",
    "perplexity": "perplexity of a token",
    "bits_per_byte": "bits per byte",
    "word_perplexity": "perplexity of a word",
}


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Do what the command line asks for; return what was measured, as it is saved."""
    from library.models.llm.files import open_lm
    from library.training.tasks.chat_lora import put_lora_on

    check(options)
    console = tool_console()
    folder = find_model(options.model, "--model", is_pipeline=False)
    config = open_lm(folder)[0]
    tokenizer = load_tokenizer(options.tokenizer or folder)
    lora = lora_source(options.lora) if options.lora else None
    context = options.context or min(config.context, _CONTEXT)
    if not config.has_rope and context > config.context:
        raise UserError(f"--context: {context} is more than the model's {config.context} positions; lower it")
    if options.stride is not None and options.stride > context:
        raise UserError(f"--stride: {options.stride} does not fit; give 1 to the context of {context}")
    # everything is read before the model, which may take minutes to load
    questions = {file: read_questions(file, options.limit) for file in options.choices or ()}
    texts: dict[str, list[Document]] = {}
    if options.perplexity:
        with counting(console) as start:
            reading = start("tokenising files", len(options.perplexity))
            for path in options.perplexity:
                texts[path] = documents(path, tokenizer, options.limit)
                reading(1)
    model = load_language_model(folder, options.dtype, options.fp8_scaled)
    if lora is not None:
        put_lora_on(model, lora.path, lora.ratio)
    results: dict[str, Any] = {
        "model": options.model,
        "dtype": str(model.embedding.weight.dtype).removeprefix("torch."),
        "fp8_scaled": options.fp8_scaled,
        "lora": options.lora,
    }
    size, stride = options.batch_size, options.stride or max(1, context // 2)
    with counting(console) as start:
        for path, own in texts.items():
            advance = start("perplexity, tokens", sum(document.scored for document in own))
            measured = measure_perplexity(model, own, context, stride, size, advance)
            results.setdefault("perplexity", {})[path] = measured
        for path, of_file in questions.items():
            advance = start("choices", sum(len(question.choices) for question in of_file))
            scores = answer_questions(model, tokenizer, of_file, context, size, advance)
            results.setdefault("choices", {})[path] = accuracies(of_file, scores)
    show(results, console)
    if options.save_to is not None:
        write_text(options.save_to, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
        console.print(f"{options.save_to}")
    return results


def check(options: argparse.Namespace) -> None:
    """Raise a UserError if nothing is asked for, an option would have no effect, or a number has no meaning."""
    if not (options.perplexity or options.choices):
        raise UserError("nothing to evaluate; give --perplexity or --choices")
    if options.stride is not None and not options.perplexity:
        raise UserError("--stride: has no effect without --perplexity; add it or remove --stride")
    if options.save_to is not None and options.save_to.is_dir():
        raise UserError(f"--save_to: {options.save_to} is a folder; name a file in it")


def documents(path: str, tokenizer: Tokenizer, limit: int | None) -> list[Document]:
    """Return the first documents, at most ``limit``, of a file, a folder of files or a prepared corpus, tokenised."""
    found: Iterator[Document]
    if (Path(path) / INDEX).is_file():
        shards = TokenShards(path, "validation")
        if shards.vocab_size != tokenizer.vocab_size:
            raise UserError(
                f"{path}: prepared with {shards.vocab_size} tokens, the model's tokenizer has {tokenizer.vocab_size}; "
                "give the texts themselves"
            )
        found = shard_documents(shards, tokenizer)
    else:
        read = map(read_documents, find_files([path]))
        found = text_documents(itertools.chain.from_iterable(read), tokenizer)
    kept = list(itertools.islice(found, limit))
    if not kept:
        raise UserError(f"{path}: holds no text; give another file")
    return kept


def show(results: dict[str, Any], console: Console) -> None:
    """Print what was measured: a table for each kind."""
    if measured := results.get("perplexity"):
        table = plain_table("", *measured)
        for key, name in _PERPLEXITY_ROWS.items():
            table.add_row(name, *(f"{own[key]:,.4f}" for own in measured.values()))
        for key in ("documents", "tokens", "bytes", "words"):
            table.add_row(key, *(f"{own[key]:,}" for own in measured.values()))
        table.add_row("window", *(f"{own['context']}, stride {own['stride']}" for own in measured.values()))
        console.print(table)
    if measured := results.get("choices"):
        table = plain_table("multiple choice", "acc", "acc_norm", "questions")
        for path, own in measured.items():
            rates = [f"{100 * own[k]:.2f} ± {100 * own[f'{k}_stderr']:.2f} %" for k in ("acc", "acc_norm")]
            table.add_row(path, *rates, f"{own['questions']:,}")
        console.print(table)


@exit_on_user_error
def main() -> None:
    """Parse the command line and evaluate."""
    evaluate(parser().parse_args())


if __name__ == "__main__":
    main()
