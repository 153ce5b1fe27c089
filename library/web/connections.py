"""How many connections the page keeps, and how long it waits for bytes that a client owes.

uvicorn waits for the rest of a request without end, and accepts connections until the process has no file descriptors
left. Here each ``_BYTES`` of a request have ``_SECONDS`` to arrive, and a connection more than the page keeps takes the
place of another: of those that owe the rest of a request the one that has waited longest, else of the oldest.
"""

from __future__ import annotations

import sys
from asyncio import TimerHandle, Transport
from socket import socket
from typing import Any

import h11
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

_SECONDS, _BYTES = 20.0, 16_384
_MOST, _QUEUE = 256, 2048  # connections; those that wait to be accepted


class _Server(Server):
    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_QUEUE)  # backlog is also how many wait in the kernel, which costs no descriptors


def run_server(app: Any, listening: socket) -> None:
    """Answer requests with ``app`` until a signal ends the page.

    A quarter of the process's descriptors is for connections. As many as ``backlog`` are accepted at once, before any
    is counted: asyncio logs each one for which it then has no descriptor.
    """
    most = _most_connections()
    backlog = max(4, most // 4)
    config = Config(
        app, http=_protocol(most), backlog=backlog, log_level="warning", access_log=False, timeout_graceful_shutdown=2
    )
    _Server(config).run(sockets=[listening])


def _most_connections() -> int:
    if sys.platform == "win32":
        return _MOST
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if soft == resource.RLIM_INFINITY else min(_MOST, max(4, soft // 4))


def _protocol(most: int) -> type[H11Protocol]:
    """Return uvicorn's protocol of a connection with deadlines, of which ``most`` are kept."""

    class Protocol(H11Protocol):
        deadline: TimerHandle | None = None
        since = received = 0.0

        def connection_made(self, transport: Transport) -> None:
            others = [other for other in self.connections if not other.transport.is_closing()]
            super().connection_made(transport)
            self._expect()
            if len(others) >= most:
                min(others, key=lambda other: (not other.owes, other.since)).transport.abort()

        @property
        def owes(self) -> bool:
            """Whether the client has yet to send the rest of a request, or a request at all."""
            return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.flow.read_paused

        def _expect(self) -> None:
            self._forget()
            self.received, self.since = 0, self.loop.time()
            self.deadline = self.loop.call_later(_SECONDS, self._overdue)

        def _forget(self) -> None:
            if self.deadline:
                self.deadline.cancel()

        def _overdue(self) -> None:
            if self.owes:
                self.transport.abort()
            else:
                self._expect()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.received += len(data)
            if self.received >= _BYTES:
                self._expect()

        def send_400_response(self, msg: str) -> None:
            """Answer what is no request; the answer to its beginning, if one is due or under way, goes no further."""
            if self.cycle:
                self.cycle.disconnected = True  # who waits for its body hears of it as the connection is lost
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            self.transport.close()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._expect()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._forget()

    return Protocol
