"""A live child process that speaks JSON lines: for what needs torch and must answer at once, beside a page without it.

The first request starts it. It answers one at a time, and ends after some idle minutes and with the page, whatever that
died of: its stdin closes then. A request is a line ``{"id": 1, ...}``, its answer lines of events, of which the last is
``done`` or ``error``; ``{"do": "stop", "id": 1}`` ends it early. Whoever asks looks at a queue that the answer is put
into, so a slow reader holds up nobody; for one who has gone it is stopped.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

_LOOK = 0.3  # seconds between two looks whether who asked is still there
_LONGEST = 2**26  # bytes of a line

Event = dict[str, Any]
IsGone = Callable[[], Awaitable[bool]]
Tell = Callable[[Event | None], None]


class Child:
    """A process, or the promise of one."""

    def __init__(self, words: Sequence[str], idle: float = 900) -> None:
        """``words``: the command after the interpreter; ``idle``: seconds without a request until it is ended."""
        self._words, self._idle = tuple(words), idle
        self._turn, self._numbers, self._answers = asyncio.Lock(), itertools.count(1), dict[int, asyncio.Task[None]]()
        self._now, self._stopped = 0, 0  # ids: who is being answered, and who wanted no more last
        self._process: asyncio.subprocess.Process | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        """Whether there is a process, which takes memory."""
        return self._process is not None and self._process.returncode is None

    @property
    def is_busy(self) -> bool:
        """Whether somebody is being answered."""
        return self._turn.locked()

    async def ask(self, request: Mapping[str, Any], is_gone: IsGone) -> AsyncIterator[Event]:
        """Yield the events of an answer; the first, ``begun``, has the id by which it is stopped."""
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        number = next(self._numbers)
        self._answers[number] = asyncio.create_task(self._answer({**request, "id": number}, is_gone, events.put_nowait))
        while (event := await events.get()) is not None:
            yield event

    async def stop(self, number: int) -> None:
        """End an answer at its next token; one that waits for its turn does not begin."""
        if number == self._now:
            self._stopped = number
            await self._send({"do": "stop", "id": number})
        elif number in self._answers:
            self._answers[number].cancel()

    async def close(self) -> None:
        """End the process and wait until it has."""
        if (process := self.end()) is not None:
            await process.wait()

    async def _answer(self, request: Event, is_gone: IsGone, tell: Tell) -> None:
        number = request["id"]
        tell({"event": "begun", "id": number})

        async def stop_when_gone() -> None:
            while not await is_gone():
                await asyncio.sleep(_LOOK)
            await self.stop(number)

        watcher = asyncio.create_task(stop_when_gone())
        try:
            if self.is_busy:
                tell({"event": "waiting"})
            async with self._turn:
                self._now = number
                await self._run(request, tell)
                self._now = 0
        finally:
            del self._answers[number]
            watcher.cancel()
            tell(None)

    async def _run(self, request: Event, tell: Tell) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.is_running:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=_LONGEST,
                start_new_session=True,  # the page's Ctrl-C is not its own
            )  # fmt: skip
        process = self._process
        assert process is not None
        assert process.stdout is not None
        await self._send(request)
        if self._stopped == request["id"]:  # while it was started
            await self._send({"do": "stop", "id": request["id"]})
        while line := await process.stdout.readline():
            tell(event := json.loads(line))
            if event["event"] in ("done", "error"):
                self._timer = asyncio.get_running_loop().call_later(self._idle, self.end)
                return
        code = await process.wait()
        why = "it was killed: out of memory?" if code == -9 else f"exit code {code}; see the page's terminal"
        why = why if self._process is process else "the page was closed"
        said = f"The model's process has ended ({why}). Press Load to start it again."
        tell({"event": "error", "is_over": True, "error": said})

    async def _send(self, request: Event) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it has ended, which the reader of its answer sees
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                await self._process.stdin.drain()

    def end(self) -> asyncio.subprocess.Process | None:
        """Kill the process and return it; the next request starts another."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()  # it has nothing to save
        return process
