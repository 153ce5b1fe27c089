"""Placeholder."""

from __future__ import annotations

from library.web.site import Handler

ROUTES: dict[str, Handler | tuple[Handler | None, Handler]] = {}
