"""What can be wrong with a deployment, what helps; and from the rows of all tensors to what is wrong with its weights.

A row that is no honest rounding has its fault from ``tensors``. Two things need all rows together: which share of the
LoRA's update is in the weights (each layer knows it badly, all of them well), and whether the odd ones are most of the
model, or of a block: then they come from another one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from library.errors import names_in_short
from library.fidelity.grids import SURE
from library.fidelity.intervals import Share
from library.fidelity.tensors import TensorRow
from library.files import read_toml
from library.precision.parity.layer_errors import FLAGGED
from library.precision.recipe import KINDS

WORTH_MENDING = 0.05  # of the squared error: what makes less is no reason to do anything
_STRENGTH = 0.05
_GROUPS_SAID = 3  # of tensors with one cause and other numbers
_PERCENT = re.compile(r"[\d.]+%")
_BLOCK = re.compile(r"^(.*?\.\d+)\.")
Size = Literal["real", "small", "cannot tell"]

_TABLES = read_toml(Path(__file__).with_name("findings.toml"))[0]
CAUSES: dict[str, str] = {cause: row["title"] for cause, row in _TABLES.items()}
REMEDIES: dict[str, str] = {cause: row["remedy"] for cause, row in _TABLES.items()}


@dataclass(frozen=True)
class Finding:
    """A cause that was found.

    Attributes:
        cause: key of ``CAUSES``. share: of the squared error, as far as causes add up.
        layers: that show it; empty where it is not about layers.
        evidence: the numbers that speak for it, in words.
        low, high: 95 % interval of ``share`` over images; NaN where it is not known.
        exact: the file is provably not what it should be, however little that changes on these images.
    """

    cause: str
    share: float
    layers: tuple[str, ...]
    evidence: str
    low: float = math.nan
    high: float = math.nan
    exact: bool = False

    @property
    def size(self) -> Size:
        """Whether it makes a real part of the error; cannot tell where the interval has both sides of that."""
        side = Share(self.share, self.low, self.high).side(WORTH_MENDING)
        return "real" if side == "above" else "small" if side == "below" else "cannot tell"

    def with_share(self, share: Share) -> Finding:
        """Return it as making this share."""
        return replace(self, share=share.value, low=share.low, high=share.high)

    def claim(self) -> str:
        """Return cause, share and evidence in words."""
        small = "small here: " if self.exact and self.size == "small" else ""
        share = "" if math.isnan(self.share) else f" ({small}{self.share:.1%} of the error)"
        return f"{CAUSES[self.cause]}{share}: {self.evidence}"

    def sentence(self) -> str:
        """Return the claim, and what helps."""
        return f"{self.claim()}. {as_sentence(REMEDIES[self.cause])}"

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"title": CAUSES[self.cause], "remedy": REMEDIES[self.cause]}


def as_sentence(text: str) -> str:
    """Return ``text`` with a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:].removesuffix('.')}."


def with_lora_faults(rows: Sequence[TensorRow], merged: bool) -> list[TensorRow]:
    """Name what is wrong with the LoRA's share in weights that have no other fault."""
    known = [row for row in rows if row.lora_share is not None and row.lora_doubt is not None and not row.fault]
    if not known:
        return list(rows)
    found = _merged_faults(known) if merged else _unmerged_faults(known)
    return [
        replace(row, fault=found[row.name], diagnosis=f"holds {_share(row):.2f} of the update")
        if row.name in found
        else row
        for row in rows
    ]


def _mean_share(rows: Sequence[TensorRow]) -> tuple[float, float]:
    """Return the mean share, each layer's by what is known of it, and its standard error."""
    weights = [1 / max(row.doubt, 1e-6) ** 2 for row in rows]
    mean = sum(weight * _share(row) for weight, row in zip(weights, rows, strict=True)) / sum(weights)
    return mean, sum(weights) ** -0.5


def _unmerged_faults(rows: Sequence[TensorRow]) -> dict[str, str]:
    mean, doubt = _mean_share(rows)
    inside = [row for row in rows if _share(row) > max(0.2, SURE * row.doubt)]
    if not inside and mean > max(0.2, SURE * doubt):
        inside = list(rows)
    return {row.name: "lora_twice" for row in inside}


def _merged_faults(rows: Sequence[TensorRow]) -> dict[str, str]:
    mean, doubt = _mean_share(rows)
    near = max(_STRENGTH * abs(mean), _STRENGTH)
    alike = [row for row in rows if abs(_share(row) - mean) <= max(near, 4 * row.doubt)]
    usual = min(1.0, median(1.0 if row.lora_dithered is None else row.lora_dithered for row in rows))
    off = min(abs(mean - 1), abs(mean - usual))
    if len(alike) >= 0.9 * len(rows) and off > max(_STRENGTH, SURE * doubt):
        kept = median(row.lora_kept or 0.0 for row in rows)
        once = sum(row.lora_at_share for row in rows) > 0.5 * len(rows)
        lost = kept < FLAGGED and 0 <= mean < 1 and abs(mean - kept) < 0.1 and not (once and kept > 0.1)
        absent = not lost and abs(mean) < max(0.1, SURE * doubt)
        fault = "delta_lost" if lost else "lora_missing" if absent else "lora_sign" if mean < 0 else "strength"
        return {row.name: fault for row in rows}
    found = {}
    for row in rows:
        share, sure, kept = _share(row), SURE * row.doubt, row.lora_kept or 0.0
        less, more = share < usual - max(_STRENGTH, sure), share > 1 + max(2 * _STRENGTH, sure)
        if share < -max(0.1, sure):
            found[row.name] = "lora_sign"
        elif less and share < max(0.1, sure) and kept - share > max(0.15, sure):
            found[row.name] = "lora_missing"
        elif (less or more) and row.lora_at_share:
            found[row.name] = "strength"
        elif less:
            found[row.name] = "delta_lost"
        elif share > 1.5 + sure:  # coarse steps can add a little to an update as well
            found[row.name] = "strength"
    return found


def _share(row: TensorRow) -> float:
    assert row.lora_share is not None
    return row.lora_share


def tensor_findings(rows: Sequence[TensorRow]) -> list[Finding]:
    """Return what is wrong with the tensors, the gravest first; empty where all are rounded as their format must.

    Shares are NaN: how much of the output's error a finding makes is known once its tensors were put back.
    """
    by_fault: dict[str, list[TensorRow]] = {}
    for row in _as_another_model(rows):
        if row.fault:
            by_fault.setdefault(row.fault, []).append(row)
    return [
        Finding(
            fault,
            math.nan,
            tuple(row.name for row in by_fault[fault]),
            _evidence(fault, by_fault[fault], rows),
            exact=fault != "delta_lost",
        )
        for fault in CAUSES
        if fault in by_fault
    ]


def _as_another_model(rows: Sequence[TensorRow]) -> list[TensorRow]:
    """Name tensors that were changed by nothing known as another model's, where that is most of it or of a block."""
    weights = [row for row in rows if row.role == "weight"]
    changed = {row.name for row in weights if row.fault in ("ruined_layer", "wrong_base")}
    if len(changed) > 0.5 * len(weights):
        return [
            replace(row, fault="wrong_base") if row.fault in ("ruined_layer", "other_lora") else row for row in rows
        ]
    blocks: dict[str, list[str]] = {}
    for row in weights:
        if match := _BLOCK.match(row.name):
            blocks.setdefault(match[1], []).append(row.name)
    whole = [block for block, names in blocks.items() if len(names) > 2 and len(changed & {*names}) > 0.7 * len(names)]
    return [
        replace(row, fault="other_block")
        if row.fault == "ruined_layer" and any(row.name.startswith(f"{block}.") for block in whole)
        else row
        for row in rows
    ]


def _evidence(fault: str, found: Sequence[TensorRow], rows: Sequence[TensorRow]) -> str:
    """Return which tensors, and what is wrong with them: all alike, or the worst."""
    roles, quantised = {row.role for row in found}, all(row.own_expected for row in found)
    of_lora = fault in ("lora_twice", "lora_missing", "lora_sign", "strength", "delta_lost")
    among = [row for row in rows if row.role in roles and (row.own_expected or not quantised)]
    among = [row for row in rows if row.lora_share is not None] if of_lora else among
    noun = {"weight": "weights", "bias": "biases", "norm": "norms"}.get(*roles) if len(roles) == 1 else None

    def where(some: Sequence[TensorRow]) -> str:
        return describe_tensors([row.name for row in some], [row.name for row in among], noun or "tensors")

    if of_lora:
        groups = _of_like_shares(found) if fault != "delta_lost" else [list(found)]
        words = [f"{where(rows)}: {_mean_share(rows)[0]:.2f} of the LoRA's update is in the file" for rows in groups]
        worst = min(found, key=_share)
        lowest = f", {_share(worst):.2f} in {worst.layer}" if len(found) > 1 and fault == "delta_lost" else ""
        return _first(words) + lowest
    if fault in ("wrong_base", "other_block"):
        return f"{where(found)}: in the median {median(row.error for row in found):.1%} off"
    by_words: dict[str, list[TensorRow]] = {}
    for row in sorted(found, key=lambda row: -row.error):
        by_words.setdefault(_PERCENT.sub("", row.diagnosis), []).append(row)
    if len(by_words) <= _GROUPS_SAID:  # of those that differ by how much alone, the median's words
        return "; ".join(f"{where(rows)}: {rows[len(rows) // 2].diagnosis}" for rows in by_words.values())
    worst = max(found, key=lambda row: row.error)
    return f"{where(found)}: {worst.diagnosis} (in {worst.name}, the worst)"


def _of_like_shares(found: Sequence[TensorRow]) -> list[list[TensorRow]]:
    """Return the rows in groups that hold about as much of the update, the largest group first."""
    groups: list[list[TensorRow]] = []
    for row in sorted(found, key=_share):
        if groups and _share(row) - _share(groups[-1][-1]) < max(2 * _STRENGTH, SURE * row.doubt):
            groups[-1].append(row)
        else:
            groups.append([row])
    return sorted(groups, key=len, reverse=True)


def _first(words: Sequence[str]) -> str:
    return "; ".join(words[:_GROUPS_SAID]) + ("; ..." if len(words) > _GROUPS_SAID else "")


_GROUPS = {
    "attention": re.compile(r"\.attn\b|\.attention\b"),
    "feed-forward": re.compile(r"\.ff\b|\.ff_context\b|\.proj_mlp\b|\.feed_forward\b|_mlp\b"),
    "modulation": re.compile(KINDS["modulation"] + r"\.\w+"),
    "single blocks": re.compile(r"single_transformer_blocks\."),
    "double blocks": re.compile(r"(?<!single_)\btransformer_blocks\."),
}


def describe_tensors(chosen: Sequence[str], among: Sequence[str], noun: str = "tensors") -> str:
    """Return ``chosen`` in words: one name, a whole group of ``among``, a block, or their number and the first ones."""
    if len(chosen) == 1:
        return chosen[0]
    some = {*chosen}
    if some >= {*among}:
        return f"all {len(chosen)} {noun}"
    for title, pattern in _GROUPS.items():
        group = {name for name in among if pattern.search(name)}
        if some == group:
            return f"all {len(chosen)} {noun} of {title}"
    blocks = {match[1] if (match := _BLOCK.match(name)) else "" for name in chosen}
    if len(blocks) == 1 and (block := blocks.pop()):
        return f"{len(chosen)} {noun} of {block}"
    return f"{len(chosen)} of {len(among)} {noun} ({names_in_short(list(chosen))})"


def costly_kinds(rows: Sequence[TensorRow]) -> list[Finding]:
    """Return a finding for each kind of layers that many keep in high precision and this deployment does not.

    Whether that is worth naming is for the measured share to say. Modulation in fp8 is no defect but a choice where
    the rest is in fp8 too, which ``Recipe`` makes.
    """
    findings = []
    weights = [row for row in rows if row.role == "weight"]
    in_fp8 = sum(row.own_expected > 0 for row in weights)
    for kind, pattern in KINDS.items():
        of_kind = [row for row in weights if re.fullmatch(pattern, row.layer)]
        found = [row for row in of_kind if row.own_expected and not row.fault]
        if found:
            text = f"{kind}: {len(found)} of {len(of_kind)} weights in {found[0].kind}"
            chosen = kind == "modulation" and in_fp8 > 0.5 * len(weights)
            cause = "modulation_in_fp8" if chosen else "embedders_in_fp8"
            findings.append(Finding(cause, math.nan, tuple(row.name for row in found), text))
    return findings
