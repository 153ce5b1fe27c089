"""Merge one or several LoRAs into a base model.

    python tools/merge_lora.py --model flux1-dev.safetensors --lora a.safetensors:0.8 b.safetensors \\
        --save_to merged.safetensors --save_precision bf16

``--model`` is a diffusers folder or a single file (original or ComfyUI keys); the result has the same layout.
A LoRA may be in any layout; ``:0.8`` after its name is its strength, 1.0 without. Its text encoder layers go into the
folder's text encoders; where the base is a single file, ``--transformer_only`` leaves them out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.errors import UserError, exit_on_user_error
from networks.formats import PRECISIONS
from networks.merge import LoraSource, merge_loras
from networks.targets import FLUX_TARGETS


def parse_source(text: str) -> LoraSource:
    """Return the file and strength of ``file[:strength]``.

    Raises:
        UserError: the strength is not a number.
    """
    name, colon, strength = text.rpartition(":")
    if not colon or Path(text).exists() or "/" in strength or "\\" in strength:
        return LoraSource(Path(text), 1.0)
    try:
        return LoraSource(Path(name), float(strength))
    except ValueError:
        raise UserError(f"--lora {text}: {strength!r} is not a number; write file.safetensors:0.8") from None


def show_progress(done: int, total: int) -> None:
    """Show "tensor 120 of 780" on a terminal, on one line."""
    if sys.stderr.isatty():
        print(f"\rtensor {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


@exit_on_user_error
def main() -> None:
    """Parse the command line and merge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="diffusers folder or safetensors file")
    parser.add_argument("--lora", required=True, nargs="+", metavar="FILE[:STRENGTH]", help="LoRA files")
    parser.add_argument("--save_to", required=True, type=Path, help="new folder, or .safetensors file")
    parser.add_argument("--save_precision", choices=list(PRECISIONS), help="default: the base's own dtypes")
    parser.add_argument("--transformer_only", action="store_true", help="leave out the LoRAs' text encoder layers")
    args = parser.parse_args()
    sources = [parse_source(text) for text in args.lora]
    report = merge_loras(
        args.model, sources, args.save_to, FLUX_TARGETS, args.save_precision, show_progress, args.transformer_only
    )
    for note in report.notes:
        print(f"note: {note}")
    print(f"{args.save_to}: {report.changed} of {report.written} tensors changed by {len(sources)} LoRA(s)")


if __name__ == "__main__":
    main()
