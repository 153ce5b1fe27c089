"""Who may ask the page, and which files it may touch.

*Files.* A path that arrives in a request is resolved, links and ``..`` included, and must then lie in a folder that the
page was given (:class:`AllowedRoots`); what comes back is the resolved path, so nobody exchanges a link in between.

*Requests.* :class:`Guard` stands before the application. A browser sends along from where a request comes
(``Sec-Fetch-Site``, ``Origin``), so that another site's page can neither read nor press anything; a name that is not
this machine's (DNS rebinding) is refused by its ``Host``. On an address that others reach, each request needs the token
that was printed at the start: ``?token=`` once and a cookie from then on, or ``Authorization: Bearer``. The policy in
every answer lets a page load scripts from this server alone, so HTML in a caption would not run even if it were not
escaped.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from library.errors import UserError, one_line, printable

STATE = ".tandem"  # in the first output folder: jobs, and what was undone
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_MOST_BODY = 4 * 2**20  # bytes of a request without files
_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
)


class Refused(UserError):
    """A path outside of the folders that the page was given."""


class ApiError(UserError):
    """A request below /v1 that gets no answer; the parameter to blame, if it is one, begins the message."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        kind, param = ("invalid_request_error", message.partition(":")[0]) if status < 500 else ("server_error", "")
        told = {"message": one_line(self), "type": kind, "param": param if param.isidentifier() else None, "code": code}
        self.status, self.told = status, {"error": told}


@dataclass(frozen=True)
class AllowedRoots:
    """The folders that the page was given; all absolute, links resolved.

    Attributes:
        outputs: runs lie below these; the first also has the page's own state.
        folders: of models, datasets and configurations, besides.
    """

    outputs: tuple[Path, ...]
    folders: tuple[Path, ...]

    @classmethod
    def of(cls, outputs: Iterable[str | Path], folders: Iterable[str | Path]) -> AllowedRoots:
        """Resolve the folders; the first output folder is made if need be.

        Raises:
            UserError: one is not there.
        """
        roots, others = ([Path(p).expanduser().resolve() for p in paths] for paths in (outputs, folders))
        roots[0].mkdir(parents=True, exist_ok=True)
        for folder in (*roots, *others):
            if not folder.is_dir():
                raise UserError(f"{folder}: no such folder; make it, or leave it out")
        return cls(tuple(roots), tuple(others))

    @property
    def all(self) -> tuple[Path, ...]:
        """All folders that the page was given."""
        return (*self.outputs, *self.folders)

    @property
    def state(self) -> Path:
        """Where the page keeps jobs and what was undone."""
        return self.outputs[0] / STATE

    def find(self, text: str, *, output: bool = False, own: bool = False) -> Path:
        """Return the resolved path that ``text`` means, relative ones from the working directory.

        Args:
            text: from a request; the file need not exist.
            output: it must lie in an output folder.
            own: it may be one of the page's own: what is in there may be shown, but what is run comes from there too.

        Raises:
            Refused: it lies elsewhere, or is no path.
        """
        try:
            path = Path(text).expanduser().resolve()
            path.exists()  # raises where a name is too long
        except (OSError, ValueError, RuntimeError):
            raise Refused(f"{printable(text[:200])}: is no path; check it") from None
        if STATE in path.parts and not own:
            raise Refused(f"{printable(text[:200])}: belongs to the page itself; choose another place")
        allowed = self.outputs if output else self.all
        if not text or not any(path.is_relative_to(folder) for folder in allowed):
            names = ", ".join(map(self.show, allowed))
            what = "the output folders" if output else "the folders that this page was given"
            raise Refused(
                f"{printable(text[:200]) or 'path'}: lies outside of {what} ({names}); choose a path "
                f"in them, or start the page with the {'output ' * output}folder that it is in"
            )
        return path

    def refuse_paths_outside(self, value: Any, where: str) -> None:
        """Refuse a configuration's texts, in tables and lists too, that name a file or folder outside.

        A text means a path if it is absolute, climbs by ``..``, begins at home, or exists from the working directory.
        """
        if isinstance(value, dict):
            for key, inner in value.items():
                self.refuse_paths_outside(inner, str(key))
        elif isinstance(value, list):
            for inner in value:
                self.refuse_paths_outside(inner, where)
        elif isinstance(value, str) and value:
            path, means_path = Path(value), False
            with suppress(OSError, ValueError):  # too long for a name, NUL
                means_path = path.is_absolute() or ".." in path.parts or value.startswith("~") or path.exists()
            if means_path:
                try:
                    self.find(value)
                except Refused as error:
                    raise Refused(f"{where}: {error}") from None

    @staticmethod
    def show(path: Path) -> str:
        """Return a path as a person writes it: from the working directory, if it lies there."""
        working = Path.cwd()
        return str(path.relative_to(working)) if path.is_relative_to(working) and path != working else str(path)


class Guard:
    """Refuses requests of other sites, of wrong names and without the token; adds headers to every answer."""

    def __init__(self, app: ASGIApp, port: int, token: str | None = None) -> None:
        """``token`` is None where only this machine can reach the page."""
        self._app, self._token = app, token
        self._hosts = {f"{name}:{port}" for name in _LOOPBACK} | (set(_LOOPBACK) if port == 80 else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("content-security-policy", _POLICY)
                headers["x-content-type-options"] = "nosniff"
                headers["referrer-policy"] = "same-origin"
                headers["cross-origin-resource-policy"] = "same-origin"
                headers.setdefault("cache-control", "no-store")
            await send(message)

        answer = self._refusal(Request(scope))
        if answer is not None and scope["path"].startswith("/v1/"):  # whose clients read OpenAI's errors
            answer = JSONResponse(ApiError(bytes(answer.body).decode(), answer.status_code).told, answer.status_code)
        await (answer or self._app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        headers: Headers = request.headers
        if self._token is None and headers.get("host", "").lower() not in self._hosts:
            return PlainTextResponse("This page answers on 127.0.0.1 only.", 421)
        site, visit = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode") == "navigate"
        origin = headers.get("origin")
        followed = site != "same-origin" and visit and request.method == "GET"  # a link, a bookmark
        is_foreign = origin is not None and origin.partition("://")[2] != headers.get("host")
        if is_foreign or (site not in ("same-origin", "none") and not followed):
            return PlainTextResponse("Requests from other sites are refused.", 403)
        if request.method not in ("GET", "HEAD", "POST"):
            return PlainTextResponse("This method is not allowed.", 405)
        kind = headers.get("content-type", "").lower()
        if "charset" in kind and "utf-8" not in kind:
            return PlainTextResponse("Texts are sent as UTF-8.", 415)
        is_upload = kind.startswith("multipart/form-data")  # read piece by piece
        length = headers.get("content-length", "0" if request.method != "POST" else "")
        if not is_upload and (not length.isdecimal() or int(length[:12]) > _MOST_BODY):
            return PlainTextResponse("This request is too large, or does not tell its Content-Length.", 413)
        return self._without_token(request) if self._token is not None else None

    def _without_token(self, request: Request) -> Response | None:
        assert self._token is not None
        given = request.query_params.get("token")
        if given is not None and hmac.compare_digest(given.encode(), self._token.encode()):
            answer = RedirectResponse(request.url.path, 303)
            answer.set_cookie("tandem_token", self._token, httponly=True, samesite="strict", max_age=30 * 86400)
            return answer
        kind, _, key = request.headers.get("authorization", "").partition(" ")  # as clients of an API send it
        for sent in (request.cookies.get("tandem_token", ""), key.strip() if kind.lower() == "bearer" else ""):
            if hmac.compare_digest(sent.encode(), self._token.encode()):
                return None
        return PlainTextResponse("Open the address with ?token= that was printed when the page was started.", 401)
