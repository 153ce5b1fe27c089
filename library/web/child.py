"""A live child process that speaks JSON lines: for what needs torch and must answer at once, beside a page without it.

It is started by the first request, answers one at a time, and ends after some idle minutes and with the page, whatever
that died of: its stdin closes then. A request is a line ``{"id": 1, ...}``, its answer lines of events, the last of them
``done`` or ``error``; ``{"do": "stop", "id": 1}`` ends an answer early.

Whoever asks looks at a queue that the answer is put into. So a slow reader holds up nobody, and for one who has gone the
answer is stopped.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
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
        self._turn, self._numbers = asyncio.Lock(), itertools.count(1)
        self._now, self._stopped = 0, 0  # ids: who is being answered, and who wanted no more last
        self._process: asyncio.subprocess.Process | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = dict[int, asyncio.Task[None]]()  # the answers that are under way, by id
        self._log = tempfile.TemporaryFile()  # what the process says on stderr

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
        self._tasks[number] = asyncio.create_task(self._answer(number, request, is_gone, events.put_nowait))
        while (event := await events.get()) is not None:
            yield event

    async def stop(self, number: int) -> None:
        """End an answer at its next token; one that waits for its turn does not begin."""
        if number == self._now:
            self._stopped = number
            await self._send({"do": "stop", "id": number})
        elif number in self._tasks:
            self._tasks[number].cancel()

    async def close(self) -> None:
        """End the process; the next request starts another."""
        if (process := self._end()) is not None:
            await process.wait()

    async def _answer(self, number: int, request: Mapping[str, Any], is_gone: IsGone, tell: Tell) -> None:
        tell({"event": "begun", "id": number})
        watcher = asyncio.create_task(self._stop_when_gone(number, is_gone))
        try:
            if self.is_busy:
                tell({"event": "waiting"})
            async with self._turn:
                self._now = number
                await self._run({**request, "id": number}, tell)
        finally:
            self._now = 0 if self._now == number else self._now
            del self._tasks[number]
            watcher.cancel()
            tell(None)

    async def _run(self, request: Event, tell: Tell) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.is_running:
            await self._start()
        assert self._process is not None
        assert self._process.stdout is not None
        process, stdout = self._process, self._process.stdout
        await self._send(request)
        if self._stopped == request["id"]:  # while the process was started
            await self._send({"do": "stop", "id": request["id"]})
        while line := await stdout.readline():
            event = json.loads(line)
            tell(event)
            if event["event"] in ("done", "error"):
                self._timer = asyncio.get_running_loop().call_later(self._idle, self._end)
                return
        code = await process.wait()
        tell({"event": "error", "is_over": True, "error": f"The model's process has ended ({self._reason(code)}). "
              "Press Load to start it again."})  # fmt: skip

    async def _start(self) -> None:
        self._log.truncate(0)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            limit=_LONGEST, start_new_session=True,  # the page's Ctrl-C is not its own
        )  # fmt: skip

    async def _send(self, request: Event) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it has ended, which the reader of its answer sees
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                await self._process.stdin.drain()

    async def _stop_when_gone(self, number: int, is_gone: IsGone) -> None:
        while not await is_gone():
            await asyncio.sleep(_LOOK)
        await self.stop(number)

    def _end(self) -> asyncio.subprocess.Process | None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return None
        process.kill()  # it has nothing to save
        return process

    def _reason(self, code: int) -> str:
        said = os.pread(self._log.fileno(), 2**16, max(0, os.fstat(self._log.fileno()).st_size - 2**16))
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
        if code == -9:
            return "it was killed: out of memory?"
        return lines[-1][:300] if lines and code > 0 else f"exit code {code}"
