"""What every screen has: the allowed folders, the jobs, the templates; and how a function becomes an answer.

A handler is a plain function ``(Site, Request, Form) -> Response``, run in a thread. A ``UserError`` that it raises is
shown as the trainer shows it: as a line on the screen, where htmx asked (status 422, into the element ``#message``), or
as a page of its own. So is a disk that cannot be written, and what a request lacks. Anything else is a bug: its
traceback goes to the terminal, a line that says so to the screen.
"""

from __future__ import annotations

import json
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from anyio import to_thread
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.filters import do_filesizeformat
from starlette import datastructures
from starlette.datastructures import FormData as Form
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from library.config.model_types import MODEL_TYPES
from library.config.published_models import link, published_models
from library.errors import UserError, counted
from library.training.report.progress import duration
from library.training.report.run_folder import chosen_of, name_to_keep, output_name
from library.web.access import AllowedRoots, Refused
from library.web.cards import cards
from library.web.jobs import Jobs

HERE = Path(__file__).parent
SCREENS = (
    ("Runs", "/"),
    ("New run", "/new"),
    ("Data", "/data"),
    ("Precision", "/precision"),
    ("Generate", "/generate"),
    ("Chat", "/chat"),
)
_MOST_FILES, _MOST_BYTES = 2000, 4 * 2**20  # pictures of a form, and bytes of one of its texts

Handler = Callable[["Site", Request, Form], Response]
Routes = Mapping[str, Handler | tuple[Handler | None, Handler]]  # path -> of GET, or (of GET, of POST)


@dataclass(frozen=True)
class Site:
    """What handlers are given."""

    roots: AllowedRoots
    jobs: Jobs
    templates: Environment

    @classmethod
    def of(cls, roots: AllowedRoots) -> Site:
        """Return the site over ``roots``."""
        templates = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        templates.filters |= {each.__name__: each for each in (number, duration, size, moment, ago, link)}
        templates.filters |= {"short": roots.show, "json": json.dumps, "urlencode": partial(quote, errors="replace")}
        functions = (url, counted, cards, chosen_of, name_to_keep, output_name)
        templates.globals |= {each.__name__: each for each in functions}
        templates.globals |= {"published": published_models(), "types": MODEL_TYPES}
        templates.globals |= {"screens": SCREENS, "has_gpus": shutil.which("nvidia-smi") is not None}
        parts = vars(templates.get_template("parts.html").module)  # a block that is rendered alone has them too
        templates.globals |= {name: macro for name, macro in parts.items() if name[0] != "_"}
        list(map(templates.get_template, templates.list_templates()))  # compiled before the first visit
        return cls(roots, Jobs(roots.state), templates)

    def page(self, request: Request, template: str, **values: Any) -> Response:
        """Return a whole page, of a template that extends base.html."""
        addresses = (address for _, address in SCREENS[1:] if request.url.path.startswith(address))
        return _html(self.templates.get_template(template).render(screen=next(addresses, "/"), **values))

    def part(self, template: str, block: str, **values: Any) -> Response:
        """Return one block of a template alone, for htmx to put in its place."""
        found = self.templates.get_template(template)
        return _html("".join(found.blocks[block](found.new_context({"screen": "", **values}))))

    def routes(self, table: Routes) -> list[Route]:
        """Return the routes of a table."""
        found = []
        for path, handlers in table.items():
            get, post = handlers if isinstance(handlers, tuple) else (handlers, None)
            for handler, method in ((get, "GET"), (post, "POST")):
                if handler is not None:
                    found.append(Route(path, self._endpoint(handler), methods=[method]))
        return found

    def _endpoint(self, handler: Handler) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            try:
                async with request.form(max_files=_MOST_FILES, max_fields=20_000, max_part_size=_MOST_BYTES) as form:
                    return await to_thread.run_sync(handler, self, request, form)
            except ClientDisconnect:  # in the middle of its request: nobody reads the answer
                return Response(status_code=400)
            except Exception as error:
                return self._refusal(request, error)

        return endpoint

    def _refusal(self, request: Request, error: Exception) -> Response:
        """Return an error as it is shown, on the screen it belongs to or as a page."""
        message, status = str(error), 403 if isinstance(error, Refused) else 422
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        if isinstance(error, KeyError) and raised_in == datastructures.__file__:  # by a form or a query
            message = f"{error}: is missing in the request; reload the screen"
        elif isinstance(error, OSError):
            message = f"{error.filename or 'a file'}: {error.strerror or error}; check the disk and its rights"
        elif isinstance(error, HTTPException):
            message = f"the request cannot be read: {error.detail}"
        elif not isinstance(error, UserError):
            traceback.print_exception(error)
            message, status = f"this is a bug of the page: {type(error).__name__}; the terminal has the rest", 500
        if "hx-request" in request.headers:
            answer = self.part("base.html", "notice", notice=message)
            answer.headers["hx-retarget"], answer.headers["hx-reswap"] = "#message", "innerHTML"
        else:
            answer = self.page(request, "base.html", notice=message)
        answer.status_code = status
        return answer


class Given(dict[str, str]):
    """The texts of a form."""

    def __init__(self, form: Form) -> None:
        super().__init__((key, str(value).strip()) for key, value in form.items())

    def __missing__(self, key: str) -> str:
        raise UserError(f"{key}: is missing in the request; reload the screen")


def _html(text: str) -> HTMLResponse:
    return HTMLResponse(text.encode("utf-8", "replace"))  # names of files need not be UTF-8


def goto(address: str) -> Response:
    """Return an answer that has htmx go to another screen."""
    return Response(status_code=204, headers={"hx-redirect": address})


def tell_changed() -> Response:
    """Return an answer that has the screen's live parts look at once what has changed."""
    return Response(status_code=204, headers={"hx-trigger": "changed"})


def url(path: str, /, **query: object) -> str:
    """Return an address with its query."""
    return f"{path}?{urlencode({key: str(value) for key, value in query.items()}, errors='replace')}" if query else path


def number(value: float | None, digits: int = 4) -> str:
    """Return a number in so many significant digits, or a dash."""
    return "–" if value is None or value != value else f"{value:.{digits}g}"


def size(nbytes: float | None) -> str:
    """Return "1.2 GiB", or a dash."""
    return "–" if nbytes is None or nbytes != nbytes else do_filesizeformat(nbytes, binary=True)


def moment(when: float | None) -> str:
    """Return "2026-11-24 17:05", in this machine's time."""
    return "–" if not when else datetime.fromtimestamp(when).strftime("%Y-%m-%d %H:%M")


def ago(when: float) -> str:
    """Return "1 h 5 min ago"; of what is new "just now", of what is older than a day, when it was."""
    past = (time.time() - when) // 60 * 60
    return "just now" if past < 60 else moment(when) if past > 86400 else duration(past).removesuffix(" 0 s") + " ago"
