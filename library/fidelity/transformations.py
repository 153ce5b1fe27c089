"""What was done to one matrix: which transformation of the reference gives the served numbers.

*What is no honest rounding was changed* (``rounding_laws``), and the change is looked for by doing it: a candidate is
made from the reference (rolled, permuted, transposed, another layer's, clipped, misread, ...), and the one from which
the served numbers are an honest rounding is named with its parameters. Coarse formats let several pass: then the
nearest one is named, the first of those that are as near. If there is none, the words say where they differ, and how
far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from library.fidelity.grids import dot, gain_of, relative, sampled_rows
from library.fidelity.misreadings import misread
from library.fidelity.rounding_laws import (
    CHUNK,
    MOST,
    RARE,
    Candidate,
    ServedMatrix,
    group_gains,
    over_scale,
    spread,
    steps_of,
)
from library.precision.files.fp8 import Fp8Weight
from library.randomness import generator

_GAIN, _FACTOR = 0.002, 0.03  # a scale group's gain is known to about 0.5 %
_AS_NEAR = 1.05  # times as far, which as many gains as there are blocks of 16 may take off
_ONE_SIDE = 0.03  # share of errors on the rarer side of zero, when all are cut; times 0.96 has 0.08

Diagnosis = tuple[str, str]  # a key of CAUSES, and words


def diagnose(
    served: ServedMatrix, wanted: Tensor, others: Callable[[], Mapping[str, Tensor]] = dict, name: str = ""
) -> Diagnosis:
    """Return what was done to ``wanted``, given that :meth:`ServedMatrix.fits` does not hold.

    Args:
        served: the matrix.
        wanted: what it should be, fp32 [out, in].
        others: gives the reference's matrices of the same shape, by name.
        name: the matrix's own, which is passed over among the others.
    """
    numbers = served.numbers
    if not bool(torch.isfinite(numbers).all()):
        return "ruined_layer", f"{int((~torch.isfinite(numbers)).sum())} numbers are NaN or infinite"
    if not bool(numbers.any()):
        return "zeroed", "all zero"
    if bool((numbers == numbers.flatten()[0]).all()):
        return "ruined_layer", f"all {float(numbers.flatten()[0]):.3g}"
    if found := _misrounded(served, wanted):
        return found
    if found := _nearest_candidate(served, wanted):
        return found
    if found := _few_wrong(served, wanted):
        return found
    return _of_another(served, wanted, others(), name) or _low_rank(served, wanted) or _elsewhere(served, wanted)


def _nearest_candidate(served: ServedMatrix, wanted: Tensor) -> Diagnosis | None:
    """Return the nearest of the candidates that fit, or the first that is as near as rounding lets any be."""
    nearest, named = math.inf, None
    for attempt in (_scaled, _zeroed, _clipped, _rolled, _transposed, misread, _rescaled, _permuted):
        for each in attempt(served, wanted):
            read = served if each.numbers is None else replace(served, numbers=each.numbers, stored=None, seen=None)
            made, words = each.wanted, each.words
            if not (fits := read.fits(made)) and abs(factor := read.factor(made)) > 0.01:
                made, words = factor * made, f"{words}, and times {_factor(factor, served.expected)}"
                fits = abs(factor - 1) > 0.006 and read.fits(made)
            if not fits:
                continue
            far = relative(read.numbers, made)
            if far <= 1.1 * served.expected or not served.expected:
                return each.cause, words
            if nearest > _AS_NEAR * far:
                nearest, named = far, (each.cause, words)
    return named


def _misrounded(served: ServedMatrix, wanted: Tensor) -> Diagnosis | None:
    if (weight := served.fp8) is None:
        return ("rounding_mode", "rounded toward zero instead of to nearest") if _cut(served, wanted) else None
    if found := _by_way_of_e5m2(weight, relative(served.numbers, wanted)):
        return found
    steps = steps_of(weight, wanted)
    if steps.flushed > 0.5 and _beyond_are_flushed(weight, wanted):
        return "rounding_mode", f"numbers below {weight.fp8.min_normal:g} times the scale became zero"
    if steps.beyond > RARE or steps.farthest > MOST + 2:
        return None
    if abs(steps.drift) > 0.3 and steps.against < _ONE_SIDE:
        toward = "toward zero" if steps.drift < 0 else "away from zero"
        return "rounding_mode", f"rounded {toward} instead of to nearest ({steps.drift:+.2f} steps in the mean)"
    if steps.energy > 0.28 and abs(steps.drift) < 0.1:  # a factor drifts
        return "rounding_mode", f"rounded to either neighbour at random ({math.sqrt(steps.energy * 12):.1f} x nearest)"
    return None


def _cut(served: ServedMatrix, wanted: Tensor) -> bool:
    """Return whether the numbers are the grid's next toward zero: the nearest where that is smaller, else the next."""
    if served.grid is None:
        return False
    rows = sampled_rows(wanted)
    turn = served.stored.scheme.rotate if served.stored is not None else torch.clone
    nearest = turn(served.grid.part(rows).on_grid(wanted[rows]))
    numbers, wanted = turn(served.numbers[rows]), turn(wanted[rows])
    error, larger = (nearest - wanted).abs(), nearest.abs() > wanted.abs()
    cut = torch.where(larger, numbers.abs() < wanted.abs(), (numbers - nearest).abs() < 0.25 * error)
    clear = error > 2.0**-8 * wanted.abs()  # further than a reference in bf16 can be off
    return all(float(cut[clear & side].float().mean()) > 1 - _ONE_SIDE for side in (larger, ~larger))


def _beyond_are_flushed(served: Fp8Weight, wanted: Tensor) -> bool:
    """Return whether the served numbers are honest but where they are zero for a subnormal number."""
    small = over_scale(wanted, served.steps(), slice(None)).abs() < 1.07 * served.fp8.min_normal
    kept = torch.where((served.values.float() == 0) & small, torch.zeros(()), wanted)
    return steps_of(served, kept).beyond <= RARE


def _by_way_of_e5m2(weight: Fp8Weight, error: float) -> Diagnosis | None:
    """Numbers of two mantissa bits in a format of three."""
    bits = weight.values.view(torch.uint8)
    normal = (bits & 0x7F) >= 0x08
    if weight.fp8.mantissa_bits != 3 or error > 0.12 or not bool(normal.any()):
        return None
    odd = float((bits[normal] & 1).float().mean())
    return ("mixed_formats", "rounded to e5m2 before it was stored in e4m3fn") if odd <= 0.01 else None


def _zeroed(served: ServedMatrix, wanted: Tensor) -> Iterator[Candidate]:
    """Entries that are zero and should not be, beside others that are right."""
    zero = served.numbers == 0
    for what, gone in (("rows", zero.all(1)), ("columns", zero.all(0))):
        over = gone[:, None] if what == "rows" else gone[None]
        if bool(gone.any()):
            text = f"{int(gone.sum())} of {len(gone)} {what} are zero ({_runs(gone)})"
            yield Candidate("zeroed", text, torch.where(over, torch.zeros(()), wanted))
    run = 16 if wanted.shape[1] % 16 == 0 else wanted.shape[1]
    smallest = torch.where(zero, math.inf, served.numbers.abs()).unflatten(1, (-1, run)).amin(-1, keepdim=True)
    smallest = torch.where(smallest.isinf(), 0, smallest).expand(-1, -1, run).flatten(1)  # next to it, of the same step
    lost = zero & (wanted.abs() > (1.07 * smallest).clamp_min(0.02 * float(wanted.square().mean().sqrt())))
    if bool(lost.any()):
        text = f"{int(lost.sum())} of {lost.numel()} numbers are zero ({_box(lost)})"
        yield Candidate("zeroed", text, torch.where(zero, torch.zeros(()), wanted))


def _scaled(served: ServedMatrix, wanted: Tensor) -> Iterator[Candidate]:
    factor = served.factor(wanted)
    if abs(factor - 1) > _GAIN:
        words = "its sign is flipped" if abs(factor + 1) < _FACTOR else f"times {_factor(factor, served.expected)}"
        yield Candidate("wrong_scale", words, factor * wanted)


def _rescaled(served: ServedMatrix, wanted: Tensor) -> Iterator[Candidate]:
    """The reference times a factor for each row, and for each group that shares a scale."""
    numbers, scale = served.numbers, served.steps
    shapes = [(numbers.shape[0], 1)] + ([] if scale is None or scale.numel() == 1 else [tuple(scale.shape)])
    for rows, blocks in dict.fromkeys(shapes):
        gains = group_gains(numbers, wanted, rows, blocks)
        known = max(0.5 * _FACTOR, 10 * served.expected * math.sqrt(gains.numel() / numbers.numel()))
        off = (gains - 1).abs() > known
        if bool((gains.abs() < 1e-4).any()) or not bool(off.any()):
            continue
        moved = _moved_scales(scale, scale / gains) if scale is not None and scale.shape == gains.shape else None
        values = gains[off]
        low, high = float(values.min()), float(values.max())
        what = f"{int(off.sum())} of {gains.numel()} {'rows' if blocks == 1 else 'blocks'}"
        alike = high / low < 1 + max(_FACTOR, known)
        words = f"{what} times {_factor(float(values.mean()) if alike else low, served.expected)}"
        gains = gains if moved else torch.where(off, gains, 1.0)
        words = moved or (words if alike else f"{words} to {_factor(high, served.expected)}")
        yield Candidate("wrong_scale", words, wanted * spread(gains, wanted))


def _factor(gain: float, expected: float) -> str:
    """Return a factor in as many digits as are known of it; rounding to nearest takes up to its squared error off."""
    words = (f"{gain:.{digits}g}" for digits in (1, 2, 3))
    return next((text for text in words if abs(float(text) / gain - 1) < 0.002 + expected**2), f"{gain:.3g}")


def _moved_scales(found: Tensor, right: Tensor) -> str | None:
    """Say how the scales ``found`` [rows, blocks] come from the ``right`` ones, if in another order."""
    if bool((right <= 0).any()):
        return None

    def same(other: Tensor) -> bool:
        return bool(((other.reshape(found.shape) / found).log().abs() < 2 * _FACTOR).all())

    for shifts, how in _shifts(found.log(), right.log()):
        if same(torch.roll(right, *shifts)):
            return f"its scales are rolled by {how}"
    if same(right.t()) or same(right.reshape(right.shape[::-1]).t()):
        return "its scales are transposed"
    if bool(((found.flatten().sort().values / right.flatten().sort().values).log().abs() < 2 * _FACTOR).all()):
        return "its scales are in another order"
    return None


def _shifts(found: Tensor, wanted: Tensor) -> Iterator[tuple[tuple, str]]:
    """Yield the likeliest rolls of ``wanted`` [n, m] that give ``found``: arguments of torch.roll, and words."""
    found, wanted = found - found.mean(), wanted - wanted.mean()
    if min(found.shape) > 1:
        product = torch.fft.rfft2(found) * torch.fft.rfft2(wanted).conj()
        place = int(torch.fft.irfft2(product, s=found.shape).argmax())
        down, right = divmod(place, found.shape[1])
        if (down, right) != (0, 0):
            words = [f"{n} {what}" for n, what in ((down, "rows"), (right, "columns")) if n]
            yield ((down, right), (0, 1)), " and ".join(words)
    flat = torch.fft.rfft(found.flatten()) * torch.fft.rfft(wanted.flatten()).conj()
    shift = int(torch.fft.irfft(flat, n=found.numel()).argmax())
    if shift:
        yield (shift,), f"{shift} of {found.numel()} places"


def _clipped(served: ServedMatrix, wanted: Tensor) -> Iterator[Candidate]:
    """The reference, its largest numbers made smaller: in all, or row by row."""
    numbers = served.numbers.abs()
    for limit in (numbers.amax().reshape(1, 1), numbers.amax(1, keepdim=True)):
        outside = wanted.abs() > limit * 1.07  # half a step of e4m3fn
        if bool(outside.any()):
            low, high, count = float(limit.min()), float(limit.max()), int(outside.sum())
            at = f"{high:.3g}" if low == high else f"{low:.3g} to {high:.3g}, row by row"
            text = f"{count} of {wanted.numel()} numbers ({count / wanted.numel():.2%}) are clipped at {at}"
            yield Candidate("clipped", text, wanted.clamp(-limit, limit))


def _rolled(served: ServedMatrix, wanted: Tensor) -> Iterator[Candidate]:
    for shifts, how in _shifts(served.numbers, wanted):
        rows = wanted.shape[0]
        halves = " (its halves are exchanged)" if shifts == ((rows // 2, 0), (0, 1)) and rows % 2 == 0 else ""
        yield Candidate("permuted", f"rolled by {how}{halves}", torch.roll(wanted, *shifts))


def _transposed(served: ServedMatrix, wanted: Tensor) -> Iterator[Candidate]:
    for other in (wanted.t().reshape(wanted.shape), wanted.reshape(wanted.shape[::-1]).t()):
        yield Candidate("permuted", "transposed", other)
    for sides in ((0,), (1,), (0, 1)):
        yield Candidate("permuted", "in reverse order", wanted.flip(sides))


def _permuted(served: ServedMatrix, wanted: Tensor) -> Iterator[Candidate]:
    """Rows or columns in another order, found by their directions under a random projection."""
    for what, found, right in (("rows", served.numbers, wanted), ("columns", served.numbers.t(), wanted.t())):
        order = _order(found, right)
        moved = order != torch.arange(len(order))
        if not bool(moved.any()) or (int(moved.sum()) > 0 and len(order.unique()) < 0.9 * len(order)):
            continue
        other = wanted[order] if what == "rows" else wanted[:, order]
        text = f"{int(moved.sum())} of {len(order)} {what} are in another order ({_runs(moved)})"
        yield Candidate("permuted", text, other)
        gains = group_gains(served.numbers, other, served.numbers.shape[0], 1)
        if bool((gains.abs() > 1e-4).all()):
            yield Candidate("permuted", f"{text}, under the scales of the others", other * gains)


def _order(found: Tensor, right: Tensor) -> Tensor:
    """Return for each row of ``found`` the row of ``right`` that points its way."""
    project = torch.randn(found.shape[1], 64, generator=generator("order", found.shape[1]))
    a, b = (normalize(x @ project, dim=1) for x in (found, right))
    rows = max(1, CHUNK // len(b))
    return torch.cat([(a[start : start + rows] @ b.t()).argmax(1) for start in range(0, len(a), rows)])


def _of_another(served: ServedMatrix, wanted: Tensor, others: Mapping[str, Tensor], name: str) -> Diagnosis | None:
    """Another layer's weights, told by a sample of the entries first."""
    places = torch.randint(0, wanted.numel(), (4096,), generator=generator("sample", *wanted.shape))
    sample = served.numbers.flatten()[places]
    for other, numbers in others.items():
        if other != name and float(cosine_similarity(sample, numbers.flatten()[places].float(), dim=0)) > 0.8:
            high = numbers.float()
            gain = gain_of(served.numbers, high)
            near = min(wanted.shape) > 1 and relative(served.numbers, gain * high) < 0.3
            if near or served.fits(high):
                return "exchanged", f"holds the weights of {other.removesuffix('.weight')}"
    return None


def _low_rank(served: ServedMatrix, wanted: Tensor) -> Diagnosis | None:
    """A difference of few directions: a LoRA's. Its likes are compared with those of the rounding's noise."""
    error = served.numbers - wanted
    rank = min(32, min(wanted.shape) // 4)
    if rank < 1 or relative(served.numbers, wanted) > 0.7:
        return None
    torch_random = generator("low rank", *wanted.shape)
    start = torch.linalg.qr(error @ torch.randn(wanted.shape[1], rank + 8, generator=torch_random)).Q
    start = torch.linalg.qr(error @ (error.t() @ start)).Q
    sizes = torch.linalg.svdvals(start.t() @ error).square()
    share = sizes.cumsum(0) / dot(error, error)
    for count in (1, 2, 4, 8, 16, 32):
        if count > rank:
            break
        noise = count * (wanted.shape[0] ** 0.5 + wanted.shape[1] ** 0.5) ** 2 / wanted.numel()
        if float(share[count - 1]) > 0.5 + 0.5 * min(1.0, noise):
            text = f"differs by {relative(served.numbers, wanted):.1%}, mostly in {count} direction"
            return "other_lora", text + ("s" if count > 1 else "")
    return None


def _few_wrong(served: ServedMatrix, wanted: Tensor) -> Diagnosis | None:
    """A few numbers that are wrong, as by bits that flipped."""
    wrong = _wrong(served, wanted)
    count = int(wrong.sum())
    if not 0 < count <= min(1000, 0.01 * wrong.numel()) or not served.fits(torch.where(wrong, served.numbers, wanted)):
        return None
    return "ruined_layer", f"{count} of {wrong.numel()} numbers are wrong ({_box(wrong)})"


def _elsewhere(served: ServedMatrix, wanted: Tensor) -> Diagnosis:
    """No transformation that is known: say how far, and where if not everywhere."""
    wrong, error = _wrong(served, wanted), relative(served.numbers, wanted)
    size = f"differs by {error:.2g} times its size" if error > 2 else f"differs by {error:.1%}"
    rows = wrong.float().mean(1) > 0.2 * float(wrong.float().mean())
    if 0 < float(rows.float().mean()) < 0.6 and float(wrong[~rows].float().mean()) < 0.02:
        return "ruined_layer", f"{size}: only rows {_runs(rows)}"
    if bool((served.numbers.flatten().sort().values - wanted.flatten().sort().values).abs().amax() < 1e-6):
        return "permuted", "its numbers are in another order"
    return "ruined_layer", f"{size}, and by no transformation that is known here"


def _wrong(served: ServedMatrix, wanted: Tensor) -> Tensor:
    """Return where the numbers are further away than any 8 bits take them."""
    return (served.numbers - wanted).abs_() > 0.15 * wanted.abs() + 0.05 * wanted.square().mean().sqrt()


def _runs(chosen: Tensor) -> str:
    """Return the numbers where ``chosen`` is true: "0-15, 40"; the first three runs."""
    places = chosen.nonzero().flatten().tolist()
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][1] + 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    words = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs[:3]]
    return ", ".join(words) + (", ..." if len(runs) > 3 else "")


def _box(chosen: Tensor) -> str:
    rows, columns = chosen.any(1).nonzero().flatten(), chosen.any(0).nonzero().flatten()
    return f"rows {int(rows[0])}-{int(rows[-1])}, columns {int(columns[0])}-{int(columns[-1])}"
