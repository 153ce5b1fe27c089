"""Talk to a language model: the screen, and its stream of events from the child process that has the model.

A tab has its conversation and sends all of it with each message, so that nothing is lost when the child ends, or the
page. Models and LoRAs are folders, told by their ``config.json`` and ``adapter_config.json``.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from library.errors import UserError
from library.web.child import Child
from library.web.jobs import ROOT
from library.web.loras import weights_in
from library.web.site import Form, Routes, Site

child = Child([str(ROOT / "tools/chat_worker.py")])  # one for all tabs


@asynccontextmanager
async def child_while_open(site: Site) -> AsyncIterator[None]:
    """End the child with the page: at the signal already, as the server then waits for answers to be complete."""
    loop = asyncio.get_running_loop()

    def end_both(number: int, end_server: Any) -> None:
        child.end()
        end_server(number, None)

    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):  # on Windows, where asyncio has no such handlers
            loop.add_signal_handler(number, end_both, number, signal.getsignal(number))
    yield
    await child.close()


def show(site: Site, request: Request, form: Form) -> Response:
    """Show the screen."""
    found = weights_in(site)
    return site.page(
        request, "chat.html", models=found["language_model"], loras=found["language_lora"], is_running=child.is_running
    )


def ask(site: Site, request: Request, form: Form) -> Response:
    """Load a model, or have it answer: stream the events as lines of JSON."""
    question: dict[str, Any] = {}
    with suppress(ValueError, TypeError, RecursionError):
        question = dict(json.loads(str(form.get("request", ""))))
    if question.get("do") not in ("load", "answer"):
        raise UserError("request: asks neither to load a model nor for an answer; reload the page")
    for name in ("model", "lora"):
        if name == "model" or question.get(name):
            question[name] = site.roots.show(site.roots.find(str(question.get(name, ""))))
    lines = (json.dumps(event) + "\n" async for event in child.ask(question))
    return StreamingResponse(lines, media_type="application/x-ndjson")


def stop(site: Site, request: Request, form: Form) -> Response:
    """Stop the answer to the tab's request, if it is still going on."""
    return Response(status_code=204, background=BackgroundTask(child.stop, str(form.get("name", ""))))


ROUTES: Routes = {"/chat": show, "/chat/ask": (None, ask), "/chat/stop": (None, stop)}
