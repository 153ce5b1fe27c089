"""The fake device of a test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from library.errors import UserError
from library.training.memory.fake_cuda import library_path
from tests.cuda.device import FakeDevice


@pytest.fixture(scope="session")
def device() -> Iterator[FakeDevice]:
    """Return the device, of this process; CI has a compiler for it (``.ci/run``)."""
    try:
        library_path()
    except UserError as error:
        pytest.skip(str(error))
    made = FakeDevice()
    yield made
    made.close()
