"""Uploading what a run saves to the Hugging Face hub, through ``huggingface_hub``.

The token comes from the environment (``HF_TOKEN``) or from ``huggingface-cli login``, never from a configuration
file, which ends up in metadata and logs. Access is checked before training starts. An upload that fails later does
not end the run: it is told, and tried again with the next one and at the end.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi
from rich.console import Console

from library.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator

    from library.config.schema import HubConfig


class HubUpload:
    """Pushes files and folders of one run into one repository."""

    def __init__(self, config: HubConfig, console: Console) -> None:
        """Make sure that the repository exists and can be written to.

        Raises:
            UserError: no token, no right to write, or no connection.
        """
        assert config.huggingface_repo_id is not None
        self._repo, self._folder = config.huggingface_repo_id, config.huggingface_path_in_repo or ""
        self._in_background, self._console = config.async_upload, console
        self._api = HfApi()
        self._waiting: list[Path] = []
        self._running: list[tuple[Path, Future[Any]]] = []
        try:
            private = config.huggingface_repo_visibility == "private"
            self._api.create_repo(self._repo, private=private, exist_ok=True)
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"huggingface_repo_id: {self._repo} cannot be written to ({reason}); set HF_TOKEN to a token with "
                "write access, or remove the key"
            ) from error

    def push(self, path: Path) -> None:
        """Upload a file or folder, and what failed before."""
        self._collect()
        for waiting in [*self._waiting, path]:
            self._start(waiting)
        self._waiting = []
        if not self._in_background:
            self._collect()

    def finish(self) -> list[Path]:
        """Wait for running uploads, try the failed ones once more; return what is still not uploaded."""
        self._collect()
        failed, self._waiting = self._waiting, []
        for path in failed:
            self._start(path)
        self._collect()
        return self._waiting

    def _start(self, path: Path) -> None:
        target = f"{self._folder}/{path.name}".lstrip("/")
        future: Future[Any]
        if path.is_dir():
            future = self._api.upload_folder(
                repo_id=self._repo, folder_path=path, path_in_repo=target, run_as_future=True
            )
        else:
            future = self._api.upload_file(
                repo_id=self._repo, path_or_fileobj=path, path_in_repo=target, run_as_future=True
            )
        self._running.append((path, future))

    def _collect(self) -> None:
        """Wait for the running uploads; note those that failed."""
        for path, future in self._running:
            if error := future.exception():
                reason = str(error).strip().splitlines()[0]
                self._console.print(f"warning: {path.name} was not uploaded to {self._repo} ({reason}); trying again")
                self._waiting.append(path)
        self._running = []


def build_upload(config: HubConfig, accelerator: Accelerator, console: Console) -> HubUpload | None:
    """Return the run's upload on its main process, or None where none is wanted."""
    if config.huggingface_repo_id is None or not accelerator.is_main_process:
        return None
    return HubUpload(config, console)
