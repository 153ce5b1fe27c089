"""Uploading what a run saves to the Hugging Face hub, through ``huggingface_hub``.

The token comes from the environment (``HF_TOKEN``) or from ``huggingface-cli login``, never from a configuration
file, which ends up in metadata and logs. Access is checked before training starts. An upload that fails later does
not end the run: it is told, and tried again with the next one and at the end. What is not uploaded yet is kept in
``uploads.json`` beside it, so that a run that goes on after being killed uploads that too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi
from rich.console import Console

from library.errors import UserError, WriteError
from library.files import write_text

if TYPE_CHECKING:
    from accelerate import Accelerator

    from library.config.schema import HubConfig


class HubUpload:
    """Pushes files and folders of one run into one repository."""

    def __init__(self, config: HubConfig, console: Console, journal: Path | None = None) -> None:
        """Make sure that the repository exists and can be written to.

        ``journal`` is the file that remembers what is to be uploaded; None for none.

        Raises:
            UserError: no token, no right to write, or no connection.
        """
        assert config.huggingface_repo_id is not None
        self._repo, self._folder = config.huggingface_repo_id, config.huggingface_path_in_repo or ""
        self._in_background, self._console = config.async_upload, console
        self._api = HfApi()
        self._waiting: list[Path] = []
        self._journal, self._noted = journal, list[Path]()
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

    def note(self, paths: Iterable[Path]) -> None:
        """Remember that ``paths`` are going to be uploaded."""
        self._noted += [path for path in paths if path not in self._noted]
        self._write_journal()

    def recall(self) -> None:
        """Take up what an interrupted run had still to upload to the same place, and is there."""
        if self._journal is None:
            return
        try:
            saved = json.loads(self._journal.read_text(encoding="utf-8"))
            names = saved["paths"] if [saved["repo"], saved["folder"]] == [self._repo, self._folder] else []
        except (OSError, ValueError, KeyError, TypeError):
            return
        there = [path for path in (self._journal.parent / Path(str(name)).name for name in names) if path.exists()]
        self._noted, self._waiting = list(there), there

    def push(self, path: Path) -> None:
        """Upload a file or folder, and what failed before."""
        self.note([path])
        self._collect()
        for waiting in dict.fromkeys([*self._waiting, path]):
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
        if not path.exists():  # save_last_n_steps has removed it
            self._noted = [noted for noted in self._noted if noted != path]
            return
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
            else:
                self._noted = [noted for noted in self._noted if noted != path]
        self._running = []
        self._write_journal()

    def _write_journal(self) -> None:
        """Keep the names of what is not uploaded; it lies beside the journal."""
        if self._journal is None:
            return
        names = [path.name for path in self._noted if path.parent == self._journal.parent]
        with suppress(WriteError):  # it only helps after a crash
            if names:
                content = {"repo": self._repo, "folder": self._folder, "paths": names}
                write_text(self._journal, json.dumps(content, indent=1) + "\n")
            else:
                self._journal.unlink(missing_ok=True)


def build_upload(
    config: HubConfig, accelerator: Accelerator, console: Console, output_dir: str, resumed: bool
) -> HubUpload | None:
    """Return the run's upload on its main process, or None where none is wanted.

    A ``resumed`` run takes up what the one before had still to upload.
    """
    if config.huggingface_repo_id is None or not accelerator.is_main_process:
        return None
    upload = HubUpload(config, console, Path(output_dir) / "uploads.json")
    if resumed:
        upload.recall()
    return upload
