"""Write a language model as a transformers folder or a GGUF file: from GGUF, Meta's or OpenAI's files, or a folder.

    python tools/convert_llm.py --model SmolLM2-135M-Instruct.Q8_0.gguf --save_to models/SmolLM2-135M-Instruct
    python tools/convert_llm.py --model Llama3.2-1B --save_to models/Llama-3.2-1B --save_precision bf16
    python tools/convert_llm.py --model output/merged --save_to merged.gguf --save_precision q8_0

Quantised weights are dequantised, in fp32 and rounded once. Tokenizer and chat template come along; ``--tokenizer``
takes others, for files that have none.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.config.run_schema import SavingConfig
from library.errors import UserError, exit_on_user_error
from library.models.hub import find_model
from tools.command import choices, show_progress, tool_parser


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = tool_parser(__doc__)
    parser.add_argument("--model", required=True, metavar="PATH", help="GGUF file, folder, or name on the hub")
    parser.add_argument("--save_to", required=True, type=Path, metavar="PATH", help="a new folder, or a new .gguf file")
    precisions = [*choices(SavingConfig, "save_precision"), "q8_0"]  # the last in GGUF only
    parser.add_argument("--save_precision", choices=precisions, help="default: the file's, bf16 of quantised ones")
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help="default: the model's own")
    return parser


def convert(options: argparse.Namespace) -> None:
    """Do what the command line asks for, and say what became of it."""
    from library.llm.conversion import write_transformers
    from library.llm.gguf_writing import write_gguf
    from library.models.llm.files import TransformersFiles
    from library.safetensors_io import DTYPE_NAMES
    from networks.files.layouts import PRECISIONS

    files = TransformersFiles(find_model(options.model, "--model", is_pipeline=False))
    is_gguf, is_q8 = options.save_to.suffix.lower() == ".gguf", options.save_precision == "q8_0"
    if is_q8 and not is_gguf:
        raise UserError("--save_precision q8_0 is for a GGUF file; give --save_to the ending .gguf")
    dtype = PRECISIONS.get(options.save_precision, files.dtype)
    kind = "Q8_0" if is_q8 else DTYPE_NAMES[dtype]
    if is_gguf:
        remark = write_gguf(files, options.save_to, kind, options.tokenizer, show_progress)
    else:
        remark = write_transformers(files, options.save_to, dtype, options.tokenizer, progress=show_progress)
    if remark:
        print(f"note: {remark}")
    print(f"{options.save_to}: {len(files.entries)} tensors in {kind}")


@exit_on_user_error
def main() -> None:
    """Convert from the command line."""
    convert(parser().parse_args())


if __name__ == "__main__":
    main()
