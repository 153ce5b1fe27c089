"""The processes of one job: an error is shown once, and none outlives the others.

A process that dies leaves the others waiting in an exchange that never comes. gloo notices the closed connection;
NCCL's kernels, and a main process that is writing or drawing meanwhile, do not. The launcher then asks them to end by
SIGTERM, which a training run takes for a request to save after the step that it never finishes, and half a minute
later by SIGKILL. So while a run listens to signals, ``watched`` looks at the processes of the same machine; those of
others are told by their connections.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING

from library.errors import UserError, one_line
from library.files import machine_name

if TYPE_CHECKING:  # heavy: a script imports them when its configuration is complete
    from accelerate import Accelerator
    from torch.distributed import Store

GRACE = 10.0  # seconds in which a process may end by itself after another has
# what gloo and NCCL say when the other end of a connection is gone
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")


def one_of_several(main: Callable[[], None]) -> Callable[[], None]:
    """Decorate a script's ``main`` that may run in several processes; alone it runs as it is.

    An error that all have is said by one. The traceback of any other goes to the launcher too, which names the
    process that was first. A process that only lost another says so in a line and leaves the rest to that one.
    """

    @wraps(main)
    def wrapped() -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            main()
            return
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        handler = get_error_handler()
        handler.initialize()
        if os.environ.get("RANK", "0") != "0":  # what one says is enough
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
        try:
            main()
        except UserError as error:
            if _is_said_already(one_line(error)):
                raise SystemExit(2) from None
            raise
        except KeyboardInterrupt:
            if os.environ.get("RANK", "0") != "0":
                raise SystemExit(130) from None
            raise
        except Exception as error:
            # an upload's lost connection is no RuntimeError
            if not (isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST)):
                handler.record_exception(error)
                raise
            rank = os.environ.get("RANK", "?")
            print(f"process {rank}: lost another process, whose error is the one to read ({_last_line(error)})",
                  file=sys.stderr, flush=True)  # fmt: skip
            time.sleep(GRACE)  # the launcher takes the first that ends for the one that failed
            raise SystemExit(1) from None

    return wrapped


def _last_line(error: Exception) -> str:
    text = str(error).strip().rpartition("\n")[2]
    return next(lost for lost in _LOST if lost in str(error)) if len(text) > 200 else text


def _is_said_already(message: str) -> bool:
    """Whether another process of this job has been asked about ``message``; where nobody knows, it has not."""
    try:
        store = _store()
        if store is None:
            return False
        rank, attempt = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return store.compare_set(f"tandem/said/{attempt}/{message}", "", rank).decode() != rank
    except (RuntimeError, ValueError, OSError):
        return False


def _store() -> Store | None:
    """Return what the processes can leave notes in: that of their group, or before there is one torchrun's."""
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=GRACE))


@contextmanager
def watched(accelerator: Accelerator) -> Iterator[None]:
    """End this process if another of this machine ends while the block runs; every process enters it.

    The other may have an error that this one is about to find too, so it gets ``GRACE`` seconds for that.
    """
    if accelerator.num_processes == 1 or not hasattr(os, "pidfd_open"):
        yield
        return
    from accelerate.utils import gather_object

    machine, own = machine_name(), (accelerator.process_index, os.getpid())
    ranks: dict[int, int] = {}  # by a file of which the kernel tells when the process has ended
    for where, rank, pid in gather_object([(machine, *own)]):
        if where == machine and (rank, pid) != own:
            with suppress(ProcessLookupError):  # gone already: its connections tell
                ranks[os.pidfd_open(pid)] = rank
    stopped, (wake, woken) = threading.Event(), os.pipe()

    def wait() -> None:
        ready, _, _ = select.select([wake, *ranks], [], [])
        gone = [ranks[file] for file in ready if file in ranks]
        if not gone or stopped.wait(GRACE):
            return
        print(f"error: process {gone[0]} has ended in the middle of the run; its own error is the one to read",
              file=sys.stderr, flush=True)  # fmt: skip
        os._exit(1)  # the main thread waits for what will not come

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        os.write(woken, b"x")
        thread.join()
        for file in (wake, woken, *ranks):
            os.close(file)
