"""Placeholder."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from library.web.site import Form, Handler, Site


def show(site: Site, request: Request, form: Form) -> Response:
    """Show."""
    return site.page(request, "base.html", title="Runs")


ROUTES: dict[str, Handler | tuple[Handler | None, Handler]] = {"/": show}
