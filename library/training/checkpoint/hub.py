"""Uploading what a run saves to the Hugging Face hub, through ``huggingface_hub``.

The token comes from the environment (``HF_TOKEN``) or from ``huggingface-cli login``, never from a configuration
file, which ends up in metadata and logs. Access is checked before training starts.

One thread uploads, one path after the other. Training never waits for long: the other processes stand in a barrier
meanwhile, whose timeout (``ddp_timeout``) ends the job. With ``async_upload`` it does not wait at all, without it at
most ``_PATIENCE`` for what it has just saved. An upload that fails does not end the run: it is reported, and tried
again with the next one and at the end, where what still runs is waited for, up to a limit. What is not uploaded yet is
kept in ``uploads.json`` beside it, so that a run that is resumed after being killed uploads that too.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

from accelerate import Accelerator
from huggingface_hub import HfApi

from library.config.schema import HubConfig
from library.console import Console
from library.errors import UserError, WriteError
from library.files import write_text

_PATIENCE = 60.0  # seconds, a tenth of the default ddp_timeout
_LAST_WAIT = 3600.0  # seconds, at the end of a run of one process


def _work(queue: Queue[tuple[Callable[[], Any], Future[Any]]]) -> None:
    """Upload one after the other: the hub refuses commits to one repository at the same time."""
    while True:
        upload, future = queue.get()
        try:
            future.set_result(upload())
        except Exception as error:
            future.set_exception(error)


class HubUpload:
    """Pushes files and folders of one run into one repository."""

    def __init__(self, config: HubConfig, console: Console, journal: Path, limit: float = _LAST_WAIT) -> None:
        """Make sure that the repository exists and can be written to.

        Args:
            config: repository and options.
            console: for warnings.
            journal: file that remembers what is to be uploaded.
            limit: seconds that :meth:`finish` waits at most.

        Raises:
            UserError: no token, no right to write, or no connection.
        """
        assert config.huggingface_repo_id is not None
        self._repo, self._folder = config.huggingface_repo_id, config.huggingface_path_in_repo or ""
        self._in_background, self._console = config.async_upload, console
        self._api = HfApi()
        self._failed: list[Path] = []
        self._journal, self._noted = journal, list[Path]()
        self._running: list[tuple[Path, Future[Any]]] = []
        self._queue: Queue[tuple[Callable[[], Any], Future[Any]]] = Queue()
        self._thread: threading.Thread | None = None
        self._limit = limit
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
        try:
            saved = json.loads(self._journal.read_text(encoding="utf-8"))
            names = saved["paths"] if [saved["repo"], saved["folder"]] == [self._repo, self._folder] else []
        except (OSError, ValueError, KeyError, TypeError):
            return
        there = [path for path in (self._journal.parent / Path(str(name)).name for name in names) if path.exists()]
        self._noted, self._failed = list(there), there

    def push(self, path: Path) -> None:
        """Upload a file or folder, and what failed before."""
        self.note([path])
        self._collect(0)
        failed, self._failed = self._failed, []
        for one in dict.fromkeys([*failed, path]):
            self._start(one)
        if not self._in_background:
            self._collect(_PATIENCE)

    def finish(self) -> list[Path]:
        """Wait for running uploads, try the failed ones once more; return what is not uploaded when time is up."""
        end = time.monotonic() + self._limit
        self._collect(self._limit)
        failed, self._failed = self._failed, []
        for path in failed:
            self._start(path)
        self._collect(end - time.monotonic())
        if self._running:
            self._console.print(f"warning: uploads to {self._repo} still run after {self._limit / 60:.0f} minutes")
        return [*self._failed, *(path for path, _ in self._running)]

    def _start(self, path: Path) -> None:
        if not path.exists():  # save_last_n_steps has removed it
            self._noted = [noted for noted in self._noted if noted != path]
            return
        target, future = f"{self._folder}/{path.name}".lstrip("/"), Future[Any]()
        if path.is_dir():
            upload = partial(self._api.upload_folder, repo_id=self._repo, folder_path=path, path_in_repo=target)
        else:
            upload = partial(self._api.upload_file, repo_id=self._repo, path_or_fileobj=path, path_in_repo=target)
        self._running.append((path, future))
        self._queue.put((upload, future))
        if self._thread is None:  # a daemon: an upload that hangs keeps no process from ending
            self._thread = threading.Thread(target=_work, args=(self._queue,), daemon=True)
            self._thread.start()

    def _collect(self, seconds: float) -> None:
        """Note which uploads have ended, and which of them failed; wait at most so long for them."""
        wait([future for _, future in self._running], timeout=max(0.0, seconds))
        running, self._running = self._running, []
        for path, future in running:
            if not future.done():
                self._running.append((path, future))
            elif error := future.exception():
                reason = str(error).strip().splitlines()[0]
                self._console.print(f"warning: {path.name} was not uploaded to {self._repo} ({reason}); trying again")
                self._failed.append(path)
            else:
                self._noted = [noted for noted in self._noted if noted != path]
        self._write_journal()

    def _write_journal(self) -> None:
        """Keep the names of what is not uploaded; it lies beside the journal."""
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
    limit, handler = _LAST_WAIT, accelerator.init_handler
    if accelerator.num_processes > 1 and handler is not None and handler.timeout is not None:
        limit = min(limit, 0.8 * handler.timeout.total_seconds())  # the others wait in a barrier
    upload = HubUpload(config, console, Path(output_dir) / "uploads.json", limit)
    if resumed:
        upload.recall()
    return upload
