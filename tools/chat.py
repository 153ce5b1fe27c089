"""Chat with a language model, in the terminal or (--web) in the browser.

    python tools/chat.py --model Llama-3.2-1B-Instruct --temperature 0.7 --top_p 0.9
    python tools/chat.py --models_dir output --loras_dir output --web

Instruct models talk in turns, in Llama 3's template. Base models (GPT-2, a model of train_llm.py) continue what is
typed. The browser needs gradio: make setup-web.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.errors import UserError, exit_on_user_error
from tools.command import add_language_model, add_sampling, count, sampling_settings, tool_parser, whole


def chat(options: argparse.Namespace) -> None:
    """Talk as the command line says."""
    from tools.chatting.session import Loading, ModelRegistry, Session, find_loras, find_models
    from tools.chatting.terminal import chat_in_terminal

    _check(options)
    if options.web:
        try:
            from tools.chatting.web import serve
        except ModuleNotFoundError as error:
            raise UserError(f"--web: {error.name} is not installed; run make setup-web") from None
    models = find_models(options.model, options.models_dir)
    loras = find_loras(options.lora, options.loras_dir)
    settings = sampling_settings(options)
    loading = Loading(options.tokenizer, options.dtype, options.fp8_scaled, options.chat_template)
    registry = ModelRegistry(models, loras, loading)
    if options.lora:
        registry.use(registry.model_name, next(iter(loras)))
    session = Session(registry, settings, options.system or "", options.context)
    session.choose(registry.model_name, registry.lora_name)  # at the LoRA's strength
    if not options.web:
        chat_in_terminal(session, options.history_file)
    else:
        serve(session, options.host or "127.0.0.1", options.port)


def _check(options: argparse.Namespace) -> None:
    if not options.web:
        for name in ("host", "port"):
            if getattr(options, name) is not None:
                raise UserError(f"--{name}: has no effect without --web; add it")
    if options.web and options.history_file is not None:
        raise UserError("--history_file: has no effect with --web; remove it")
    if options.tokenizer and (len(options.model) != 1 or options.models_dir is not None):
        raise UserError("--tokenizer: goes with one --model and no --models_dir; put it into the models' folders")


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    from library.llm.chat_templates import PROMPT_TEMPLATES

    parser = tool_parser(__doc__)
    model = parser.add_argument_group("model")
    model.add_argument("--model", nargs="+", default=[], metavar="FOLDER", help="GPT-2 or Llama; the first is loaded")
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
    web = parser.add_argument_group("browser")
    web.add_argument("--web", action="store_true", help="serve a page in place of the terminal")
    web.add_argument("--host", metavar="ADDRESS", help="default: 127.0.0.1, this machine only")
    web.add_argument("--port", type=whole(least=0, most=65535), metavar="N", help="default: a free one")
    return parser


@exit_on_user_error
def main() -> None:
    """Parse the command line and chat."""
    chat(parser().parse_args())


if __name__ == "__main__":
    main()
