"""The page: train, watch, compare, label, check and talk in the browser, on this machine.

    python ui.py
    python ui.py --output_dir output /disk/runs --folders /my/images /my/models
    python ui.py --host 0.0.0.0                    # for other machines; asks for the token that it prints

Runs are shown from the output folders; data, models and configurations from those and from --folders. Nothing else is
read or written. What was begun goes on when the browser or this program is closed.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path

from library.errors import UserError, exit_on_user_error
from tools.command import tool_parser, whole

_USUAL = ("configs", "assets", "datasets", "models")  # of the working directory, where they are


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = tool_parser(__doc__)
    parser.add_argument("--port", type=whole(least=0, most=65535), default=7860, help="0: a free one (default: 7860)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument(
        "--output_dir", nargs="+", default=["output"], metavar="DIR", help="folders of runs (default: output)"
    )
    parser.add_argument(
        "--folders", nargs="+", default=[], metavar="DIR", help=f"of data and models, besides {', '.join(_USUAL)} here"
    )
    parser.add_argument("--open", action="store_true", help="show the page in the browser of this machine")
    return parser


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raises a UserError if the address is taken or not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)  # whoever reads the address may come before uvicorn does
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror or error}; choose another --port") from None
    return listening


@exit_on_user_error
def main() -> None:
    """Start the server and print its address."""
    options = parser().parse_args()
    try:
        from library.web.access import AllowedRoots
        from library.web.app import create_app
        from library.web.connections import run_server
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "starlette", "multipart", "python_multipart"):
            raise
        raise UserError(
            f"the page needs {error.name}; run make setup-web, or pip install -r requirements/web.txt"
        ) from None
    with suppress(OSError):
        Path("datasets").mkdir(exist_ok=True)  # new ones are put there
    usual = [name for name in _USUAL if Path(name).is_dir()]
    roots = AllowedRoots.of(options.output_dir, [*usual, *options.folders])
    listening = listen(options.host, options.port)
    port = listening.getsockname()[1]
    is_private = options.host in ("127.0.0.1", "localhost", "::1")
    token = None if is_private else secrets.token_urlsafe(24)
    shown = f"[{options.host}]" if ":" in options.host else options.host
    app = create_app(roots, port, token)
    address = f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
    print(address, flush=True)
    has_screen = sys.platform in ("win32", "darwin") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if options.open and has_screen:  # else a browser for terminals might take this one
        webbrowser.open(address)
    print("Ctrl-C ends the page; jobs that it began go on.", file=sys.stderr)
    run_server(app, listening)


if __name__ == "__main__":
    main()
