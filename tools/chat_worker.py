"""Hold a language model for the page's chat: requests on stdin, events on stdout, one JSON object a line.

    {"id": 1, "do": "load", "model": "output/llama", "lora": "output/assistant", "strength": 0.8}
    {"id": 2, "do": "answer", "model": ..., "turns": [], "message": "hello", "settings": {"temperature": 0}}
    {"id": 3, "do": "answer", "model": ..., "messages": [], "tools": [], "stop": [], "settings": {"seed": 1}, ...}
    {"do": "stop", "id": 2}

The page (library/web/chat.py, openai_api.py) starts this process; in a terminal, tools/generate.py answers prompts.

A request carries its whole conversation. This process keeps only the model and the KV cache, and the next request
reuses the cache as far as both conversations begin alike. Events carry the request's id: ``ready`` (the model is in
memory, and of an answer the first token is known), ``piece`` for each token, and finally ``done`` or ``error``.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
from contextlib import closing
from copy import copy
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.errors import UserError, one_line, reason_of
from tools.command import answer_early, tool_parser

answer_early(__name__, lambda: tool_parser(__doc__).parse_args())

from library.llm.answers import CALL_MARKS, AnswerReader
from library.llm.chat_batches import read_message, read_tools, unread_keys
from library.llm.chat_session import ChatSession, PromptTooLong
from library.llm.chat_templates import ChatTemplate, PromptTemplate, Turn, load_prompt_template
from library.llm.generation import SamplingSettings
from library.llm.tokenizer_files import load_tokenizer
from library.models.llm.files import open_lm
from library.models.llm.model import TransformerLM
from library.training.tasks.chat_lora import put_lora_on, template_of
from networks.adapters.base import AdapterLinear
from networks.network import AdapterNetwork
from tools.command import load_language_model

Request = dict[str, Any]
_OFF = {"top_k": (0, -1), "top_p": (1,), "min_p": (0,)}  # how the page's form and clients of the API write "off"


class LoadedModel:
    """One model in memory, with one LoRA on it or none, and the conversation whose KV cache is kept.

    Attributes:
        model_path: "" before the first model is loaded.
        lora_path: None without a LoRA.
        conversation: replaced when the model or the chat template changes.
    """

    model: TransformerLM
    lora_path: str | None
    conversation: ChatSession
    _template: PromptTemplate  # the model's own, without a LoRA

    def __init__(self) -> None:
        self.model_path, self.lora_path, self.strength = "", None, 1.0
        self._network: AdapterNetwork | None = None

    def use(self, model: str, lora: str | None, strength: float) -> ChatSession:
        """Load what is not in memory yet; return the conversation. Changing the LoRA does not reload the model.

        Raises:
            UserError: the model or the LoRA cannot be loaded. A LoRA that does not fit leaves the model without one.
        """
        if model != self.model_path:
            self._load_model(model)
        if lora != self.lora_path:
            self._change_lora(lora)
        if strength != self.strength:
            self.strength = strength
            self.conversation.forget_cache()
        if self._network is not None:
            self._network.set_multiplier(strength)
        return self.conversation

    def introduction(self) -> str:
        """Return a line about the model and how it takes what is typed."""
        if self.conversation.template.has_turns:
            manner = f"talks in turns (template {self.conversation.template.name})"
        else:
            manner = "is a base model: it continues what you type, an empty line lets it go on"
        strength = "" if self.strength == 1 else f" at {self.strength:g}"
        lora = f" with {self.lora_path}{strength}" if self.lora_path else ""
        return f"{self.model_path}{lora} {manner}; context {self.conversation.context} tokens"

    def _load_model(self, path: str) -> None:
        folder = Path(path)
        config = open_lm(folder)[0]
        tokenizer = load_tokenizer(folder)
        template = load_prompt_template("auto", tokenizer, folder, config.eos)
        if self.model_path:  # free its memory first
            self.model_path, self.lora_path, self._network = "", None, None
            del self.model
            gc.collect()
        self.model = load_language_model(folder, None, fp8_scaled=False)
        self.model_path, self._template = path, template
        self.conversation = ChatSession(config, template)

    def _change_lora(self, path: str | None) -> None:
        take_loras_off(self.model)
        self.lora_path, self._network, template = None, None, self._template
        self.conversation.forget_cache()
        if path is not None:
            trained_with, arguments = template_of(Path(path))
            if trained_with:
                config, folder = self.model.config, Path(self.model_path)
                template = load_prompt_template(trained_with, template.tokenizer, folder, config.eos, arguments)
            self._network, self.lora_path = put_lora_on(self.model, path), path
        if template is not self.conversation.template:
            self.conversation = ChatSession(self.model.config, template)


def take_loras_off(model: TransformerLM) -> None:
    """Put back the layers that a LoRA was put around; their weights were never touched."""
    for name, module in list(model.named_modules()):
        if isinstance(module, AdapterLinear):
            model.set_submodule(name, module.base)


class _Answerer:
    """Answers requests in the main thread; the reading thread adds the ids of requests to end early to ``stopped``."""

    def __init__(self) -> None:
        self.stopped = set[int]()
        self._id = 0  # of the current request
        self._loaded = LoadedModel()
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # what a library prints goes to stderr and is not taken for an event

    def send(self, event: str, **values: Any) -> None:
        try:
            self._out.write(json.dumps({"event": event, "id": self._id, **values}) + "\n")
            self._out.flush()
        except BrokenPipeError:  # the page has ended, and stdin has not told us yet
            os._exit(0)

    def handle(self, request: Request) -> None:
        self._id = request["id"]
        try:
            lora, strength = request.get("lora") or None, float(request.get("strength", 1))
            session = self._loaded.use(request["model"], lora, strength)
            if request["do"] == "load":
                self._send_ready(session)
            self.send("done", **(self._answer(session, request) if request["do"] == "answer" else {}))
        except UserError as error:
            code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
            blamed = "messages: " if code and "messages" in request else ""
            self.send("error", error=blamed + one_line(error), status=400, code=code)
        except RecursionError:
            self.send("error", error="the request is nested too deeply; send a flatter one", status=400)
        except Exception as error:  # out of memory on the card, a request of another version: the next may succeed
            self.send("error", error=f"{type(error).__name__}: {reason_of(error)}")

    def _answer(self, session: ChatSession, request: Request) -> dict[str, Any]:
        """Send an answer's parts; return the last of them, its ending and figures, and the page's new turn."""
        settings = sampling_settings(request["settings"], session.context)
        prompt, remarks = prompt_of(session, request, settings.max_new_tokens)
        settings = replace(settings, seed=settings.seed + len(request.get("turns", ())))  # other numbers each turn
        tools = {tool["function"]["name"] for tool in read_tools(request, "tools")}
        is_chat, tokenizer = "messages" in request, session.template.tokenizer
        is_thinking = is_chat and tokenizer.decode(prompt[-8:]).rstrip().endswith("<think>")
        reader = AnswerReader(request.get("stop", ()), is_thinking, tools, is_chat)
        text, shown = "", CALL_MARKS if tools else ()
        with closing(session.answer(self._loaded.model, prompt, settings, shown)) as pieces:
            for piece in pieces:
                if not reader.has_begun:
                    self._send_ready(session)
                self.send("piece", parts=reader.add(piece))
                text += piece
                if reader.is_stopped or self._id in self.stopped:
                    break
        stats, parts, number = session.stats, reader.end(), len(session.stats.tokens)
        is_cut = stats.ending in ("max_new_tokens", "context") and not reader.is_stopped
        if is_cut:
            limit = "max_new_tokens" if stats.ending == "max_new_tokens" else f"context of {session.context} tokens"
            remarks.append(f"the answer was cut off after {number} tokens ({limit})")
        usage = {"prompt_tokens": len(prompt), "completion_tokens": number, "total_tokens": len(prompt) + number}
        turn = Turn(request.get("message", ""), text, stats.tokens, stats.ending == "model")
        report = (
            f"{number} tokens in {stats.seconds:.1f} s ({number / max(stats.seconds, 1e-9):.1f}/s); of the "
            f"prompt {stats.computed} tokens were new, {stats.cached} known"
        )
        return {
            "parts": parts,
            "finish_reason": "tool_calls" if "tool_calls" in parts else "length" if is_cut else "stop",
            "usage": usage | {"prompt_tokens_details": {"cached_tokens": stats.cached}},
            "turn": astuple(turn) if number else None,
            "report": report,
            "remarks": remarks,
        }

    def _send_ready(self, session: ChatSession) -> None:
        self.send("ready", introduction=self._loaded.introduction(), has_turns=session.template.has_turns)


def prompt_of(session: ChatSession, request: Request, wanted: int) -> tuple[list[int], list[str]]:
    """Return the tokens of a request's prompt, and remarks about it.

    The page sends turns and a message, and the oldest may be left out for ``wanted`` tokens of an answer. A client of
    the API sends messages, or a text or its tokens.
    """
    template, tokenizer = session.template, session.template.tokenizer
    if "turns" in request:
        turns = [Turn(question, answer, tuple(tokens), ended) for question, answer, tokens, ended in request["turns"]]
        if request.get("has_turns", template.has_turns) is not template.has_turns:
            turns = []  # plain text cannot continue a chat in turns
        return session.prompt(request.get("system", "") * template.has_turns, turns, request["message"], wanted)
    if "messages" not in request:
        text = request["prompt"]
        return (tokenizer.encode_prompt(text) if isinstance(text, str) else text), []
    if not isinstance(template, ChatTemplate):
        raise UserError("model: has no chat template and only continues text; ask /v1/completions, or another model")
    messages = []
    for number, message in enumerate(request["messages"], 1):
        messages.append(read_message(message, f"messages: {number}")[0])
        if unread := unread_keys(message):
            raise UserError(f"messages: {number}: this server does not know {unread[0]!r}; remove it")
    template, tools = copy(template), read_tools(request, "tools")
    template.arguments = {**template.arguments, **request["arguments"]}
    prompt = template.prompt_tokens(messages, tools)
    text = tokenizer.decode(prompt)
    called = [call for message in messages for call in message.more.get("tool_calls", ())]
    if unseen := [each["function"]["name"] for each in (*tools, *called) if each["function"]["name"] not in text]:
        raise UserError(
            f"tools: the model's chat template does not write {unseen[0]!r} into the prompt; describe the tools in the "
            "system message, or use a model whose template has them"
        )
    return prompt, []


def sampling_settings(given: dict[str, Any], context: int) -> SamplingSettings:
    """Return settings as the page and clients write them; an answer without a limit may fill the context."""
    is_drawn = given.get("temperature", 1) > 0
    off = {name for name, values in _OFF.items() if not is_drawn or given.get(name) in values}
    settings = {name: value for name, value in given.items() if name not in off and value is not None}
    return SamplingSettings(**{"max_new_tokens": context, **settings})


def serve() -> NoReturn:
    """Answer the requests on stdin until it closes: then the page has ended, and this process must not outlive it."""
    answerer, requests = _Answerer(), queue.Queue[Request]()

    def listen() -> None:
        for line in sys.stdin:
            if (request := json.loads(line))["do"] == "stop":
                answerer.stopped.add(request["id"])
            else:
                requests.put(request)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        answerer.handle(requests.get())


if __name__ == "__main__":
    serve()
