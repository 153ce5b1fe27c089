"""The moments at which a run can be killed, counted in the process that is to be killed.

A point lies before every change to the run's folders (a file opened to be written, flushed, renamed, deleted, a folder
made or removed), amid the writing of a safetensors file, before and after every optimizer step, before every backward
pass and around every upload. The n-th one of a phase kills the process with SIGKILL, which nothing can catch.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree")  # audit events


PHASES = {  # the first whose mark is in a point's label
    "taking and giving back the folder": (".lock",),
    "caching": (".tandem_cache",),
    "uploading": ("upload", "hub"),
    "saving a state": ("-state",),
    "a training step": ("step: ",),
    "sampling": ("samples",),
    "saving a LoRA or model": (".safetensors", "output/.model", "output/.lora"),
    "plots, metrics and settings": ("",),
}


def phase(label: str) -> str:
    """Return what a run is doing at a point."""
    return next(name for name, marks in PHASES.items() if any(mark in label for mark in marks))


class Points:
    """Counts points in this process; kills it at the n-th (from 1) of a phase, ``kill_at``, or never.

    ``note`` is told which point that was.
    """

    def __init__(self, root: Path, kill_at: tuple[str, int] | None, note: Path) -> None:
        self.root, self.kill_at, self.process = str(root), kill_at, os.getpid()
        self.note = note
        self._of_phase: Counter[str] = Counter()
        self.passed: list[str] = []

    def here(self, label: str) -> None:
        """Pass a point."""
        if os.getpid() != self.process:  # a data loader's worker
            return
        self.passed.append(label)
        self._of_phase[phase(label)] += 1
        if self.kill_at == (phase(label), self._of_phase[phase(label)]):
            self.kill_at = None  # writing the note is no point
            self.note.write_text(label)
            os.kill(self.process, signal.SIGKILL)

    def watch(self) -> None:
        """Count from now on."""
        sys.addaudithook(self._audit)
        self._wrap_flushing()
        self._wrap_training()
        self._wrap_hub()

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) if isinstance(flags, int) else False
            if not (writes or (isinstance(mode, str) and set(mode) & set("wax+"))):
                return
        elif event in _CHANGES:
            path = arguments[0]
            if isinstance(path, (str, os.PathLike)) and Path(path).exists() == (event == "os.mkdir"):
                return  # there already, or gone already: nothing changes
        else:
            return
        if isinstance(path, (str, os.PathLike)) and str(path).startswith(self.root):
            self.here(f"{event} {os.path.relpath(path, self.root)}")

    def _wrap_flushing(self) -> None:
        import library.safetensors_io

        flush, stream = os.fsync, library.safetensors_io.stream_safetensors

        def fsync(descriptor: int) -> None:
            self.here(f"os.fsync {os.path.relpath(Path(f'/proc/self/fd/{descriptor}').readlink(), self.root)}")
            flush(descriptor)

        def halfway(
            path: Path, layout: Any, produce: Callable[[str], Any], metadata: Any = None, checked: bool = False
        ) -> None:
            middle = list(layout)[len(layout) // 2] if len(layout) > 2 else None

            def produce_or_die(name: str) -> Any:
                if name == middle:
                    self.here(f"half written {os.path.relpath(path, self.root)}")
                return produce(name)

            stream(path, layout, produce_or_die, metadata, checked)

        os.fsync = fsync
        library.safetensors_io.stream_safetensors = halfway

    def _wrap_training(self) -> None:
        from accelerate import Accelerator
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(lambda *_: self.here("step: begins"))
        register_optimizer_step_post_hook(lambda *_: self.here("step: ends"))
        backward = Accelerator.backward

        def backward_or_die(accelerator: Accelerator, loss: Any, **more: Any) -> None:
            self.here("step: backward")
            backward(accelerator, loss, **more)

        Accelerator.backward = backward_or_die

    def _wrap_hub(self) -> None:
        """Put a folder in the place of the Hugging Face hub."""
        import library.training.checkpoint.hub

        library.training.checkpoint.hub.HfApi = lambda: FolderHub(Path(self.root) / "hub", self.here)


class FolderHub:
    """What ``library.training.checkpoint.hub`` asks of ``huggingface_hub.HfApi``, with a folder for a repository."""

    def __init__(self, folder: Path, point: Callable[[str], None]) -> None:
        self._folder, self._point = folder, point
        self._pool = ThreadPoolExecutor(1)

    def create_repo(self, name: str, **_: object) -> None:
        self._folder.mkdir(exist_ok=True)

    def upload_file(self, path_or_fileobj: Path, path_in_repo: str, **_: object) -> Future[None]:
        return self._pool.submit(self._store, path_in_repo, {"": path_or_fileobj})

    def upload_folder(self, folder_path: Path, path_in_repo: str, **_: object) -> Future[None]:
        return self._pool.submit(self._store, path_in_repo, {file.name: file for file in folder_path.iterdir()})

    def _store(self, target: str, files: Mapping[str, Path]) -> None:
        """Commit all files at once, as the hub does."""
        self._point(f"upload begins {target}")
        content = b"".join(name.encode() + file.read_bytes() for name, file in sorted(files.items()))
        (self._folder / target).write_bytes(content)
        self._point(f"upload ends {target}")
