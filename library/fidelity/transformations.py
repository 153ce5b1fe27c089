"""What was done to one matrix: which transformation of the reference gives the served numbers.

*Rounding has exact laws.* In units of the format's step at the reference's number, an honest rounding to nearest never
errs by more than 1/2, a stochastic one never by more than 1; a merge into weights that were rounded before adds at most
1/2 of a step that may be twice as long. The mean squared error is 1/12 and 1/6 of a step's square; rounding toward zero
has 1/3, and a mean of -1/2. None of that depends on a layer's size or on how its weights are distributed. An eighth of
a step is allowed for a reference or a scale in bf16 (each moves a number by at most 1/32 of a step).

*Whatever does not keep them was changed*, and the change is looked for by doing it: a candidate is made from the
reference (rolled, permuted, transposed, another layer's, clipped, ...), and the one from which the served numbers are
an honest rounding is named with its parameters. If there is none, the words say where and how far they differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from library.precision.files.fp8 import Fp8Weight
from library.randomness import generator

_CHUNK = 1 << 22  # entries that are turned at a time
_TOLERANCE = 0.125
_MOST = 1 + _TOLERANCE  # steps that honest rounding errs, stochastic or to nearest
_MERGED = 1.9  # times rounding to nearest: rounded twice, stochastically the second time, is 1.73
_RARE = 5e-4  # share of entries that may lie up to two steps further out
_COARSE = 1.5  # times the typical error, where the format is not known
_GAIN, _FACTOR = 0.002, 0.03  # a scale group's gain is known to about 0.5 %


@dataclass(frozen=True)
class Steps:
    """Errors in steps of the format at the reference's numbers; ``seen``: those of at least one step.

    Attributes:
        beyond: share of all entries that err more than allowed. farthest: the largest error.
        off_nearest: share that errs more than half a step.
        drift: mean over the seen, positive away from zero. energy: mean of squares over the seen, at most one step far.
        flushed: share of seen subnormal numbers that became zero. seen: how many there are.
    """

    beyond: float
    farthest: float
    off_nearest: float
    drift: float
    energy: float
    flushed: float
    seen: int


@dataclass(frozen=True)
class ServedMatrix:
    """A matrix as it is served.

    Attributes:
        numbers: fp32 [out, in]. quantized: values and scales where they are known, also of numbers on a cast's grid.
        expected: relative error of layers like it: of rounding to nearest in its format, or, where that is not known,
            of the median layer; 0 in high precision.
        merged: something was merged into it, so that it may have been rounded twice.
    """

    numbers: Tensor
    quantized: Fp8Weight | None = None
    expected: float = 0.0
    merged: bool = False

    def fits(self, wanted: Tensor, gains: Tensor | None = None) -> bool:
        """Return whether the numbers are an honest rounding of ``wanted`` times its scale groups' ``gains``."""
        if self.quantized is not None and not self.merged:
            scaled = self.quantized if gains is None else with_gains(self.quantized, gains)
            return honest(steps_of(scaled, wanted))
        numbers = self.numbers if gains is None else self.numbers / spread(gains, self.numbers)
        if self.expected:
            most = _MERGED if self.quantized is not None else _COARSE
            return relative(numbers, wanted) <= most * self.expected + 1e-3
        return same_in_bf16(numbers, wanted)


def steps_of(served: Fp8Weight, wanted: Tensor, base: Tensor | None = None) -> Steps:
    """Measure the errors of ``served`` against ``wanted`` [out, in] in steps, a chunk of rows at a time.

    ``base``: what an update was merged into, if one was. The step is that at the larger of the two numbers: the base
    may have been rounded before.
    """
    fp8, scale = served.fp8, served.steps()
    allowed = _MOST if base is None else 2 * _MOST
    beyond = off = near = drift = energy = subnormal = flushed = 0.0
    seen, farthest = 0, 0.0
    lowest = int(math.log2(fp8.min_normal))
    rows = max(1, _CHUNK // wanted.shape[1])
    for start in range(0, wanted.shape[0], rows):
        chunk = slice(start, start + rows)
        v = _over_scale(wanted, scale, chunk)
        q = served.values[chunk].float()
        larger = v.abs() if base is None else v.abs().maximum(_over_scale(base, scale, chunk).abs())
        exponent = (torch.frexp(larger).exponent - 1).clamp_(min=lowest) - fp8.mantissa_bits
        step = torch.ldexp(torch.ones_like(v), exponent)
        error = (q - v).mul_(v.sign()).div_(step)  # positive: away from zero
        size = error.abs()
        large = v.abs() >= step
        within = large & (size <= allowed)
        small = (v.abs() > 1.25 * step) & (v.abs() < fp8.min_normal)
        beyond += float((size > allowed).sum())
        off += float((size > 0.5 + _TOLERANCE).sum())
        farthest = max(farthest, float(size.max()))
        drift += float(error[within].sum())
        energy += float(error[within].square().sum())
        near += float(within.sum())
        seen += int(large.sum())
        subnormal += float(small.sum())
        flushed += float((small & (q == 0)).sum())
    n, near = wanted.numel(), max(near, 1.0)
    flushed = flushed / subnormal if subnormal else 0.0
    return Steps(beyond / n, farthest, off / n, drift / near, energy / near, flushed, seen)


def _over_scale(weight: Tensor, scale: Tensor | None, rows: slice) -> Tensor:
    """Return rows of ``weight`` in the numbers that the format's values stand for without their scale."""
    chunk = weight[rows].float()
    if scale is None:
        return chunk
    factors = scale if scale.shape[0] == 1 else scale[rows]
    return (chunk.view(len(chunk), factors.shape[1], -1) / factors.unsqueeze(-1)).view(chunk.shape)


def honest(steps: Steps, merged: bool = False) -> bool:
    """Return whether errors are those of rounding to nearest or stochastically, of two roundings where ``merged``."""
    doubt = 3 / math.sqrt(max(steps.seen, 1))
    outliers = steps.beyond > (10 * _RARE if merged else _RARE) or steps.farthest > (2 * _MOST if merged else _MOST) + 2
    return not outliers and abs(steps.drift) < 0.1 + doubt and steps.energy < (0.42 if merged else 0.25) + doubt / 3


def same_in_bf16(numbers: Tensor, wanted: Tensor) -> bool:
    """Return whether both are the same but for a rounding to bf16 or fp16, and of the same size over all."""
    close = (numbers - wanted).abs_() <= wanted.abs().mul_(2.0**-7).add_(6e-8)
    return bool(close.all()) and abs(gain_of(numbers, wanted) - 1) < 1e-3 + 2.0**-8 / math.sqrt(wanted.numel())


def dot(a: Tensor, b: Tensor) -> float:
    """Return the sum of products, added up in float64."""
    return float((a * b).sum(dtype=torch.float64))


def relative(numbers: Tensor, wanted: Tensor) -> float:
    """Return |numbers - wanted| / |wanted|; 0 of 0 is 0, anything of 0 is 1."""
    difference = numbers - wanted
    error, size = dot(difference, difference), dot(wanted, wanted)
    return math.sqrt(error / size) if size else float(error > 0)


def gain_of(numbers: Tensor, wanted: Tensor) -> float:
    """Return the factor by which ``wanted`` comes nearest to ``numbers``; 1 of zeros."""
    size = dot(wanted, wanted)
    return dot(numbers, wanted) / size if size else 1.0


def group_gains(numbers: Tensor, wanted: Tensor, rows: int, blocks: int) -> Tensor:
    """Return [rows, blocks], the factor of each group that shares a scale; 1 where the reference is zero."""
    parts = [(x.view(x.shape[0], blocks, -1)) for x in (numbers, wanted)]
    products, sizes = (parts[0] * parts[1]).sum(-1, dtype=torch.float64), parts[1].square().sum(-1, dtype=torch.float64)
    if rows == 1:
        products, sizes = products.sum(0, keepdim=True), sizes.sum(0, keepdim=True)
    return torch.where(sizes > 0, products / sizes, torch.ones_like(sizes)).float()


def with_gains(quantized: Fp8Weight, gains: Tensor) -> Fp8Weight:
    """Return the same values with scales divided by ``gains``."""
    scale = quantized.factors
    return Fp8Weight(quantized.values, (scale / gains).float())


def spread(gains: Tensor, like: Tensor) -> Tensor:
    """Return ``gains`` [rows, blocks] as a matrix of the shape of ``like``."""
    return gains.repeat_interleave(like.shape[1] // gains.shape[1], 1).expand(like.shape)


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
    tries = (_misrounded, _zeroed, _clipped, _scaled, _rolled, _transposed, _permuted, _few_wrong)
    for attempt in tries:
        if found := attempt(served, wanted):
            return found
    return _of_another(served, wanted, others(), name) or _low_rank(served, wanted) or _elsewhere(served, wanted)


def _misrounded(served: ServedMatrix, wanted: Tensor) -> Diagnosis | None:
    if served.quantized is None:
        return None
    if found := _by_way_of_e5m2(served, wanted):
        return found
    steps = steps_of(served.quantized, wanted)
    only_flushed = steps.flushed > 0.5 and _beyond_are_flushed(served.quantized, wanted)
    if only_flushed:
        return "rounding_mode", f"numbers below {served.quantized.fp8.min_normal:g} times the scale became zero"
    if steps.beyond > _RARE or steps.farthest > _MOST + 2:
        return None
    if abs(steps.drift) > 0.3:
        toward = "toward zero" if steps.drift < 0 else "away from zero"
        return "rounding_mode", f"rounded {toward} instead of to nearest ({steps.drift:+.2f} steps in the mean)"
    if steps.energy > 0.28:
        return "rounding_mode", f"rounded to either neighbour at random ({math.sqrt(steps.energy * 12):.1f} x nearest)"
    return None


def _beyond_are_flushed(served: Fp8Weight, wanted: Tensor) -> bool:
    """Return whether the served numbers are honest but where they are zero for a subnormal number."""
    small = _over_scale(wanted, served.steps(), slice(None)).abs() < 1.07 * served.fp8.min_normal
    kept = torch.where((served.values.float() == 0) & small, torch.zeros(()), wanted)
    return steps_of(served, kept).beyond <= _RARE


def _by_way_of_e5m2(served: ServedMatrix, wanted: Tensor) -> Diagnosis | None:
    """Numbers of two mantissa bits in a format of three."""
    assert served.quantized is not None
    if served.quantized.fp8.mantissa_bits != 3:
        return None
    bits = served.quantized.values.view(torch.uint8)
    normal = (bits & 0x7F) >= 0x08
    odd = float((bits[normal] & 1).float().mean()) if bool(normal.any()) else 1.0
    if odd > 0.01 or relative(served.numbers, wanted) > 0.12:
        return None
    return "mixed_formats", "rounded to e5m2 before it was stored in e4m3fn"


def _zeroed(served: ServedMatrix, wanted: Tensor) -> Diagnosis | None:
    """Entries that are zero and should not be, beside others that are right."""
    zero = served.numbers == 0
    for what, gone in (("rows", zero.all(1)), ("columns", zero.all(0))):
        over = gone[:, None] if what == "rows" else gone[None]
        if bool(gone.any()) and served.fits(torch.where(over, torch.zeros(()), wanted)):
            return "zeroed", f"{int(gone.sum())} of {len(gone)} {what} are zero ({_runs(gone)})"
    lost = zero & (wanted.abs() > 0.02 * wanted.square().mean().sqrt())
    if not bool(lost.any()) or not served.fits(torch.where(zero, torch.zeros(()), wanted)):
        return None
    return "zeroed", f"{int(lost.sum())} of {lost.numel()} numbers are zero ({_box(lost)})"


def _scaled(served: ServedMatrix, wanted: Tensor) -> Diagnosis | None:
    """The reference times a factor for each group that shares a scale; the groups of a row are tried besides."""
    numbers = served.numbers
    scale = None if served.quantized is None else served.quantized.scale
    groups = (1, 1) if scale is None else tuple(scale.shape)
    for rows, blocks in dict.fromkeys(((1, 1), (numbers.shape[0], 1), groups)):
        gains = group_gains(numbers, wanted, rows, blocks)
        if bool((gains.abs() < 1e-4).any()) or not served.fits(wanted, gains):
            continue
        off = (gains - 1).abs() > (_FACTOR if gains.numel() > 1 else _GAIN)
        if not bool(off.any()):
            continue
        if gains.numel() == 1:
            factor = float(gains)
            return "wrong_scale", "its sign is flipped" if abs(factor + 1) < _FACTOR else f"times {factor:.3g}"
        if scale is not None and scale.shape == gains.shape and (moved := _moved_scales(scale, scale / gains)):
            return "wrong_scale", moved
        values = gains[off]
        low, high = float(values.min()), float(values.max())
        what = "rows" if blocks == 1 else "blocks"
        if abs(low + 1) < _FACTOR and abs(high + 1) < _FACTOR:
            return "wrong_scale", f"the sign of {int(off.sum())} of {gains.numel()} {what} is flipped"
        factors = f"times {low:.3g}" if high / low < 1 + _FACTOR else f"times {low:.3g} to {high:.3g}"
        return "wrong_scale", f"{int(off.sum())} of {gains.numel()} {what} {factors}"
    return None


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


def _clipped(served: ServedMatrix, wanted: Tensor) -> Diagnosis | None:
    """The reference, its largest numbers made smaller: in all, or row by row."""
    numbers = served.numbers.abs()
    for limit in (numbers.amax().reshape(1, 1), numbers.amax(1, keepdim=True)):
        outside = wanted.abs() > limit * 1.07  # half a step of e4m3fn
        if bool(outside.any()) and served.fits(wanted.clamp(-limit, limit)):
            low, high = float(limit.min()), float(limit.max())
            at = f"{high:.3g}" if low == high else f"{low:.3g} to {high:.3g}, row by row"
            return "clipped", f"{int(outside.sum())} of {wanted.numel()} numbers are clipped at {at}"
    return None


def _rolled(served: ServedMatrix, wanted: Tensor) -> Diagnosis | None:
    for shifts, how in _shifts(served.numbers, wanted):
        if served.fits(torch.roll(wanted, *shifts)):
            rows = wanted.shape[0]
            halves = " (its halves are exchanged)" if shifts == ((rows // 2, 0), (0, 1)) and rows % 2 == 0 else ""
            return "permuted", f"rolled by {how}{halves}"
    return None


def _transposed(served: ServedMatrix, wanted: Tensor) -> Diagnosis | None:
    if served.fits(wanted.t().reshape(wanted.shape)) or served.fits(wanted.reshape(wanted.shape[::-1]).t()):
        return "permuted", "transposed"
    if served.fits(wanted.flip(0)) or served.fits(wanted.flip(1)) or served.fits(wanted.flip(0, 1)):
        return "permuted", "in reverse order"
    return None


def _permuted(served: ServedMatrix, wanted: Tensor) -> Diagnosis | None:
    """Rows or columns in another order, found by their directions under a random projection."""
    for what, found, right in (("rows", served.numbers, wanted), ("columns", served.numbers.t(), wanted.t())):
        order = _order(found, right)
        moved = order != torch.arange(len(order))
        if not bool(moved.any()) or (int(moved.sum()) > 0 and len(order.unique()) < 0.9 * len(order)):
            continue
        candidate = wanted[order] if what == "rows" else wanted[:, order]
        text = f"{int(moved.sum())} of {len(order)} {what} are in another order ({_runs(moved)})"
        if served.fits(candidate):
            return "permuted", text
        gains = group_gains(served.numbers, candidate, served.numbers.shape[0], 1)
        if bool((gains.abs() > 1e-4).all()) and served.fits(candidate, gains):
            return "permuted", f"{text}, under the scales of the others"
    return None


def _order(found: Tensor, right: Tensor) -> Tensor:
    """Return for each row of ``found`` the row of ``right`` that points its way."""
    project = torch.randn(found.shape[1], 64, generator=generator("order", found.shape[1]))
    a, b = (torch.nn.functional.normalize(x @ project, dim=1) for x in (found, right))
    rows = max(1, _CHUNK // len(b))
    return torch.cat([(a[start : start + rows] @ b.t()).argmax(1) for start in range(0, len(a), rows)])


def _of_another(served: ServedMatrix, wanted: Tensor, others: Mapping[str, Tensor], name: str) -> Diagnosis | None:
    """Another layer's weights, told by a sample of the entries first."""
    places = torch.randint(0, wanted.numel(), (4096,), generator=generator("sample", *wanted.shape))
    sample = served.numbers.flatten()[places]
    for other, numbers in others.items():
        if other != name and _cosine(sample, numbers.flatten()[places].float()) > 0.8:
            high = numbers.float()
            gain = gain_of(served.numbers, high)
            near = min(wanted.shape) > 1 and relative(served.numbers, gain * high) < 0.3
            if near or served.fits(high):
                return "exchanged", f"holds the weights of {other.removesuffix('.weight')}"
    return None


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


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
