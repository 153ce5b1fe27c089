"""Tables for the terminal: a model's parts, modules and norms; a LoRA's layers; a file's metadata."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from library.models.inspection import Component, ModuleGroup, WeightSet, is_known
from networks.files.inspection import LoraLayer, LoraReport

_DTYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8 e4m3", "F8_E5M2": "fp8 e5m2", "F64": "fp64"}
_BARS = "▁▂▃▄▅▆▇█"
_LONGEST_LINE = 20  # characters of a line of bars
_LONGEST_VALUE = 110  # characters of a metadata value


def number(value: float) -> str:
    """Return 11900000000 as "11.9 B"."""
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}" if abs(value) < 1000 * size else f"{value / size:,.0f}{unit}"
    return f"{value:g}"


def size(count: int) -> str:
    """Return 23800000000 bytes as "23.8 GB" (powers of ten, as disks are sold)."""
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count / factor:,.0f} {unit}"
    return f"{count} B"


def dtypes(counts: Mapping[str, int]) -> str:
    """Return the names of dtypes, most frequent first."""
    return ", ".join(_DTYPES.get(name, name.lower()) for name, _ in sorted(counts.items(), key=lambda item: -item[1]))


def _table(*headings: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", border_style="dim")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    return table


def weight_set_head(weights: WeightSet, fp8: str | None) -> RenderableType:
    """Return the lines about the files: names, size, quantisation, what is wrong."""
    names = str(weights.files[0]) + (f" and {len(weights.files) - 1} more shards" if len(weights.files) > 1 else "")
    lines = [Text.assemble((names, "bold cyan"), f"  {size(weights.bytes)}, {len(weights.tensors)} tensors")]
    lines += [Text(f"  {fp8}", "magenta")] if fp8 else []
    lines += [Text(f"  {note}", "bold red") for note in weights.notes]
    return Group(*lines)


def component(part: Component, all_modules: bool) -> RenderableType:
    """Return a network's line, its modules by kind, and its norms."""
    facts = [f"{name} {value if value is not True else 'yes'}" for name, value in part.facts.items() if value]
    what = ", ".join([f"{number(part.parameters)} parameters", size(part.bytes), dtypes(part.dtypes), *facts])
    name = f"{part.name}: " if part.name else ""
    head = Text.assemble((name, "bold"), (part.architecture, "bold green"), f"  {what}")
    parts: list[RenderableType] = [head, module_table(part) if all_modules else kind_table(part)]
    if part.norms():
        parts.append(norm_lines(part))
    return Padding(Group(*parts), (0, 0, 1, 2))


def _part_title(part: Component, name: str) -> str:
    return f"{name} × {part.blocks[name]}" if name in part.blocks else "outside the blocks"


def kind_table(part: Component) -> Table:
    """Return modules counted by part of the network and by kind."""
    rows: dict[tuple[str, str], list[ModuleGroup]] = {}
    for group in part.modules:
        rows.setdefault((group.part, group.kind), []).append(group)
    several = ["dtype"] if len(part.dtypes) > 1 else []  # one is in the headline already
    table = _table("part", "kind", "modules", "parameters", "size", *several, numbers=("modules", "parameters", "size"))
    shown = ""
    for name in sorted(dict.fromkeys(key for key, _ in rows), key=lambda name: name == ""):
        for kind in dict.fromkeys(kind for key, kind in rows if key == name):
            groups = rows[name, kind]
            title = _part_title(part, name)
            table.add_row("" if title == shown else title, kind, *_figures(groups)[: len(table.columns) - 2])
            shown = title
    return table


def _figures(groups: Sequence[ModuleGroup]) -> tuple[str, str, str, str]:
    counts: dict[str, int] = {}
    for group in groups:
        for dtype, n in group.dtypes.items():
            counts[dtype] = counts.get(dtype, 0) + n
    total = str(sum(group.count for group in groups))
    if not any(group.learned for group in groups):
        return total, "no weights", "", ""
    parameters = sum(group.parameters for group in groups)
    return total, number(parameters), size(sum(group.bytes for group in groups)), dtypes(counts)


def module_table(part: Component) -> Table:
    """Return every module, those of a block once for all blocks."""
    table = _table("module", "kind", "×", "weight", "parameters", "dtype", numbers=("×", "parameters"))
    for group in part.modules:
        count, parameters, _, dtype = _figures([group])
        table.add_row(group.name, group.kind, count, " × ".join(map(str, group.shape)), parameters, dtype)
    return table


def norm_lines(part: Component) -> RenderableType:
    """Return which norms the network uses, and where."""
    rows: dict[tuple[str, bool], list[ModuleGroup]] = {}
    for group in part.norms():
        rows.setdefault((group.kind, group.learned), []).append(group)
    lines = []
    for (kind, learned), groups in rows.items():
        places = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", group.name.rpartition(".*.")[2]) for group in groups))
        where = ", ".join(places[:6]) + (f" and {len(places) - 6} more" if len(places) > 6 else "")
        without = "" if learned else " without weights"
        total = sum(group.count for group in groups)
        lines.append(Text.assemble("norms: ", (f"{kind}{without}", "bold yellow"), f" × {total}  ", (where, "dim")))
    if not is_known(part):
        lines.append(Text("norms without weights cannot be told of an unknown architecture", "dim"))
    return Group(*lines)


def lora(report: LoraReport) -> RenderableType:
    """Return a LoRA's layers by part, with the root mean square of the update, over all and over the blocks."""
    kind = report.kind + (f" for {' or '.join(report.families)}" if report.families else "")
    kind += f", {report.layout}" if report.layout else ""
    heads = [Text.assemble((kind, "bold green"), f"  {report.count} layers")] if report.count else []
    headings = ("layer", "×", "rank", "alpha", "rms", "over the blocks")
    table = _table(*headings, numbers=("×", "rank", "alpha", "rms"))
    most = max((layer.rms for layer in report.layers), default=0.0)
    shown = ""
    for (part, name), layers in _by_layer(report.layers).items():
        title = part or "outside the blocks"
        if title != shown:
            table.add_row(Text(title, "bold"))
            shown = title
        rms = sum(layer.rms**2 for layer in layers) ** 0.5 / len(layers) ** 0.5
        table.add_row(
            f"  {name}",
            str(len(layers)),
            _range(layer.rank for layer in layers),
            _range(layer.alpha for layer in layers),
            f"{rms:.2e}",
            sparkline([layer.rms for layer in layers], most) if part else "",
        )
    if report.others:
        more = f" and {len(report.others) - 8} more" if len(report.others) > 8 else ""
        heads.append(Text(f"not of a LoRA of linear layers: {', '.join(report.others[:8])}{more}", "yellow"))
    heads += [Text(note, "yellow") for note in report.notes]
    return Group(Padding(Group(*heads), (0, 0, 0, 2)), *([table] if report.layers else []))


def _by_layer(layers: Sequence[LoraLayer]) -> dict[tuple[str, str], list[LoraLayer]]:
    """Return the layers of each (part, name), by block; what is outside the blocks last."""
    parts = sorted(dict.fromkeys(layer.part for layer in layers), key=lambda part: part == "")
    rows: dict[tuple[str, str], list[LoraLayer]] = {}
    for part in parts:
        for layer in sorted((layer for layer in layers if layer.part == part), key=lambda layer: layer.block or 0):
            rows.setdefault((part, layer.layer), []).append(layer)
    return rows


def _range(values: Iterable[float]) -> str:
    listed = sorted(set(values))
    return f"{listed[0]:g}" if len(listed) == 1 else f"{listed[0]:g}–{listed[-1]:g}"


def sparkline(values: Sequence[float], most: float) -> str:
    """Return a character a value, its height relative to ``most``; above twenty values, one for several's mean."""
    each = -(-len(values) // _LONGEST_LINE)
    means = [sum(values[i : i + each]) / len(values[i : i + each]) for i in range(0, len(values), each)]
    top = len(_BARS) - 1
    return "".join(_BARS[min(top, round(top * value / most))] if most > 0 else _BARS[0] for value in means)


def metadata(strings: Mapping[str, str]) -> RenderableType:
    """Return a file's metadata, long values shortened."""
    table = _table("metadata", "")
    for key, value in sorted(strings.items()):
        text = " ".join(value.split())
        cut = f"{text[:_LONGEST_VALUE]}… ({len(value):,} characters)"
        table.add_row(key, Text(text if len(text) <= _LONGEST_VALUE else cut))
    return Padding(table, (0, 0, 1, 2))
