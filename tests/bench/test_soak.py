"""A run of thousands of steps holds what it held after the first hundreds."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from bench.soak import quarters, soak


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_memory_and_open_files_stay_where_they_are(tmp_path: Path) -> None:
    before, after = quarters(soak(tmp_path, 3000))
    assert len(before) > 10
    assert len(after) > 10
    # A reading may fall into a moment in which data workers start, more often on a busy machine: a leak only grows.
    assert median(r.files for r in after) <= median(r.files for r in before)
    assert max(r.files for r in after) <= max(r.files for r in before) + 4  # files open for a moment
    for part in ("memory", "workers"):
        growth = median(getattr(r, part) for r in after) - median(getattr(r, part) for r in before)
        assert growth < 16 * 2**20, f"{part} grew by {growth / 2**20:.1f} MiB"  # 1500 steps of a leak of 11 KiB each
