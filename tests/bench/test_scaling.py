"""Cost as work grows: what is started is found cached in full, rows become ratios and plots, a quick run runs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

import bench.scaling as scaling
from bench.families import Sizes
from bench.scaling import Point
from bench.startup import start, write_cached_dataset
from library.data.cache import readable_files


def test_a_synthetic_cache_is_taken_for_a_complete_one(tmp_path: Path) -> None:
    toml = write_cached_dataset(tmp_path / "data", 20)
    folder = tmp_path / "data" / "images" / ".tandem_cache"
    names = {kind: readable_files(folder / kind) for kind in ("latents", "text")}
    assert {kind: len(found) for kind, found in names.items()} == {"latents": 20, "text": 20}
    # an image is an empty file: opening it would end the start, encoding it or a caption would leave another file
    index = (folder / "index.json").read_bytes()
    found = start(toml, tmp_path / "out")
    assert {kind: readable_files(folder / kind) for kind in ("latents", "text")} == names
    assert (folder / "index.json").read_bytes() == index
    assert found["start_s"] >= found["read_s"] + found["cache_s"] > 0


def test_points_grow_one_number_at_a_time() -> None:
    base, *others = scaling.POINTS
    for point in others:
        same = replace(point, axis="base", **{key: getattr(base, key) for key in _keys(point.axis)})
        assert same == base
        assert point != replace(base, axis=point.axis)


def _keys(axis: str) -> tuple[str, ...]:
    return ("rows", "columns") if axis == "tokens" else (axis,)


ROWS = [
    {"axis": axis, "rows": 4, "columns": 4 * (1 + (axis == "tokens")), "batch": 1, "rank": 4, "trainer": trainer,
     "step_s": step, "added_mib": mib}
    for axis, trainer, step, mib in (
        ("base", "tandem", 1.0, 30.0), ("base", "peft", 2.0, 40.0), ("tokens", "tandem", 3.0, 50.0),
        ("tokens", "peft", 4.0, 80.0),
    )
] + [
    {"start": "cached", "images": images, "read_s": 1, "cache_s": 1, "first_batch_s": 1, "start_s": 3, "cpu_s": 2,
     "peak_mib": mib}
    for images, mib in ((10, 512), (100, 1024))
] + [{"start": "cold", "images": 10, "images_per_s": 5.0}]  # fmt: skip


def test_ratios_are_the_worst_and_the_largest() -> None:
    assert scaling.ratios(ROWS) == {
        "time_over_peft": 0.75,
        "memory_over_peft": 0.75,
        "largest_start_s": 3,
        "largest_start_cpu_s": 2,
        "largest_start_gib": 1.0,
    }
    assert "time_over_peft" not in scaling.ratios(ROWS[4:])


def test_what_was_measured_is_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rows in (("a", ROWS[:4]), ("b", ROWS[4:])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    files = [str(tmp_path / f"{name}.json") for name in "ab"]
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--draw_to", str(tmp_path), "--from", *files])
    scaling.main()
    for name in ("scaling_steps", "scaling_starts"):
        image = Image.open(tmp_path / f"{name}.png").convert("RGB")
        assert image.width > image.height
        assert image.getpixel((0, 0)) == (255, 255, 255)  # readable on a dark page too
        assert len(image.getcolors(256) or []) > 10


TINY = Sizes(width=128, head_dim=64, blocks=(1, 1), text_tokens=8)
BASE = Point("base", 4, 4)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_both_trainers_are_measured_at_a_point() -> None:
    rows = scaling.measure_steps([BASE], TINY, rounds=1)
    assert [(row["axis"], row["trainer"]) for row in rows] == [("base", "tandem"), ("base", "peft")]
    assert all(row["step_s"] > 0 and row["added_mib"] > 0 for row in rows)


@pytest.mark.slow
def test_a_run_measures_and_draws_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = (replace(BASE, axis="tokens", columns=8), replace(BASE, axis="batch", batch=2))
    monkeypatch.setattr(scaling, "POINTS", (BASE, *others, replace(BASE, axis="rank", rank=32)))
    monkeypatch.setattr(scaling, "SIZES", TINY)
    monkeypatch.setattr(scaling, "STARTS", {"cached": (8, 24), "cold": (6,)})
    words = ["--rounds", "1", "--json", str(tmp_path / "r.json"), "--draw_to", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *words])
    scaling.main()
    report = json.loads((tmp_path / "r.json").read_text())
    kinds = [row.get("trainer") or row["start"] for row in report["rows"]]
    assert kinds == ["tandem", "peft"] * 4 + ["cached"] * 2 + ["cold"]
    assert all((tmp_path / f"scaling_{what}.png").is_file() for what in ("steps", "starts"))
