"""The processes of one job: what happens to one happens to all, and its cause is said once.

A process that fails leaves the others waiting in an exchange that never comes. gloo notices the closed connection when
the process has ended; NCCL's kernels do not, nor does a main process that is writing or drawing. The launcher then asks
the others to end by SIGTERM, which a training run takes for a request to save after the step that it never finishes,
and half a minute later by SIGKILL. And a process that catches its own error goes on alone, into exchanges that the
others are not in. Two things prevent that, and both need no exchange of tensors, only notes in the store of the group:

``watched`` goes around a run. A process that leaves it with an error rings an alarm: it leaves a note in the store. A
thread of every other process looks for that note once a second. The others may be about to find the same error, so they
get half a minute, and then the thread ends them, whatever their main thread waits for. Any error of the run is covered
by this, in the middle of a step too. A process that is killed leaves no note; the launcher ends the others then.

``agreed`` goes around a part of the run that ends with all processes in one place. They vote there: each writes whether
its part went well, and waits for the others' votes. If one failed, all leave the part with an error, the one that
failed with its own. Where the run can do without the part, all go on instead. This works only if every process reaches
the vote: if one failed between two collectives, the others wait inside one, where no vote can reach them. After
``_PATIENCE`` seconds it gives up waiting for them and raises its error, which ends the run. No collective can be taken
back: so what is likely to fail in an optional part, such as writing a file, belongs behind its last collective.

A vote has no time limit of its own, unlike a collective (``ddp_timeout``): one process may write for an hour.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any

from library.errors import NotRestoredError, UserError, one_line, reason_of

if TYPE_CHECKING:  # heavy: a script imports them when its configuration is complete
    from torch.distributed import Store

GRACE = 10.0  # seconds in which a process may end by itself after another has
_PATIENCE = 20.0  # seconds in which a process that failed in an optional part waits for the others' votes
_POLL = 1.0  # seconds between two checks for an alarm
_UNWATCHED = 3600.0  # seconds to wait for a vote where no thread would notice that the others have ended
# what gloo, NCCL and the store say when the other end of a connection is gone
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "Connection was likely closed",
    "it had failed",  # as that process has said itself
)

_VOTED_ON = "is_voted_on"  # attribute of an error that other processes know of


class FailedElsewhere(UserError):
    """A part of the run failed on another process, which says why; ``exit_code`` is what that process ends with."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


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
        except FailedElsewhere as error:
            _let_it_end_first()
            raise SystemExit(error.exit_code) from None
        except UserError as error:
            if _is_printed_already(one_line(error)):
                raise SystemExit(2) from None
            raise
        except KeyboardInterrupt:
            if os.environ.get("RANK", "0") != "0":
                raise SystemExit(130) from None
            raise
        except Exception as error:
            if not _is_lost_connection(error):
                handler.record_exception(error)
                raise
            rank = os.environ.get("RANK", "?")
            line = f"process {rank}: lost another process, whose error is the one to read ({_last_line(error)})"
            print(line, file=sys.stderr, flush=True)
            _let_it_end_first()
            raise SystemExit(1) from None

    return wrapped


def _let_it_end_first() -> None:
    """Wait for the process that failed: torchrun takes the first that ends for the one, and ends the others itself."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(GRACE)


def _is_lost_connection(error: BaseException) -> bool:
    """Whether the error says that another process is gone; an upload's lost connection is no RuntimeError."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST)


def _last_line(error: Exception) -> str:
    text = str(error).strip().rpartition("\n")[2]
    return next(lost for lost in _LOST if lost in str(error)) if len(text) > 200 else text


def _is_printed_already(message: str) -> bool:
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
    if _current is not None and _current.group is None:
        return _current.store
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=GRACE))


class _Notes:
    """What the processes of a group leave for each other in its store.

    Attributes:
        group: that they belong to.
        votes: how many votes this process has given.
        settled: how many of them have everybody's answer.
        runs: how many runs were watched.
        is_watched: whether one is now.
        heard: the exit code of another process that has left this one; the store may be gone with it.
    """

    heard: int | None = None

    def __init__(self, group: Any, store: Store, rank: int, processes: int) -> None:
        self.group, self.rank = group, rank
        self.votes, self.settled, self.runs, self.is_watched = 0, 0, 0, False
        self.store, self._processes = store, processes
        # for the watching thread: the other connection may be taken by a call that waits
        self._second_connection: Store = store.clone()  # type: ignore[attr-defined]

    def vote(self, value: Any, patience: float | None = None) -> list[Any] | None:
        """Return every process's ``value`` (JSON) by rank; None if some have not come after ``patience`` seconds."""
        self.cast(value)
        keys = [self._key(self.votes - 1, rank) for rank in range(self._processes)]
        limit = patience if patience is not None else float("inf") if self.is_watched else _UNWATCHED
        pause, until = 0.001, time.monotonic() + limit
        # A waiting call of the store would be cheaper. Its time limit is reported as a warning, with a stack.
        while self.heard is not None or not self.store.check(keys):
            if self.heard is not None:
                raise RuntimeError(_LOST[-1])
            if time.monotonic() > until:
                if patience is None:
                    raise RuntimeError(f"some of {self._processes} processes are still missing after {limit:.0f} s")
                return None
            time.sleep(pause)
            pause = min(1.5 * pause, 0.1)
        values = [json.loads(value) for value in self.store.multi_get(keys)]
        self.settled = self.votes
        if self.votes > 1:  # all have voted here, so all have read the votes before
            self.store.delete_key(self._key(self.votes - 2, self.rank))
        return values

    def cast(self, value: Any) -> None:
        """Give this process's vote, without waiting for the others'."""
        self.store.set(self._key(self.votes, self.rank), json.dumps(value))
        self.votes += 1

    def _key(self, number: int, rank: int) -> str:
        return f"tandem/vote/{number}/{rank}"

    def ring(self, exit_code: int, vote: int | None = None) -> None:
        """Tell the others that this process has failed: before ``vote``, which they may come to, or in any case."""
        self.store.set(f"tandem/alarm/{self.runs}", json.dumps([self.rank, exit_code, vote]))

    def leave(self, patience: float = GRACE) -> None:
        """Let the main process leave last: without a launcher's store it has that of all."""
        key, until = f"tandem/left/{self.runs}", time.monotonic() + patience
        left = self.store.add(key, 1)
        while self.rank == 0 and left < self._processes and time.monotonic() < until:
            time.sleep(0.01)
            left = self.store.add(key, 0)

    def alarm(self) -> int | None:
        """Return the exit code of another process that has failed, None if there is none; the watching thread asks."""
        key = f"tandem/alarm/{self.runs}"
        if self.heard is not None:
            return self.heard
        if not self._second_connection.check([key]):
            return None
        rank, exit_code, vote = json.loads(self._second_connection.get(key))
        if rank == self.rank or (vote is not None and self.settled > vote):
            return None
        self.heard = exit_code if vote is None else None
        return int(exit_code)


_current: _Notes | None = None


def join(minutes: float) -> bool:
    """Let the processes of a job leave notes before they are a group; return whether they do so from now on.

    Args:
        minutes: to wait for the others. A process that is alone, or in a group already, does not.

    Raises:
        UserError: a process was started as one of another number.
    """
    global _current
    import torch.distributed as dist

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or not dist.is_available() or dist.is_initialized() or "MASTER_PORT" not in os.environ:
        return False
    # the store that the group is going to have; "1" lets it wait for nobody
    store, rank, _ = next(dist.rendezvous("env://?world_size=1", timeout=timedelta(minutes=minutes)))
    store.set(f"tandem/world/{rank}", str(world))
    for other in range(world):
        if (theirs := int(store.get(f"tandem/world/{other}"))) != world:
            time.sleep(_POLL)  # the others have to read it too
            raise UserError(
                f"process {other} was started as one of {theirs}, another as one of {world}; start all with the same "
                "number of processes and machines (torchrun --nproc-per-node, --nnodes)"
            )
    _current = _Notes(None, store, rank, world)
    return True


def _notes() -> _Notes | None:
    """Return what this process and others can leave notes in, None if it is alone."""
    global _current
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return _current if _current is not None and _current.group is None else None
    if dist.get_world_size() == 1:
        return None
    if _current is None or _current.group is not dist.group.WORLD:
        store = dist.distributed_c10d._get_default_store()
        _current = _Notes(dist.group.WORLD, store, dist.get_rank(), dist.get_world_size())
    return _current


def from_all_processes(value: Any) -> list[Any]:
    """Return every process's ``value`` (JSON) in the order of their ranks; all processes call it."""
    notes = _notes()
    if notes is None:
        return [value]
    values = notes.vote(value)
    assert values is not None, "without patience there is an answer, or an error"
    return values


@contextmanager
def agreed(what: str, otherwise: Callable[[Exception], None] | None = None) -> Iterator[None]:
    """Leave the block on all processes alike: with an error on each if it failed on one; every process enters it.

    Args:
        what: names the part in the other processes' error.
        otherwise: makes the part optional. It is called on every process instead of raising the error, the process's
            own or a :class:`FailedElsewhere`. A process that is alone has it called too. A part that could not put
            back what it changed (:class:`NotRestoredError`) is not optional.

    Raises:
        FailedElsewhere: the block failed on another process.
        Exception: its own, also of an optional part whose end the other processes do not come to.
    """
    notes, error = _notes(), None
    try:
        yield
    except Exception as found:
        if _is_lost_connection(found) or getattr(found, _VOTED_ON, False):  # in a part within this one
            raise
        error = found
    is_fatal = otherwise is None or isinstance(error, NotRestoredError)
    failed = [] if error is None else [(0, _describe(error, is_fatal))]
    if notes is not None:
        votes: list[Any] | None = None
        if error is None:
            votes = notes.vote(None)
        else:
            with suppress(RuntimeError):  # the process that has the store is gone: its own error is still to be said
                notes.ring(_exit_code(error), notes.votes)
                votes = notes.vote(failed[0][1], _POLL if is_fatal else _PATIENCE)
            if votes is None:
                setattr(error, _VOTED_ON, True)
                raise error
        assert votes is not None
        failed = [(rank, vote) for rank, vote in enumerate(votes) if vote is not None]
    if not failed:
        return
    rank, (exit_code, reason, _) = failed[0]
    error = error or FailedElsewhere(f"{what} failed on process {rank} ({reason})", exit_code)
    if otherwise is None or any(fatal for _, (_, _, fatal) in failed):
        if notes is not None:
            with suppress(RuntimeError):  # another has gone already
                notes.leave()
        setattr(error, _VOTED_ON, True)
        raise error
    otherwise(error)


def _describe(error: Exception, is_fatal: bool) -> tuple[int, str, bool]:
    """Return what the other processes are told: the exit code, the reason, and whether no process may go on."""
    reason = one_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {reason_of(error)}"
    return _exit_code(error), reason, is_fatal


def _exit_code(error: BaseException) -> int:
    """Return what a script ends with whose ``main`` raises ``error``."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return 2 if isinstance(error, (UserError, NotRestoredError)) else 130 if isinstance(error, KeyboardInterrupt) else 1


@contextmanager
def watched() -> Iterator[None]:
    """End this process if another one fails while the block runs; every process enters it."""
    notes = _notes()
    if notes is None:
        yield
        return
    notes.runs, notes.heard = notes.runs + 1, None
    stopped = threading.Event()
    thread = threading.Thread(target=_watch, args=(notes, stopped), daemon=True)
    thread.start()
    notes.is_watched = True
    try:
        yield
    except BaseException as error:
        if not isinstance(error, FailedElsewhere) and not _is_lost_connection(error):
            with suppress(RuntimeError):  # the process that has the store is gone
                notes.ring(_exit_code(error))
                if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                    notes.leave(2 * _POLL)  # when all have heard it, none asks the store any more
        raise
    else:
        notes.leave()
    finally:
        notes.is_watched = False
        stopped.set()
        thread.join(GRACE)  # it may ask a store that does not answer


def _watch(notes: _Notes, stopped: threading.Event) -> None:
    """End this process if another one has failed and this one does not end by itself before ``stopped``."""
    alarm, since = None, 0.0
    while not stopped.wait(_POLL):
        before = alarm
        with suppress(RuntimeError):  # the store is gone; the connections of the process that had it tell
            alarm = notes.alarm()
        since = time.monotonic() if before is None else since
        if alarm is not None and time.monotonic() - since > GRACE + _PATIENCE:
            print("error: another process has failed; its own error is the one to read", file=sys.stderr, flush=True)
            os._exit(alarm or 1)  # the main thread waits for what will not come
