"""The plot: written as PNG and SVG, with its panels; the metrics read as a crash or a resume left them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import toml
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from library.errors import UserError
from library.training.report import plots
from library.training.report.metrics_file import read_run
from library.training.report.plots import draw_runs, plot_runs
from tests.runs import printed
from tools import plot_lr


def write_run(folder: Path, steps: int = 100, with_d: bool = True) -> Path:
    """A run with a warm-up of 10 steps whose d stands still from step 20 on."""
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        record = {"step": step, "epoch": 0, "loss": 1 / step, "loss_ema": 1 / step, "grad_norm": 0.5}
        for group in ("lora", "lora_plus"):
            record[f"lr/{group}"] = min(1.0, step / 10)
            if with_d:
                record[f"d/{group}"] = min(1e-3, 1e-6 * 2**step) if step < 20 else 2e-3
                record[f"d*lr/{group}"] = record[f"lr/{group}"] * record[f"d/{group}"]
        lines.append(json.dumps(record))
        if step % 25 == 0:
            lines.append(json.dumps({"step": step, "val_loss": 2 / step}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def texts(svg: Path) -> str:
    return " ".join("".join(element.itertext()) for element in ElementTree.parse(svg).iter() if "text" in element.tag)


def words(figure: Figure) -> str:
    legends = [text for legend in figure.legends for text in legend.get_texts()]
    return " ".join(text.get_text() for text in (*figure.findobj(Text), *legends))


def test_the_tool_writes_png_and_svg_without_a_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "castle")
    monkeypatch.delenv("DISPLAY", raising=False)
    assert printed(plot_lr, run).split() == [str(run / "lr.png"), str(run / "lr.svg")]
    with Image.open(run / "lr.png") as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 50  # something is drawn
    shown = texts(run / "lr.svg")
    for text in ("castle", "Loss", "Learning rate", "Distance estimate d", "Step size d · lr", "Gradient norm"):
        assert text in shown


def test_several_runs_are_named_in_one_picture(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "first" / "lora"), write_run(tmp_path / "second" / "lora", with_d=False)]
    png, svg = plot_runs(runs, tmp_path / "both.png")
    assert (png.name, svg.name) == ("both.png", "both.svg")
    assert "first/lora" in texts(svg)
    assert "second/lora" in texts(svg)


def colours(picture: Path, box: tuple[float, float, float, float]) -> Counter[str]:
    """Return how many pixels have each colour in a part of the picture, given in shares of it."""
    with Image.open(picture) as image:
        left, top, right, bottom = box
        part = image.convert("RGB").crop((round(image.width * left), round(image.height * top),
                                          round(image.width * right), round(image.height * bottom)))  # fmt: skip
    return Counter({"#{:02X}{:02X}{:02X}".format(*colour): count for count, colour in part.getcolors(1 << 24) or []})


def test_runs_with_the_same_curves_are_all_seen(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, steps=300) for name in ("one", "two", "three")]
    png, _ = plot_runs(runs, tmp_path / "all.png")
    for box in ((0.0, 0.15, 0.5, 1.0), (0.52, 0.15, 1.0, 0.35), (0.52, 0.8, 1.0, 1.0)):  # loss, rate, gradient norm
        seen = colours(png, box)
        assert min(seen[colour] for colour in ("#0072B2", "#D55E00", "#009E73")) > 50, (box, seen)


def test_a_run_is_called_by_its_output_name_and_says_what_it_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "save_figure", lambda figure, _: [words(figure)])
    run = write_run(tmp_path / "out3")
    settings = {"model": {"pretrained_model_name_or_path": "models/FLUX.1-dev"}, "network": {"network_dim": 16},
                "optimizer": {"learning_rate": 2e-4}, "saving": {"output_name": "castle"}}  # fmt: skip
    (run / "config.toml").write_text(toml.dumps(settings))
    (shown,) = plot_runs([run], tmp_path / "lr.png")
    assert "castle   FLUX.1-dev, lora, rank 16, lr 0.0002" in shown
    other = write_run(tmp_path / "out4")
    (other / "config.toml").write_text(toml.dumps(settings))
    (shown,) = plot_runs([run, other], tmp_path / "both.png")
    assert "out3" in shown  # the name alone would not tell them apart


def test_axes_are_logarithmic_where_values_span_more_than_a_decade(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    scales = {axes.get_title(loc="left"): axes.get_yscale() for axes in draw_runs([run]).axes}
    assert scales["Distance estimate d"] == "log"  # 2e-6 to 2e-3
    assert scales["Learning rate"] == "linear"  # 0.1 to 1: a decade, not more
    assert scales["Gradient norm"] == "linear"


def test_steps_that_a_resumed_run_repeats_replace_the_old_ones(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    before = [{"step": s, "loss": 1.0} for s in (1, 2, 3, 4)] + [{"step": 4, "val_loss": 1.0}]
    after = [{"step": s, "loss": 2.0} for s in (3, 4)] + [{"step": 4, "val_loss": 2.0}]
    file.write_text("".join(json.dumps(record) + "\n" for record in before + after))
    columns = read_run(tmp_path).columns
    assert columns["loss"][1].tolist() == [1, 1, 2, 2]
    assert columns["val_loss"][1].tolist() == [2]


def test_a_loss_that_is_no_number_leaves_a_gap(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": NaN}\n{"step": 3, "loss": 2.0, "lr/a": Infinity}\n')
    columns = read_run(tmp_path).columns
    assert np.isnan(columns["loss"][1]).tolist() == [False, True, False]
    assert "lr/a" not in columns
    plot_runs([tmp_path], tmp_path / "lr.png")


def test_a_run_of_one_step_is_drawn(tmp_path: Path) -> None:
    for axes in draw_runs([read_run(write_run(tmp_path / "run", steps=1))]).axes:
        drawn = [line for line in axes.lines if len(np.asarray(line.get_xdata()))]
        assert any(line.get_marker() == "o" for line in drawn), axes.get_title(loc="left")


def test_long_runs_keep_their_spikes_and_small_files(tmp_path: Path) -> None:
    loss = np.full(30_000, 0.5)
    loss[12_345] = 40.0
    lines = (json.dumps({"step": i + 1, "loss": value}) for i, value in enumerate(loss))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    figure = draw_runs([read_run(tmp_path)])
    line = figure.axes[0].lines[0]
    assert len(np.asarray(line.get_ydata())) <= 2000
    assert np.max(np.asarray(line.get_ydata())) == 40.0


@pytest.mark.parametrize("text", ["", "\n", "half a li", '{"step": 1}\n', "[1, 2]\n"])
def test_metrics_without_a_step_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"metrics.jsonl: holds no metrics yet; wait for the run's first step"):
        plot_runs([tmp_path], tmp_path / "lr.png")


@pytest.mark.parametrize("steps", [1, 3, 200])
def test_steps_are_whole_and_no_legend_lies_over_a_panel(tmp_path: Path, steps: int) -> None:
    figure = draw_runs([read_run(write_run(tmp_path / "short", steps), "short")])
    assert_no_legend_over_a_panel(figure)
    for axes in figure.axes:
        low, high = axes.get_xlim()
        assert all(float(tick).is_integer() for tick in axes.get_xticks() if low <= tick <= high)


def assert_no_legend_over_a_panel(figure: Any) -> None:
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        if (legend := axes.get_legend()) is not None:
            assert legend.get_window_extent(renderer).y0 >= axes.get_window_extent(renderer).y1
            title = axes._left_title.get_window_extent(renderer)
            assert not legend.get_window_extent(renderer).overlaps(title)


def write_noisy_run(folder: Path) -> None:
    """A run on images whose loss follows from the noise level."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    lines: list[dict[str, float]] = [{"step": 0, "val_loss": 0.7, "val_loss/sigma_0.1": 0.8, "val_loss/sigma_0.9": 0.6}]
    for step in range(1, 301):
        sigma = float(random.uniform(0.01, 0.99))
        low = int(sigma * 5) / 5
        line = {"step": step, "loss": sigma, f"loss/sigma_{low:g}-{low + 0.2:g}": sigma, "lr/lora": 1.0}
        lines.append(line | {"sigma_mean": sigma, "grad_norm": 1 + sigma})
    lines.append({"step": 300, "val_loss": 0.5, "val_loss/sigma_0.1": 0.76, "val_loss/sigma_0.9": 0.24})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


def test_one_runs_losses_are_drawn_by_noise_level(tmp_path: Path) -> None:
    write_noisy_run(run := tmp_path / "castle")
    figure = draw_runs([read_run(run)])
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    training, held_out = panels["Loss by σ"], panels["Held-out loss by σ"]
    assert [text.get_text() for text in training.get_legend().get_texts()] == [
        "0-0.2",
        "0.2-0.4",
        "0.4-0.6",
        "0.6-0.8",
        "0.8-1",
    ]
    for level, line in enumerate(training.get_lines()):
        assert all(level / 5 <= loss <= level / 5 + 0.2 for loss in line.get_ydata())  # averages of such losses
    assert [line.get_ydata().tolist() for line in held_out.get_lines()] == [[0.8, 0.76], [0.6, 0.24]]
    assert "Loss by σ" not in [axes.get_title(loc="left") for axes in draw_runs([read_run(run)] * 2).axes]
    assert_no_legend_over_a_panel(figure)


def test_what_was_learnt_stands_beside_what_changed_elsewhere(tmp_path: Path) -> None:
    (folder := tmp_path / "castle").mkdir()
    validations = {0: (0.65, 0.0), 10: (0.4, 0.05), 20: (0.3, 0.2)}  # held out, on other prompts
    lines = [{"step": step, "val_loss": own, "val_prior_loss": other} for step, (own, other) in validations.items()]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"step": 20, "loss": 0.5}])) + "\n")
    (panel,) = (axes for axes in draw_runs([read_run(folder)]).axes if axes.get_title(loc="left") == "Held-out loss")
    learnt, changed = panel.get_lines()
    assert list(learnt.get_xdata()) == list(changed.get_xdata()) == [0, 10, 20]
    assert learnt.get_ydata() == pytest.approx([0.65, 0.4, 0.3])
    assert changed.get_ydata() == pytest.approx([0.0, 0.05, 0.2])
    legend = panel.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["held out", "held out, to be preserved"]
    assert learnt.get_color() != changed.get_color()
