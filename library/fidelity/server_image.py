"""What a server really painted, beside the reference, and which habits of servers explain the difference.

The reference is run with the server's seed, number of steps, size and mask, then with one habit at a time of what a
server may do otherwise (``server_habits``), the common ones first. The number of the nearest is found, then what comes
nearest together with it, up to three at once. The search ends when one explains all.

What counts is decided in blocks of ``BLOCK`` pixels, a token's, of all pictures, as one picture has many of them: a
description is nearer than another one if the difference of their squared distances is above its noise over the blocks
(a z test, at 5 % over all that was tried), and if it is a real part of the whole. The best of many wrong guesses is
nearer, too: one that blurs, or paints less, comes nearer to anything. What those reach is measured
(``docs/precision.md``): a description that explains less than ``MOST`` explains nothing.

The noise is what ComfyUI (``comfy/sample.py``, ``prepare_noise``) and diffusers (``randn_tensor``) draw for a seed: on
the CPU, fp32, [1, C, h, w] before it is packed; a pipeline in bf16 draws it in bf16, which is another noise, and one of
the habits. Another sampler, prompt or picture are among what is not looked for.

A picture saved in 8 bits differs by 1/sqrt(12) of a step from the one that was painted, a JPEG by more: by what the
reference's own picture loses with the same quantisation tables. Nothing below that *floor* can be told apart.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from library.console import Console
from library.data.batches import Batch, ItemSource
from library.data.buckets import cover
from library.data.cache import load_pixels
from library.data.images import decode, to_image, to_pixels
from library.errors import UserError, counted, did_you_mean
from library.fidelity.border import RING
from library.fidelity.calibration import Calibration
from library.fidelity.conditioning import give
from library.fidelity.intervals import ratio_interval
from library.fidelity.runs import EvalSet, Outcome, batched, conditions_of, run_variant
from library.fidelity.server_habits import (
    IN_BF16,
    Habit,
    can_be_refined,
    described,
    habits_of,
    next_value,
    run_of,
    trained_level,
    words_of,
)
from library.fidelity.serving import REFERENCE, Models, Variant
from library.files import read_bytes
from library.precision.parity.seam import border_distance
from library.training.report.progress import counting

_STEPS = 127.5  # 8-bit steps in 1 of [-1, 1]
_ROUNDING = 1 / math.sqrt(12)
_NEAR = 1.5  # times the floor: as near as can be told
_UNSEEN, _UNSEEN_BLOCK = 1.0, 3.0  # 8-bit steps that nobody sees, rms of a picture and of a block
MOST = 0.9  # of the difference: a description that explains less explains nothing
SURELY = 0.97  # where more is left than bf16 makes: two wrong numbers, fitted, have explained 93 %
_MORE = 3.0  # times as much must be left with another seed
_ANOTHER_SEED = 1009
_ALL = 0.99  # that ends the search
_REAL = 0.01  # of the difference: less is not worth a name
BLOCK = 16
_HABITS, _KINDS, _NUMBERS, _MOST_RUNS = 3, 3, 6, 100
State = Literal["same", "declared", "explained", "tie", "unexplained"]


@dataclass(frozen=True)
class ServerPicture:
    """A picture that a server painted.

    Attributes:
        path: of the file. seed: of its noise. name: of the dataset's image that it belongs to; empty: found out.
    """

    path: Path
    seed: int
    name: str = ""


@dataclass(frozen=True)
class Description:
    """What a server may do, and how near its picture comes.

    Attributes:
        words: for people. habits: all at once; none is the reference.
        distances: of each picture, rms in 8-bit steps.
        left: squared distance in each block of all pictures beyond the floor's, [blocks].
        explained: share of the squared difference between server and reference that is gone with it; low, high: its
            95 % interval over blocks.
        images: that were painted, [3, H, W] each.
    """

    words: str
    habits: tuple[Habit, ...] = ()
    distances: tuple[float, ...] = ()
    left: Tensor = field(default_factory=lambda: torch.zeros(0))
    explained: float = 0.0
    low: float = math.nan
    high: float = math.nan
    images: tuple[Tensor, ...] = ()

    @property
    def distance(self) -> float:
        """Rms over all pictures, in 8-bit steps."""
        return _rms(self.distances)

    @property
    def is_unseen(self) -> bool:
        """Whether nobody sees that the pictures are others, in no block of them."""
        worst = math.sqrt(max(0.0, float(self.left.max()))) if len(self.left) else 0.0
        return self.distance <= _UNSEEN and worst <= _UNSEEN_BLOCK

    @property
    def changes(self) -> dict[str, Any]:
        """What all habits change."""
        return {name: value for habit in self.habits for name, value in habit.items()}


@dataclass(frozen=True)
class ServerResult:
    """What is known of a server by its pictures.

    Attributes:
        names: of the files. steps: of the sampling runs.
        painted: the server's pictures, [3, H, W] each in [-1, 1]. reference: the description that changes nothing.
        descriptions: the others, the nearest first; one that adds nothing to another comes after it.
        floor: what saving the picture makes, rms in 8-bit steps.
        rivals: that cannot be told from the nearest.
        parts: of each habit of the nearest, the share of the squared difference that it takes off.
        declared: what the deployment was said to do. trained: what the region is blanked with in training, in [-1, 1].
        rounding: how far something in bf16 puts the reference's pictures off, as another card or program may.
        by_chance: share that the nearest explains with another seed.
        along, elsewhere: rms distance from the reference within 8 pixels of the mask's border, and beyond, in 8-bit
            steps; NaN without one.
    """

    names: tuple[str, ...]
    steps: int
    painted: tuple[Tensor, ...]
    reference: Description
    descriptions: tuple[Description, ...]
    floor: float
    rivals: tuple[Description, ...] = ()
    parts: tuple[float, ...] = ()
    declared: Variant = REFERENCE
    trained: float | None = None
    rounding: float = 0.0
    by_chance: float = 0.0
    along: float = math.nan
    elsewhere: float = math.nan

    @property
    def nearest(self) -> Description:
        """The description that comes nearest."""
        return self.descriptions[0] if self.descriptions else self.reference

    @property
    def state(self) -> State:
        """What can be said."""
        if self.reference.is_unseen or self.is_near(self.reference):
            return "same"
        if not self.is_named:
            return "same" if self.reference.distance <= self.rounding else "unexplained"
        precision, _ = described(self.declared)
        if all(name in precision and precision[name] == value for name, value in self.nearest.changes.items()):
            return "declared"
        return "tie" if self.rivals else "explained"

    @property
    def is_named(self) -> bool:
        """Whether the nearest explains most, all but what bf16 makes, and much more than it does with another seed."""
        small = self.nearest.explained >= SURELY or self.nearest.distance <= self.rounding
        return self.nearest.explained >= MOST and small and 1 - self.by_chance > _MORE * self.unexplained

    @property
    def unexplained(self) -> float:
        """Share of the squared difference that the nearest leaves."""
        return max(0.0, 1 - self.nearest.explained)

    @property
    def looked_at(self) -> set[str]:
        """Names of what was tried; of all where one explains everything."""
        everything = self.state == "same" or (self.state != "unexplained" and self.nearest.explained >= _ALL)
        tried = {name for each in self.descriptions for name in each.changes}
        return tried | ({*vars(REFERENCE)} if everything else set())

    def is_near(self, description: Description) -> bool:
        """Return whether saving the picture makes as much of a difference."""
        return description.distance <= _NEAR * self.floor

    def lines(self, most: int = 10) -> list[str]:
        """Return the nearest descriptions, one a line."""
        rows = [(each.distance, each.explained, each.words) for each in (*self.descriptions[:most], self.reference)]
        return [f"  {distance:7.2f}  {share:6.1%}  {words}" for distance, share, words in rows]

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        rows = [
            {"words": each.words, "distance": each.distance, "explained": each.explained, "by_picture": each.distances}
            for each in (self.reference, *self.descriptions)
        ]
        names = ("state", "steps", "floor", "along", "elsewhere", "unexplained")
        found = {name: getattr(self, name) for name in names} | {"pictures": self.names, "descriptions": rows}
        return found | {"rivals": [each.words for each in self.rivals]}


def explain_server(
    models: Models,
    declared: Variant,
    calibration: Calibration,
    pictures: Sequence[ServerPicture],
    steps: int,
    console: Console,
) -> ServerResult:
    """Return which habits of servers explain what one painted.

    Args:
        models, declared: the deployment as it was declared, one of the descriptions.
        calibration: has the dataset.
        pictures: that the server painted.
        steps: of its sampler.
        console: for the number of runs, the time they take, and progress.

    Raises:
        UserError: a picture cannot be read, belongs to no image, or has a size that the model cannot paint.
    """
    painted = [to_pixels(decode(read_bytes(str(each.path)), str(each.path))[0]) for each in pictures]
    eval_set = _eval_set(models, calibration, pictures, painted, steps)
    runs = f"{counted(len(pictures), 'server picture')}: at most {_MOST_RUNS} sampling runs each"
    console.print(f"{runs}, fewer when one explains all; the reference's own run says how long")
    began = time.perf_counter()
    with ExitStack() as stack, counting(console) as progress:
        search = _Search(models, eval_set, pictures, painted, stack, lambda _: None)
        seconds = time.perf_counter() - began
        console.print(f"{runs} of {seconds / len(pictures):.1f} s: {seconds * _MOST_RUNS / 60:.1f} minutes at most")
        search.advance = progress("what the server does", _MOST_RUNS)
        found = search.ordered(search.nearest(habits_of(models, declared, eval_set)))
    masks = [eval_set.border_mask(number) for number in range(len(pictures))]
    along, elsewhere = _along(painted, search.reference.images, masks)
    return ServerResult(
        names=tuple(each.path.name for each in pictures),
        steps=steps,
        painted=tuple(painted),
        reference=search.reference,
        descriptions=found,
        floor=_rms(search.floors),
        rivals=search.rivals(found[0]) if found else (),
        parts=search.parts(found[0]) if found else (),
        declared=declared,
        trained=trained_level(eval_set),
        rounding=search.rounding(),
        by_chance=search.with_another_seed(found[0]) if found else 0.0,
        along=along,
        elsewhere=elsewhere,
    )


@dataclass
class _Search:
    """Paints as a server may, each description once, and keeps what it painted.

    Attributes:
        done: changes -> description. network: the transformer that is loaded, and what it runs as.
    """

    models: Models
    eval_set: EvalSet
    pictures: Sequence[ServerPicture]
    painted: Sequence[Tensor]
    stack: ExitStack
    advance: Callable[[int], None]
    done: dict[tuple[str, ...], Description] = field(default_factory=dict)
    floors: list[float] = field(default_factory=list)
    _network: tuple[Any, Any] | None = None

    def __post_init__(self) -> None:
        """Paint the reference."""
        images = self._run({}).images
        self.floors = [_floor(each.path, image) for each, image in zip(self.pictures, images, strict=True)]
        self.reference = Description("the reference")
        self.reference = self.done[()] = self._judged(self.reference, images)

    def nearest(self, tiers: Sequence[Sequence[Habit]]) -> Description:
        """Return what comes nearest of one tier after another, until one explains all."""
        best = self.reference
        if self._near(best) or best.is_unseen:
            return best
        pool: list[Habit] = []
        for tier in tiers:
            pool += tier
            best = self._greedy(pool)
            if self._settled(best):
                break
        return best

    def _greedy(self, pool: Sequence[Habit]) -> Description:
        """Return the best habit, the best that adds to it, and so on, without those that add nothing."""
        best = coarse = self.reference
        for _ in range(_HABITS):
            free = [habit for habit in pool if not habit.keys() & coarse.changes.keys() and self._moves(habit, coarse)]
            found = [each for habit in self._by_network(free) if (each := self.paint((*coarse.habits, habit)))]
            found.sort(key=lambda each: self._promise(each, coarse), reverse=True)
            kinds = {tuple(each.changes): each for each in found}  # the best of each kind, which is the last
            chosen = sorted(kinds.values(), key=lambda each: self._promise(each, coarse))
            chosen = chosen[: 1 if any(map(self._near, found)) else _KINDS]
            pairs = [(self._refined(each), each) for each in chosen]
            nearer, coarser = min(pairs, key=lambda pair: _left(pair[0]), default=(best, coarse))
            if not self._is_nearer(nearer, best):
                break
            best, coarse = nearer, coarser  # a number that was fitted to one habit alone hides the other
            if self._settled(best):
                break
        while len(best.habits) > 1:
            without = [self.paint(tuple(one for one in best.habits if one is not each)) for each in best.habits]
            fewer = next((each for each in without if each and not self._is_nearer(best, each)), None)
            if fewer is None:
                break
            best = fewer
        return best

    def _refined(self, found: Description) -> Description:
        """Return ``found`` with the number of each habit that has one nearest to the pictures'."""
        places = [place for place, habit in enumerate(found.habits) if can_be_refined(habit)][::-1]  # the new one first
        for place in [*places, *places] if len(places) > 1 else places:
            ((name, _),) = found.habits[place].items()
            before, after = found.habits[:place], found.habits[place + 1 :]
            for _ in range(_NUMBERS):
                tried = {
                    each.changes.get(name, self._neutral(name)): each
                    for each in self.done.values()
                    if {n: v for n, v in each.changes.items() if n != name} == _merged((*before, *after))
                }
                numbers = {v: _left(each) for v, each in tried.items() if isinstance(v, int | float)}
                nearest = min(numbers, key=lambda v: numbers[v])
                value = None if self._near(tried[nearest]) else next_value(name, numbers)
                if value is None or not self.paint((*before, {name: value}, *after)):
                    break
            if name not in tried[nearest].changes:  # the reference's own number
                return tried[nearest]
            found = replace(tried[nearest], habits=(*before, {name: nearest}, *after))
        return found

    def _promise(self, one: Description, base: Description) -> float:
        """Return the squared distance that ``one`` leaves, of a number the least that another one could leave.

        That is what the projection of the difference upon the change leaves: in the first order its pictures go along
        a line.
        """
        if not can_be_refined(one.habits[-1]):
            return _left(one)
        moved = float(self._squares(one.images, base.images).sum())
        along = (_left(base) + moved - _left(one)) / 2
        return _left(base) - (along**2 / moved if along > 0 and moved > 0 else 0.0)

    def _neutral(self, name: str) -> float | None:
        """Return which number of a habit is the reference's."""
        return {
            "mask_grow": 0,
            "mask_blur": 0.0,
            "strength": 1.0,
            "guidance": self.eval_set.guidance,
            "blank": trained_level(self.eval_set),
        }.get(name)

    def paint(self, habits: tuple[Habit, ...]) -> Description | None:
        """Return the description of all ``habits``; None where the runs are used up."""
        changes = _merged(habits)
        key = _key(changes)
        if key not in self.done:
            if len(self.done) > _MOST_RUNS:
                return None
            words = " and ".join(words_of(habit) for habit in habits)
            self.done[key] = self._judged(Description(words, habits), self._run(changes).images)
            self.advance(1)
        return self.done[key]

    def _run(self, changes: Habit) -> Outcome:
        variant, run = run_of(changes)
        pairs = zip(self.eval_set.batches, self.pictures, strict=True)
        noise = [_noise(batch.latents, each.seed + run["seed"], run["noise"]) for batch, each in pairs]
        given = replace(self.eval_set, noise=noise, steps=self.eval_set.steps + run["steps"])
        runs_as = self.models.runs_as(variant)
        if self._network is None or self._network[0] != runs_as:
            self.stack.close()
            self._network = (runs_as, self.stack.enter_context(self.models.transformer(variant)))
        return run_variant(self.models, variant, given, Console(quiet=True), "", self._network[1])

    def _by_network(self, habits: Sequence[Habit]) -> list[Habit]:
        """Return ``habits`` with those that run on one network side by side."""
        kinds = [self.models.runs_as(run_of(habit)[0]) for habit in habits]
        return [habits[place] for place in sorted(range(len(habits)), key=lambda place: kinds.index(kinds[place]))]

    def _judged(self, description: Description, images: Sequence[Tensor]) -> Description:
        pairs = zip(images, self.painted, strict=True)
        distances = tuple(_STEPS * float((a.clamp(-1, 1) - b).double().square().mean().sqrt()) for a, b in pairs)
        left = self._squares(images, self.painted) - self._blocks([floor**2 for floor in self.floors])
        found = replace(description, distances=distances, images=tuple(images), left=left)
        whole = self.done[()].left if self.done else found.left
        if float(whole.sum()) <= 0:
            return found
        low, high = ratio_interval((whole - found.left).tolist(), whole.tolist())
        explained = 1 - _left(found) / float(whole.sum())
        return replace(found, explained=explained, low=low, high=min(1.0, high))

    def _squares(self, images: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        """Return the mean squared difference of each block of all pictures, [blocks], in 8-bit steps."""
        squares = [
            (_STEPS * (one.clamp(-1, 1) - other.clamp(-1, 1))).double().square().mean(0)
            for one, other in zip(images, others, strict=True)
        ]
        return torch.cat([F.avg_pool2d(each[None], BLOCK).flatten() for each in squares])

    def _blocks(self, values: Sequence[float]) -> Tensor:
        """Return each picture's value for each of its blocks."""
        sizes = [each.shape[-1] // BLOCK * (each.shape[-2] // BLOCK) for each in self.painted]
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(torch.tensor(sizes))

    def _near(self, description: Description) -> bool:
        return description.distance <= _NEAR * _rms(self.floors)

    def _settled(self, description: Description) -> bool:
        return self._near(description) or description.explained >= _ALL

    def _moves(self, habit: Habit, best: Description) -> bool:
        """Return whether ``habit`` alone changes the reference's pictures by enough for what ``best`` leaves."""
        alone = self.done.get(_key(habit))
        if alone is None:
            return True
        return float(self._squares(alone.images, self.reference.images).sum()) >= 0.02 * _left(best)

    def _is_nearer(self, one: Description, other: Description) -> bool:
        """Return whether ``one`` is nearer than ``other`` by more than chance, and by enough to matter."""
        more = other.left - one.left
        doubt = float(more.std()) / math.sqrt(len(more))
        sure = NormalDist().inv_cdf(1 - 0.05 / max(2, len(self.done)))
        told = float(more.mean()) > sure * doubt or other.distance > _NEAR * one.distance
        return told and float(more.sum()) > _REAL * _left(self.reference)

    def rivals(self, best: Description) -> tuple[Description, ...]:
        """Return what explains most as well and cannot be told from ``best``, of other habits."""
        names = {*best.changes}
        others = [each for each in self.done.values() if each.explained >= MOST and {*each.changes} != names]
        others = [each for each in others if not {*each.changes} > names and each.distance <= _NEAR * best.distance]
        found = [each for each in others if not self._is_nearer(best, each)]
        return tuple(sorted(found, key=_left))

    def parts(self, best: Description) -> tuple[float, ...]:
        """Return the share that each habit of ``best`` takes off: what is lost without it, in proportion."""
        if len(best.habits) < 2:
            return (best.explained,) * len(best.habits)
        without = [self.paint(tuple(one for one in best.habits if one is not each)) for each in best.habits]
        lost = [max(0.0, _left(each) - _left(best)) if each else 0.0 for each in without]
        return tuple(best.explained * each / (sum(lost) or 1.0) for each in lost)

    def rounding(self) -> float:
        """Return how far off one thing in bf16 puts the reference's pictures at most, in 8-bit steps."""
        done = [each for key in IN_BF16 if (each := self.done.get(_key(key)))]
        return max((math.sqrt(float(self._squares(d.images, self.reference.images).mean())) for d in done), default=0.0)

    def ordered(self, best: Description) -> tuple[Description, ...]:
        """Return all but the reference, ``best`` first, then the nearest; pictures of the first alone."""
        others = sorted((each for each in self.done.values() if each.changes not in ({}, best.changes)), key=_left)
        first, *rest = [*([best] if best.habits else []), *others] or [best]
        return (first, *(replace(each, images=()) for each in rest)) if first.habits else ()

    def with_another_seed(self, best: Description) -> float:
        """Return the share that ``best`` explains with another seed: what comes near without the noise is chance."""
        images = self._run(best.changes | {"seed": _ANOTHER_SEED}).images
        return self._judged(best, images).explained


def _merged(habits: Sequence[Habit]) -> dict[str, Any]:
    return {name: value for habit in habits for name, value in habit.items()}


def _key(changes: Habit) -> tuple[str, ...]:
    return tuple(sorted(f"{name} {value}" for name, value in changes.items()))


def _left(description: Description) -> float:
    return max(0.0, float(description.left.sum()))


def _along(
    painted: Sequence[Tensor], reference: Sequence[Tensor], masks: Sequence[Tensor | None]
) -> tuple[float, float]:
    """Return the rms difference within 8 pixels of the masks' borders, and beyond, in 8-bit steps; NaN without one."""
    near, far = [], []
    for one, other, mask in zip(painted, reference, masks, strict=True):
        if mask is not None:
            at = border_distance(mask, RING) <= RING
            squares = (_STEPS * (one - other.clamp(-1, 1))).double().square().mean(0)
            near.append(squares[at])
            far.append(squares[~at])
    if not near:
        return math.nan, math.nan
    return float(torch.cat(near).mean().sqrt()), float(torch.cat(far).mean().sqrt())


def _eval_set(
    models: Models,
    calibration: Calibration,
    pictures: Sequence[ServerPicture],
    painted: Sequence[Tensor],
    steps: int,
) -> EvalSet:
    """Return the dataset's images that ``pictures`` belong to, at the pictures' sizes."""
    encoder, kind = models.image_encoder(REFERENCE), models.family.conditioning
    batches, pixels, jobs = [], [], []
    for picture, image in zip(pictures, painted, strict=True):
        size, multiple = (image.shape[-1], image.shape[-2]), encoder.pixel_multiple
        if size[0] % multiple or size[1] % multiple:
            raise UserError(
                f"--server_image {picture.path}: {size[0]} x {size[1]} pixels, and the model paints multiples of "
                f"{multiple}; give the picture as it was painted, not resized or cropped"
            )
        source = _source(calibration, picture)
        of_file = source.sample.image.size
        assert of_file is not None, "sizes are read when a dataset is scanned"
        sample = replace(source.sample, fit=cover(of_file, size))
        fitted = load_pixels(sample, False, 0, source.sample_id, source.seed)
        text = batched(calibration.data.text_embeddings(source.text), models)
        conditions = conditions_of(give(fitted, kind, REFERENCE), kind, REFERENCE, encoder, models)
        latents, ids = encoder.encode(fitted.image[None]), [source.sample_id]
        batch = Batch(latents, text, torch.ones(1), None, ids, [source.text.caption], conditions)
        batches.append(batch.to(models.device))
        pixels.append(fitted)
        jobs.append(source.text)
    options = calibration.plan.options
    return EvalSet(batches, pixels, jobs, kind, (), steps, options.guidance_scale, options.seed)


def _source(calibration: Calibration, picture: ServerPicture) -> ItemSource:
    """Return the dataset's image that ``picture`` belongs to: the one named, that of its name, the only one."""
    dataset = calibration.data.train
    by_name = {Path(sample.image.path).stem: number for number, sample in enumerate(dataset.samples)}
    wanted = Path(picture.name or picture.path).stem
    number = by_name.get(wanted, 0 if len(by_name) == 1 and not picture.name else None)
    if number is None:
        raise UserError(
            f"--server_image {picture.path}: the dataset has no image {wanted!r}{did_you_mean(wanted, by_name)}; write "
            "FILE=NAME with the name of the image that it was painted from"
        )
    return dataset.source((0, sum(sample.repeats for sample in dataset.samples[:number])))


def _noise(latents: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return noise.to(latents)


def _floor(path: Path, image: Tensor) -> float:
    """Return what saving ``image`` [3, H, W] as the file ``path`` is saved changes, rms in 8-bit steps."""
    with Image.open(path) as opened:
        tables = getattr(opened, "quantization", None) if opened.format == "JPEG" else None
        if opened.format in ("PNG", "BMP", "TIFF") or not (tables or opened.format in ("JPEG", "WEBP")):
            return _ROUNDING
    saved = io.BytesIO()
    to_image(image).save(saved, "JPEG", **({"qtables": tables} if tables else {"quality": 90}))
    lossy = to_pixels(Image.open(saved))
    return max(_ROUNDING, _STEPS * float((lossy - image.clamp(-1, 1)).double().square().mean().sqrt()))


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values)) if values else 0.0
