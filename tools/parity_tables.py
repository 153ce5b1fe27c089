"""Tables of layers for the terminal: what fp8 costs each, and what was done about it. The worst come first."""

from __future__ import annotations

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.table import Table

from library.precision.parity.layer_errors import FLAGGED, UpdateRetention
from networks.merging.refit import Refit


def refit_table(fits: Mapping[str, Refit], shown: int) -> Table:
    """Return layers by falling error before.

    In per cent of the layer's output, on held-out images: the LoRA's own effect, the error before and after.
    """
    table = _table("layer", "rank", "effect %", "before %", "after %", "less %", "fitted")
    order = sorted(fits, key=lambda name: -fits[name].before)
    for name in order[:shown]:
        fit = fits[name]
        rank = str(fit.weights.rank) if fit.weights else "-"
        table.add_row(
            name, rank, _percent(fit.effect), _percent(fit.before), _percent(fit.after), _less(fit), fit.method
        )
    if len(order) > shown:
        table.add_row(f"and {len(order) - shown} more", *[""] * 6)
    before, after = (sum(getattr(fit, key) for fit in fits.values()) / len(fits) for key in ("before", "after"))
    kept = sum(fit.method == "kept" for fit in fits.values())
    table.add_section()
    mean = Refit(None, f"{len(fits) - kept} of {len(fits)}", before, after, 0.0)
    table.add_row("mean of all layers", "", "", _percent(before), _percent(after), _less(mean), mean.method)
    return table


def survival_table(title: str, found: Mapping[str, UpdateRetention], shown: int) -> Table:
    """Return layers by rising survival."""
    table = _table("layer", "survives", "cosine", "in outputs", "", title=title)
    order = sorted(found, key=lambda name: found[name].gain)
    for name in order[:shown]:
        one = found[name]
        outputs = "" if one.output_gain is None else f"{one.output_gain:.3f}"
        mark = f"< {FLAGGED:g}" if one.flagged else ""
        table.add_row(name, f"{one.gain:.3f}", f"{one.cosine:.3f}", outputs, mark)
    if len(order) > shown:
        table.add_row(f"and {len(order) - shown} more", *[""] * 4)
    flagged = sum(one.flagged for one in found.values())
    table.add_section()
    mean = sum(one.gain for one in found.values()) / len(found)
    table.add_row("mean of all layers", f"{mean:.3f}", "", "", f"{flagged} of {len(found)}" if flagged else "none")
    return table


def _table(*headings: str, title: str | None = None) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", border_style="dim", title=title)
    for number, heading in enumerate(headings):
        last = number == len(headings) - 1
        table.add_column(heading, justify="left" if number == 0 or last else "right", overflow="fold", no_wrap=True)
    return table


def _percent(value: float) -> str:
    return f"{100 * value:.3g}"


def _less(fit: Refit) -> str:
    return f"{100 * (1 - fit.after / fit.before):.0f}" if fit.before else "-"
