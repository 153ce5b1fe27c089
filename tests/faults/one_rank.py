"""train_lora.py, of whose processes one fails at a given point: started by tests, once for each process.

``FAULT`` is JSON: ``rank`` of the process that fails; ``inside`` and ``at``, two functions as ``module:name.name``;
``call``: the so-manieth call of ``at`` within ``inside`` (null: anywhere) fails; ``error``: ``bug``, ``memory``,
``disk``, ``interrupt``, or ``stuck``: as ``disk``, but the process ends only when there is a file ``end``. With
``late`` it does not fail, and is five seconds late. With ``disk_full`` nothing that it saves can be written. The file
``failed`` in the working folder tells when it failed.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from library.errors import WriteError
from train_lora import main

fault = json.loads(os.environ["FAULT"])
depth, calls = 0, 0
ERRORS: dict[str, Callable[[], BaseException]] = {
    "bug": lambda: ValueError("the part breaks here"),
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    "disk": lambda: WriteError("/full", "No space left on device"),
    "interrupt": KeyboardInterrupt,
}
ERRORS["stuck"] = ERRORS["disk"]


def fail() -> None:
    """Raise the error, or be late."""
    Path("failed").touch()
    if fault["error"] == "late":
        time.sleep(5)
        return
    raise ERRORS[fault["error"]]()


def at(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*arguments: Any, **more: Any) -> Any:
        global calls
        if depth or fault["inside"] is None:
            calls += 1
            if calls == fault["call"]:
                fail()
        return function(*arguments, **more)

    return wrapped


def inside(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*arguments: Any, **more: Any) -> Any:
        global depth
        depth += 1
        try:
            return function(*arguments, **more)
        finally:
            depth -= 1

    return wrapped


def unwritable(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*_arguments: Any, **_more: Any) -> Any:
        raise ERRORS["disk"]()

    return wrapped


def wrap(place: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let a wrapper stand in a function's place."""
    module, _, names = place.partition(":")
    *path, name = names.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module))
    setattr(owner, name, wrapper(getattr(owner, name)))


fails = os.environ["RANK"] == str(fault["rank"])
if fails:
    if fault["inside"] is not None:
        wrap(fault["inside"], inside)
    wrap(fault["at"], at)
    if fault["disk_full"]:
        wrap("library.training.tasks.lora:LoraTask.save", unwritable)
try:
    main()
finally:
    while fails and fault["error"] == "stuck" and not Path("end").exists():
        time.sleep(0.1)
