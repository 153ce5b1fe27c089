"""Windows' rules on another system, for Tandem's own code: what is missing there is hidden, what it forbids raises.

    python -m tests.windows train_lora.py --config_file ...    a script under the rules
    python -m tests.windows --import_all train_lora.py ...     every module of ours imported under them first

Not Windows itself, but what a port usually falls over:

- modules and attributes that it has not (``resource``, ``fcntl``, ``signal.SIGHUP``, ``os.fork`` ...) and /proc do not
  exist, and ``sys.platform`` is win32, for code of ``library``, ``networks``, ``tools``, ``dev`` and the scripts; other
  packages have code of their own for Windows and see the system that there is;
- what is open or mapped in this process is neither renamed nor deleted, nor is the folder around it; a folder is not
  opened; only what is open for writing is flushed; there are no links; asyncio handles no signals;
- names with ``<>:"|?*``, reserved ones, and those that end with a dot or a space are refused;
- processes start by spawn, so what goes to them must pickle; text files without an encoding are an error.
"""

from __future__ import annotations

import builtins
import errno
import importlib
import io
import multiprocessing
import os
import pkgutil
import re
import runpy
import shutil
import signal
import sys
import sysconfig
import tempfile
import types
import warnings
from contextlib import suppress
from pathlib import Path, PureWindowsPath
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
OURS = re.compile(r"(library|networks|tools|dev|train_lora|train_llm|ui)(\.|$)")
MISSING_MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "posix", "crypt", "readline"}
# of the modules' documentation, "Availability: Unix", and what it says of Linux
_UNIX_SIGNALS = "SIGHUP SIGKILL SIGQUIT SIGALRM SIGUSR1 SIGUSR2 SIGPIPE SIGCHLD SIGCONT SIGSTOP SIGTSTP SIGBUS SIGTRAP"
_UNIX_CALLS = "alarm pause setitimer getitimer siginterrupt sigpending sigwait sigwaitinfo sigtimedwait pthread_kill"
_UNIX_OS = """fork forkpty getuid geteuid getgid getegid getgroups getpgid getpgrp getsid setsid setuid setgid setpgid
    killpg nice uname sysconf statvfs fstatvfs pathconf mkfifo mknod chown lchown fchown fchmod sched_getaffinity
    sched_setaffinity sched_yield pidfd_open posix_fadvise posix_fallocate pread pwrite preadv pwritev sendfile
    getloadavg wait wait3 wait4 waitid register_at_fork setxattr getxattr memfd_create openpty ttyname getrandom eventfd
    fdatasync sync chroot lockf getpriority setpriority O_NONBLOCK O_DIRECTORY O_NOFOLLOW O_CLOEXEC O_SYNC O_DSYNC"""
MISSING = {
    "signal": {*_UNIX_SIGNALS.split(), *_UNIX_CALLS.split(), "pthread_sigmask", "SIG_BLOCK"},
    "os": set(_UNIX_OS.split()),
    "sys": set(),
}
_imports_all = "--import_all" in sys.argv[1:2]
_script = sys.argv[1 + _imports_all]
_STANDARD = sysconfig.get_paths()["stdlib"]
_RESERVED = {"CON", "PRN", "AUX", "NUL", *(f"{port}{n}" for port in ("COM", "LPT") for n in range(1, 10))}


def _is_ours(frame: types.FrameType | None) -> bool:
    name = frame.f_globals.get("__name__", "") if frame else ""
    return bool(OURS.match(name)) or bool(frame and frame.f_code.co_filename == _script)


def _asked_by_us() -> bool:
    """Whether the innermost caller outside the standard library is code of ours."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame and (frame.f_code.co_filename.startswith((_STANDARD, "<frozen")) or frame.f_globals is globals()):
        if "site-packages" in frame.f_code.co_filename:
            return False
        frame = frame.f_back
    return _is_ours(frame)


class _AsOnWindows(types.ModuleType):
    def __new__(cls, name: str) -> types.ModuleType:  # type: ignore[misc]
        """Make a module as any other; the import system makes new ones of the class that ``sys`` has."""
        return types.ModuleType(name)

    def __getattribute__(self, name: str) -> Any:
        module = types.ModuleType.__getattribute__(self, "__name__")
        if module == "sys" and name == "platform" and _is_ours(sys._getframe(1)):
            return "win32"
        if name in MISSING[module] and _is_ours(sys._getframe(1)):
            raise AttributeError(f"module {module!r} has no attribute {name!r} on Windows")
        return types.ModuleType.__getattribute__(self, name)


def _without_missing_modules(original: Any) -> Any:
    def import_(name: str, *arguments: Any, **more: Any) -> Any:
        if name.split(".")[0] in MISSING_MODULES and _is_ours(sys._getframe(1)):
            raise ModuleNotFoundError(f"No module named {name!r} on Windows", name=name)
        return original(name, *arguments, **more)

    return import_


def _refuse_name(path: str) -> None:
    for part in PureWindowsPath(path).parts:
        stem = part.split(".")[0].rstrip().upper()
        if re.search(r'[<>:"|?*\x00-\x1f]', part) or (part[-1:] in (" ", ".") and part.strip(".")) or stem in _RESERVED:
            raise OSError(errno.EINVAL, "Windows has no such names", path)


def _refuse_held(path: str) -> None:
    """Raise if this process has the file, or one below the folder, open or mapped."""
    path = os.path.realpath(path)
    held = set()
    for entry in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # closed meanwhile
            held.add(str(entry.readlink()))
    with io.FileIO("/proc/self/maps") as maps:
        held |= {line.split(None, 5)[5] for line in maps.read().decode().splitlines() if line.count("/")}
    for name in held:
        if name == path or name.startswith(path + "/"):
            raise PermissionError(errno.EACCES, f"in use on Windows: {name}", path)


_in_hook = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: raises what Windows would."""
    global _in_hook
    if _in_hook or event not in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.link"):
        return
    _in_hook = True
    try:
        _judge(event, arguments)
    finally:
        _in_hook = False


def _in_tempfile() -> bool:
    """Whether it is tempfile that opens something: it says so of the folder, and then opens a file in it."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_filename != tempfile.__file__:
        frame = frame.f_back
    return frame is not None


def _judge(event: str, arguments: tuple[Any, ...]) -> None:
    paths = [os.fsdecode(path) for path in arguments[:2] if isinstance(path, str | bytes | os.PathLike)]
    if not paths or not _asked_by_us():
        return
    if event == "open":
        path, mode, flags = arguments
        if paths[0].startswith(("/proc/", "/sys/", "/dev/")) and paths[0] != os.devnull:  # NUL there
            raise FileNotFoundError(errno.ENOENT, "no such file on Windows", paths[0])
        if Path(paths[0]).is_dir() and not _in_tempfile():
            raise PermissionError(errno.EACCES, "Windows opens no folders", paths[0])
        if flags & os.O_CREAT or (mode and set(mode) & set("wax")):
            _refuse_name(paths[0])
    elif event in ("os.symlink", "os.link"):
        raise OSError(errno.EPERM, "Windows lets only administrators make links", paths[0])
    else:
        for path in paths:
            _refuse_name(path)
            if event != "os.mkdir":
                _refuse_held(path)


def _fsync(original: Any) -> Any:
    import fcntl

    def fsync(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if _asked_by_us() and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Windows flushes only what is open for writing")
        original(descriptor)

    return fsync


def _signal(original: Any) -> Any:
    known = (signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGINT, signal.SIGSEGV, signal.SIGTERM)

    def set_handler(number: int, handler: Any) -> Any:
        if number not in known and _asked_by_us():
            raise ValueError(f"Windows has no signal {number}")
        return original(number, handler)

    return set_handler


def _cdll(original: Any) -> Any:
    class Library(original):
        def __init__(self, name: Any, *arguments: Any, **more: Any) -> None:
            if name is None and _is_ours(sys._getframe(1)):
                raise TypeError("LoadLibrary() argument 1 must be str, not None")
            super().__init__(name, *arguments, **more)

    return Library


def _add_signal_handler(original: Any) -> Any:
    def add_signal_handler(loop: Any, *arguments: Any) -> None:
        if _asked_by_us():
            raise NotImplementedError
        original(loop, *arguments)

    return add_signal_handler


def _popen(original: Any) -> Any:
    def start(process: Any, *arguments: Any, creationflags: int = 0, **more: Any) -> None:
        flags = {} if creationflags and _asked_by_us() else {"creationflags": creationflags}  # what Windows alone takes
        original(process, *arguments, **more, **flags)

    return start


def obey() -> None:
    """Apply the rules to this process, for good."""
    import asyncio
    import ctypes
    import subprocess

    import accelerate  # noqa: F401  what asks for the system while it is imported
    import matplotlib.pyplot  # noqa: F401
    import torch.utils.data  # noqa: F401

    os.fsync, signal.signal = _fsync(os.fsync), _signal(signal.signal)
    process: Any = subprocess.Popen
    process.__init__ = _popen(process.__init__)
    loop: Any = asyncio.SelectorEventLoop
    loop.add_signal_handler = _add_signal_handler(loop.add_signal_handler)
    ctypes.CDLL = _cdll(ctypes.CDLL)  # type: ignore[misc]
    psutil.Process = _with_peak(psutil.Process)  # type: ignore[misc]
    builtins.__import__ = _without_missing_modules(builtins.__import__)
    for module in (os, signal, sys):
        module.__class__ = _AsOnWindows
    warnings.filterwarnings("error", category=EncodingWarning, module=r"(library|networks|tools|dev)\b")
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # what deletes folders on Windows
    tempfile.TemporaryFile = tempfile.NamedTemporaryFile  # type: ignore[misc]  # as tempfile.py has it there
    multiprocessing.set_start_method("spawn", force=True)
    sys.addaudithook(_hook)


def _with_peak(process: Any) -> Any:
    class Process(process):
        def memory_info(self) -> Any:
            info = super().memory_info()
            return types.SimpleNamespace(**info._asdict(), peak_wset=info.rss)

    return Process


def import_everything() -> int:
    """Import every module of ours; return how many."""
    names = ["train_lora", "train_llm", "ui"]
    for package in ("library", "networks", "tools", "dev"):
        folder = ROOT / package
        names += [package] if (folder / "__init__.py").exists() else []
        names += [module.name for module in pkgutil.walk_packages([str(folder)], f"{package}.")]
    not_for_everybody = ("starlette", "uvicorn", "tomlkit", "datasets", "deepspeed")
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in not_for_everybody:
                raise
    return len(names)


if __name__ == "__mp_main__":  # a process that was spawned
    obey()
if __name__ == "__main__":
    obey()
    sys.path.insert(0, str(ROOT))
    if _imports_all:
        print(import_everything())
    del sys.argv[: 1 + _imports_all]
    runpy.run_path(sys.argv[0], run_name="__main__")
