"""Chat with a language model in the terminal; in the browser: make ui.

    python tools/chat.py --model Llama-3.2-1B-Instruct --temperature 0.7 --top_p 0.9
    python tools/chat.py --models_dir output --loras_dir output

Instruct models talk in turns, in Llama 3's template. Base models (GPT-2, a model of train_llm.py) continue what is
typed. With --json_lines, programs talk: see tools/chatting/json_lines.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.errors import UserError, exit_on_user_error
from tools.command import add_language_model, add_sampling, count, sampling_settings, tool_parser


def chat(options: argparse.Namespace) -> None:
    """Talk as the command line says."""
    from tools.chatting.session import Loading, ModelRegistry, Session, find_loras, find_models
    from tools.chatting.terminal import chat_in_terminal

    _check(options)
    loading = Loading(options.tokenizer, options.dtype, options.fp8_scaled, options.chat_template)
    if options.json_lines:
        from tools.chatting.json_lines import serve_json_lines

        serve_json_lines(loading, options.context)
    models = find_models(options.model, options.models_dir)
    loras = find_loras(options.lora, options.loras_dir)
    settings = sampling_settings(options)
    registry = ModelRegistry(models, loras, loading)
    if options.lora:
        registry.use(registry.model_name, next(iter(loras)))
    session = Session(registry, settings, options.system or "", options.context)
    session.choose(registry.model_name, registry.lora_name)  # at the LoRA's strength
    chat_in_terminal(session, options.history_file)


def _check(options: argparse.Namespace) -> None:
    if options.json_lines:
        for name in ("model", "models_dir", "lora", "loras_dir", "system", "history_file"):
            if getattr(options, name):
                raise UserError(f"--{name}: has no effect with --json_lines, where each request names it; remove it")
    if options.tokenizer and (len(options.model) != 1 or options.models_dir is not None):
        raise UserError("--tokenizer: goes with one --model and no --models_dir; put it into the models' folders")


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    from library.llm.chat_templates import PROMPT_TEMPLATES

    parser = tool_parser(__doc__)
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", nargs="+", default=[], metavar="PATH", help="folder or GGUF file; the first is loaded"
    )
    model.add_argument("--models_dir", type=Path, metavar="FOLDER", help="offer the models below it, too")
    model.add_argument(
        "--lora", nargs="+", default=[], metavar="PATH[:STRENGTH]", help="PEFT folders or files; the first is used"
    )
    model.add_argument("--loras_dir", type=Path, metavar="FOLDER", help="offer the LoRAs below it, too")
    add_language_model(model)
    talk = parser.add_argument_group("conversation")
    talk.add_argument(
        "--chat_template", choices=PROMPT_TEMPLATES, default="auto", help="auto: turns if the model was made for them"
    )
    talk.add_argument("--system", metavar="TEXT", help="system message")
    talk.add_argument("--context", type=count, metavar="N", help="tokens of prompt and answer; default: the model's")
    talk.add_argument("--history_file", type=Path, metavar="FILE", help="keep typed lines for the arrow keys")
    add_sampling(parser)
    parser.add_argument("--json_lines", action="store_true", help="for programs: requests on stdin, events on stdout")
    return parser


@exit_on_user_error
def main() -> None:
    """Parse the command line and chat."""
    chat(parser().parse_args())


if __name__ == "__main__":
    main()
