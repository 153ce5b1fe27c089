"""A live child process that speaks JSON lines: for what needs torch and must answer at once, beside a page without it.

The first request starts it; it ends after some idle minutes and with the page, whatever that died of: its stdin closes
then. A request is a line ``{"id": 1, ...}``, its answer lines of events with that id, of which the last is ``done`` or
``error``; ``{"do": "stop", "id": 1}`` ends it early. One answer at a time: a tab that asks meanwhile is refused after
two seconds, a client of the API waits in line. An answer whose reader has gone is stopped, and what is left of it has
another id than the next one, so that it is passed over.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

BUSY = "the model is answering in another tab or program; stop that first"


class Child:
    """A process, or the promise of one."""

    def __init__(self, words: Sequence[str], idle: float = 300) -> None:
        """``words``: the command after the interpreter; ``idle``: seconds without a request until it is ended."""
        self._words, self._idle = tuple(words), idle
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()  # whoever is answered has it
        self._number, self._name = 0, None  # the newest request's id, and its name

    @property
    def is_running(self) -> bool:
        """Whether there is a process, which takes memory."""
        return self._process is not None and self._process.returncode is None

    async def ask(
        self, request: Mapping[str, Any], is_gone: Callable[[], Awaitable[bool]] | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of an answer.

        Args:
            request: without an id; by its ``name``, if it has one, it can be stopped.
            is_gone: whether nobody reads the answer any more; who gives it waits in line and is left out then.
        """
        for _ in range(20 if is_gone is None else 0):  # that a tab was reloaded or closed is noticed in a moment
            if self._turn.locked():
                await asyncio.sleep(0.1)
        if is_gone is None and self._turn.locked():
            yield {"event": "error", "error": BUSY}
            return
        async with self._turn:
            if is_gone is not None and await is_gone():
                return
            if (process := self._process) is None or process.returncode is not None:
                process = self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *self._words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    limit=2**26,
                    start_new_session=True,  # bytes of a line; the Ctrl-C of the page is not its own
                )
            assert process.stdout is not None
            self._number, self._name = self._number + 1, request.get("name")
            self._send({**request, "id": self._number})
            try:
                while line := await process.stdout.readline():
                    event = json.loads(line)
                    if event["id"] == self._number:
                        yield event
                        if event["event"] in ("done", "error"):
                            return
                code = await process.wait()
                reasons = {-9: "it was killed: out of memory?", -15: "the page was closed"}
                why = reasons.get(code, f"exit code {code}; see the page's terminal")
                yield {"event": "error", "is_over": True, "error": f"The model's process ended ({why}). Load it again."}
            finally:
                self._send({"do": "stop", "id": self._number})  # one that is over stays as it is
                asyncio.get_running_loop().call_later(self._idle, self.end, self._number)

    async def stop(self, name: str) -> None:
        """End the answer to the request of this name at its next token; another one goes on."""
        if name == self._name:
            self._send({"do": "stop", "id": self._number})

    async def close(self) -> None:
        """End the process and wait until it has."""
        if (process := self.end()) is not None:
            await process.wait()

    def end(self, newest: int | None = None) -> asyncio.subprocess.Process | None:
        """End the process and return it; not if there was a request after the one given as the newest."""
        if newest not in (None, self._number):
            return None
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.terminate()  # at once: it has nothing to save
        return process

    def _send(self, request: Mapping[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
