"""What holds for every test: nothing outside this machine is asked for, and chance is the same every time."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from pytest_timeout import Settings

from tests import stalls

if TYPE_CHECKING:
    from tests.cuda.device import FakeDevice

os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # gloo asks for the host's name otherwise, which a container may not know
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"  # the stand-in for the hub is here
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that needs the hub fails at once instead of waiting for it
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of compiler processes beside each test process
os.fsync = lambda descriptor: None  # it waits for what others write too, seconds at times; no test cuts the power

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Guard against a run that never ends."""
    stalls.watch(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let garbage collections pass over what has been imported: each would take 0.3 s for it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let each test begin as a process does.

    accelerate refuses a run of other precision than the one before it, dynamo more than eight variants of one function,
    and a script that was interrupted leaves a second Ctrl-C to the system.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> bool:
    """Instead of pytest-timeout's timer, which cannot fire while a test holds the interpreter's lock."""
    stalls.end_process_after(settings.timeout, item.config)
    return True


def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    """The test ended in time."""
    faulthandler.cancel_dump_traceback_later()
    return True


@pytest.fixture(scope="session")
def device() -> Iterator[FakeDevice]:
    """The fake CUDA device of this process; CI has a compiler for it (``.ci/run``)."""
    from library.errors import UserError  # not imported by the process that hands out the tests
    from tests.cuda.device import FakeDevice

    try:
        made = FakeDevice()
    except UserError as error:
        pytest.skip(str(error))
    yield made
    made.close()
