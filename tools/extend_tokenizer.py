"""Give a language model more tokens, special ones or words, and write it as a transformers folder.

    python tools/extend_tokenizer.py models/SmolLM2-135M-Instruct --special "<|tool|>" --save_to models/SmolLM2-tool
    python tools/extend_tokenizer.py Llama3.2-1B --tokens photosynthesis stroma --file words.txt --save_to models/bio

The model may be in any layout that is read, GGUF among them. Old tokens keep their numbers and rows. Train the new rows
with a LoRA: train_lora.py --network_args trainable_token_indices=FIRST-LAST; the numbers are printed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.errors import UserError, counted, exit_on_user_error
from library.files import read_text
from library.models.hub import find_model
from tools.command import show_progress, tool_parser


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = tool_parser(__doc__)
    parser.add_argument("model", metavar="MODEL", help="folder, GGUF file, or name on the hub")
    parser.add_argument("--tokens", nargs="+", default=[], metavar="TEXT", help="found anywhere in a text")
    parser.add_argument("--file", type=Path, metavar="FILE", help="more of them, one a line; blanks in a line count")
    help_text = "made from text by chat templates only, and left out of answers"
    parser.add_argument("--special", nargs="+", default=[], metavar="TEXT", help=help_text)
    parser.add_argument("--save_to", required=True, type=Path, metavar="FOLDER", help="a new folder")
    rows = "new rows begin as the mean of the tokens that a text was before (pieces), or of all tokens (mean); "
    rows += "default: pieces of words, mean of special ones"
    parser.add_argument("--rows", choices=["auto", "pieces", "mean"], default="auto", help=rows)
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help="default: the model's own")
    return parser


def extend(options: argparse.Namespace) -> None:
    """Do what the command line asks for, and say what became of it."""
    from library.llm.vocabulary import extend_model

    words = list(options.tokens)
    if options.file is not None:
        words += [line for line in read_text(options.file).split("\n") if line.strip()]
    if not words and not options.special:
        raise UserError("no tokens; give --tokens, --special or --file")
    model = find_model(options.model, "MODEL", is_pipeline=False)
    added = extend_model(model, options.save_to, words, options.special, options.rows, options.tokenizer, show_progress)
    for note in added.notes:
        print(f"note: {note}")
    for token, number in added.numbers.items():
        print(f"{number} {token!r}")
    numbers = [*added.numbers.values()]
    span = f"; to train them, --network_args trainable_token_indices={numbers[0]}-{numbers[-1]}" if numbers else ""
    print(f"{options.save_to}: {counted(len(numbers), 'new token')}{span}")


@exit_on_user_error
def main() -> None:
    """Extend from the command line."""
    extend(parser().parse_args())


if __name__ == "__main__":
    main()
