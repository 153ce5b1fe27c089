"""Parts of a run that processes leave alike, on two of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from library.errors import NotRestoredError
from library.processes import FailedElsewhere, agreed, from_all_processes, watched
from tests.worker_group import run_in_group


def test_all_processes_leave_a_part_alike(tmp_path: Path) -> None:
    jobs = [("parts", take_parts, ()), ("again", take_parts, ())]
    assert run_in_group(jobs, tmp_path) == {"parts": "", "again": ""}


def take_parts() -> None:
    """What two processes do; ``tests.worker_group`` runs it in each."""
    from accelerate import PartialState

    rank = PartialState(cpu=True).process_index
    left_out: list[Exception] = []
    with watched():
        assert from_all_processes([rank, "text"]) == [[0, "text"], [1, "text"]]
        with agreed("a good part"):
            pass

        def break_on(bad: int, error: Exception) -> None:
            if rank == bad:
                raise error

        with (
            pytest.raises(ValueError, match="one of 1" if rank == 1 else r"a part failed on process 1 \(.*one of 1\)"),
            agreed("an outer part"),
            agreed("a part"),
        ):
            break_on(1, ValueError("one of 1"))

        with agreed("an optional part", left_out.append):
            break_on(0, KeyError("one of 0"))
        (error,) = left_out
        assert isinstance(error, KeyError if rank == 0 else FailedElsewhere)
        assert str(error) == (
            "'one of 0'" if rank == 0 else "an optional part failed on process 0 (KeyError: 'one of 0')"
        )

        with (
            pytest.raises(NotRestoredError if rank == 0 else FailedElsewhere),
            agreed("an optional part that is not put back", left_out.append),
        ):
            break_on(0, NotRestoredError("half of it is changed"))
        assert len(left_out) == 1


def test_a_process_that_is_alone_agrees_with_itself() -> None:
    left_out: list[Exception] = []
    with watched(), agreed("a part", left_out.append):
        raise KeyError("x")
    assert [type(error) for error in left_out] == [KeyError]
    with pytest.raises(KeyError), agreed("a part"):
        raise KeyError("y")
    assert from_all_processes(1) == [1]
