"""Chat by JSON lines: requests on stdin, events on stdout, one object a line; the page's /chat is thin around it.

    {"id": 1, "do": "load", "model": "output/llama", "lora": "output/assistant", "strength": 0.8}
    {"id": 2, "do": "answer", "model": ..., "turns": [], "message": "hello", "settings": {"temperature": 0}}
    {"do": "stop", "id": 2}

A request has its whole conversation, so that nothing of it is here but keys and values, which the next one uses as far
as it begins alike. Its events have its id: ``ready`` (the model is in memory), ``piece`` ..., and at last ``done`` or
``error``.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from contextlib import closing
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, NoReturn

from library.errors import UserError, one_line, reason_of
from library.llm.chat_templates import Turn
from library.llm.generation import SamplingSettings
from networks.merging.merge import LoraSource
from tools.chatting.session import ANOTHER_SEED, Loading, ModelRegistry, Session

Request = dict[str, Any]
_OFF = {"top_k": 0, "top_p": 1, "min_p": 0}  # as a form has it; what is not drawn is not narrowed down


class _Answerer:
    """What the main thread does; ``stopped``, the ids of requests to end early, is filled by the one that reads."""

    def __init__(self, loading: Loading, context: int | None) -> None:
        self._loading, self._context = loading, context
        self.stopped = set[int]()
        self._id = 0  # of the request that is answered
        self._session: Session | None = None
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # what a library prints is no event

    def say(self, event: str, **values: Any) -> None:
        try:
            self._out.write(json.dumps({"event": event, "id": self._id, **values}) + "\n")
            self._out.flush()
        except BrokenPipeError:  # before stdin told
            os._exit(0)

    def handle(self, request: Request) -> None:
        self._id = request["id"]
        try:
            session = self._take(request["model"], request.get("lora") or None, float(request.get("strength", 1)))
            has_turns = session.conversation.template.has_turns
            self.say("ready", introduction=session.introduction(), has_turns=has_turns)
            self.say("done", **(self._answer(session, request, has_turns) if request["do"] == "answer" else {}))
        except UserError as error:
            self.say("error", error=one_line(error))
        except Exception as error:  # out of memory on the card, a request of another version: the next may do
            self.say("error", error=f"{type(error).__name__}: {reason_of(error)}")

    def _take(self, model: str, lora: str | None, strength: float) -> Session:
        """Have model and LoRA in memory; both are called by their paths."""
        if self._session is None:
            registry = ModelRegistry({model: Path(model)}, {}, self._loading)
            self._session = Session(registry, SamplingSettings(), context=self._context)
        session = self._session
        session.registry.models[model] = Path(model)
        if lora is not None:
            session.registry.loras[lora] = LoraSource(Path(lora), strength)
        session.conversation.reset()  # perhaps another tab's
        session.choose(model, lora)
        return session

    def _answer(self, session: Session, request: Request, has_turns: bool) -> dict[str, Any]:
        tries, given = request.get("tries", 0), request["settings"]
        is_drawn = given.get("temperature", 1) > 0
        off = {name for name, value in _OFF.items() if not is_drawn or given.get(name) == value}
        settings = SamplingSettings(**{name: value for name, value in given.items() if name not in off})
        session.settings = replace(settings, seed=settings.seed + ANOTHER_SEED * tries)
        session.set_system(request.get("system", "") if has_turns else "")
        turns = [Turn(question, answer, tuple(said), ended) for question, answer, said, ended in request["turns"]]
        if request.get("has_turns", has_turns) is not has_turns:  # a text and a talk in turns do not go together
            turns = []
        session.conversation.restore(turns)
        with closing(session.answer(request["message"])) as pieces:
            for piece in pieces:
                if piece:
                    self.say("piece", text=piece)
                if self._id in self.stopped:
                    break
        new = session.conversation.turns[len(turns) :]
        same = (
            ["at temperature 0 every try gives the same answer; raise it for another"] if tries and not is_drawn else []
        )
        remarks = [*session.remarks(), *same]
        return {"turn": astuple(new[0]) if new else None, "report": session.report(), "remarks": remarks}


def serve_json_lines(loading: Loading, context: int | None) -> NoReturn:
    """Answer the requests on stdin until it closes: who asked has gone then, and nothing is to stay behind."""
    answerer, requests = _Answerer(loading, context), queue.Queue[Request]()

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
