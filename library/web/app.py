"""The application: the screens' routes, the files that they show, and the guard before all of it."""

from __future__ import annotations

import mimetypes
import re
from pathlib import Path
from threading import Thread

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from library.errors import UserError
from library.web.access import AllowedRoots, Guard, Refused
from library.web.cards import cards
from library.web.jobs import ROOT
from library.web.site import HERE, Form, Site

# Of the page's own files, what jobs make to be looked at.
_OWN = re.compile(r"jobs/[\w-]+/((report|images)/.+|log\.txt)")
_SHOWN = {".png", ".jpg", ".jpeg", ".webp", ".avif", ".gif", ".svg"}
# A report is a page of its own: its scripts run, but as nobody's, and reach nothing.
_REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "frame-ancestors 'self'"
)


def send_file(site: Site, request: Request, form: Form) -> Response:
    """Send a file of the allowed folders: pictures and reports to look at, all else to keep."""
    path = site.roots.find(request.query_params.get("path", ""), own=True)
    if path.is_relative_to(site.roots.state) and not _OWN.fullmatch(path.relative_to(site.roots.state).as_posix()):
        raise Refused(f"{site.roots.show(path)}: belongs to the page itself")
    if not path.is_file():
        raise UserError(f"{site.roots.show(path)}: no such file; it may have been moved or deleted")
    kind, download = path.suffix.lower(), "download" in request.query_params
    if kind in _SHOWN and not download:
        # where the address names the version (?v=), it may be kept
        kept = {"cache-control": "private, max-age=31536000, immutable"} if "v" in request.query_params else {}
        return FileResponse(
            path,
            media_type=mimetypes.guess_type(path.name)[0],
            headers=kept | {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox"},
        )
    if kind == ".html" and not download and path.is_relative_to(site.roots.state):  # others lead away from here
        return FileResponse(path, media_type="text/html", headers={"content-security-policy": _REPORT_POLICY})
    return FileResponse(path, filename=path.name)


def create_app(roots: AllowedRoots, port: int, token: str | None = None) -> ASGIApp:
    """Return the page over ``roots``; ``token``: asked of everybody, None on an address of this machine alone."""
    from library.web import chat, data, generate, new_run, openai_api, precision, runs, trash

    site = Site.of(roots)
    cards()  # the first visit finds an answer
    site.jobs.begin()  # what was queued when the machine went down
    reading = Thread(target=lambda: [runs.all_runs(site, site.jobs.all()), new_run.choices()], daemon=True)
    reading.start()  # the first visit finds it read; of very many runs it goes on beside
    reading.join(timeout=2)
    screens = [site.routes(module.ROUTES) for module in (runs, new_run, data, precision, generate, chat, trash)]
    routes = [
        *(route for found in screens for route in found),
        *site.routes({"/file": send_file}),
        openai_api.route(site),
        Mount("/static", StaticFiles(directory=HERE / "static")),
        Mount("/vendor", StaticFiles(directory=Path(ROOT) / "assets/web")),
    ]
    return Guard(Starlette(routes=routes, lifespan=lambda app: chat.child_while_open(site)), port, token)
