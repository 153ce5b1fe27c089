"""Chat by JSON lines: requests on stdin, events on stdout, one object a line; what the page's /chat is thin around.

    {"id": 1, "do": "load", "model": "output/llama", "lora": "output/assistant", "strength": 0.8}
    {"id": 2, "do": "answer", "model": ..., "system": "", "turns": [], "message": "hello", "settings": {"temperature": 0}}
    {"do": "stop", "id": 2}

A request has the whole conversation, so that nothing of it is here but the keys and values of the newest; another that
begins the same uses them too. The answers are the events ``ready`` (the model is in memory), ``piece`` ..., and at last
``done`` or ``error``. The thread that reads also hears "stop" while the other one answers, and ends the process when
stdin does.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

from library.errors import UserError, one_line, reason_of
from library.llm.chat_templates import Turn
from library.llm.generation import SamplingSettings
from networks.merging.merge import LoraSource
from tools.chatting.session import ANOTHER_SEED, Loading, ModelRegistry, Session

Request = dict[str, Any]


class JsonLines:
    """The answering half; :meth:`stop` may be called from another thread."""

    def __init__(self, loading: Loading, context: int | None) -> None:
        """Load nothing yet."""
        self._loading, self._context = loading, context
        self._session: Session | None = None
        self._stopped = 0  # the id of the newest request that was stopped
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # what a library prints is no event

    def stop(self, number: int) -> None:
        """End the answer to this request at its next token."""
        self._stopped = number

    def handle(self, request: Request) -> None:
        """Do what a request asks; what goes wrong is its last event."""
        try:
            session = self._take(str(request["model"]), request.get("lora") or None, float(request.get("strength", 1)))
            done = self._answer(session, request) if request["do"] == "answer" else {}
            self._say("done", **done)
        except UserError as error:
            self._say("error", error=one_line(error))
        except Exception as error:  # out of memory on the card, a request of another version: the next may fit
            self._say("error", error=f"{type(error).__name__}: {reason_of(error)}")

    def _take(self, model: str, lora: str | None, strength: float) -> Session:
        """Have model and LoRA, which are called by their paths, in memory."""
        if self._session is None:
            registry = ModelRegistry({model: Path(model)}, {}, self._loading)
            self._session = Session(registry, SamplingSettings(), context=self._context)
        session = self._session
        session.registry.models[model] = Path(model)
        if lora is not None:
            session.registry.loras[lora] = LoraSource(Path(lora), strength)
        session.conversation.reset()  # of the request before, perhaps another tab's
        session.choose(model, lora)
        conversation = session.conversation
        self._say("ready", introduction=session.introduction(), has_turns=conversation.template.has_turns)
        return session

    def _answer(self, session: Session, request: Request) -> dict[str, Any]:
        conversation, has_turns = session.conversation, session.conversation.template.has_turns
        settings = {"seed": 0, **request["settings"]}
        settings["seed"] += ANOTHER_SEED * request.get("tries", 0)
        session.settings = SamplingSettings(**settings)
        session.set_system(request.get("system", "") if has_turns else "")
        turns = [Turn(question, answer, tuple(said), ended) for question, answer, said, ended in request["turns"]]
        if request.get("has_turns", has_turns) is not has_turns:  # a text and a talk in turns do not go together
            turns = []
        conversation.restore(turns)
        count = len(turns)
        with closing(session.answer(request["message"])) as pieces:
            for piece in pieces:
                if piece:
                    self._say("piece", text=piece)
                if self._stopped == request["id"]:
                    break
        new = conversation.turns[count:]
        turn = (new[0].question, new[0].answer, new[0].said, new[0].ended) if new else None
        return {"turn": turn, "report": session.report(), "remarks": session.remarks()}

    def _say(self, event: str, **values: Any) -> None:
        self._out.write(json.dumps({"event": event, **values}) + "\n")
        self._out.flush()


def serve_json_lines(loading: Loading, context: int | None) -> NoReturn:
    """Answer the requests on stdin until it closes: who asked has gone then, and nothing is to stay behind."""
    lines, requests = JsonLines(loading, context), queue.Queue[Request]()

    def listen() -> None:
        for line in sys.stdin:
            request = json.loads(line)
            if request["do"] == "stop":
                lines.stop(request["id"])
            else:
                requests.put(request)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        lines.handle(requests.get())
