"""What a server really painted, beside the reference, and which habits of servers explain the difference.

The reference is run with the server's seed, number of steps, size and mask, then with one habit at a time of what a
server may do otherwise (``server_habits``), the common ones first. The number of the nearest is found, then what comes
nearest together with it, up to three at once. The search ends when one explains all.

What counts is decided in blocks of ``BLOCK`` pixels, a token's, of all pictures, as one picture has many of them: a
description is nearer than another one if the difference of their squared distances is above its noise over the blocks
(a z test, at 5 % over all that was tried), and if it is a real part of the whole. The best of many wrong guesses is
nearer, too: one that blurs, or paints less, comes nearer to anything, and two fitted numbers have explained 93 %. So a
description that explains less than ``SURELY`` counts for nothing, or less than ``MOST`` where bf16 makes the rest.

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
from PIL.JpegImagePlugin import get_sampling
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
from library.fidelity.runs import EvalSet, batched, conditions_of, run_variant
from library.fidelity.server_habits import (
    IN_BF16,
    Habit,
    can_be_refined,
    files_of,
    habits_of,
    next_value,
    promise,
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
MOST, SURELY = 0.9, 0.97  # shares of the difference that have to be explained
_ALL = 0.99  # that ends the search
_REAL = 0.01  # of the difference: less is not worth a name
BLOCK = 16
_QUALITIES = (75, 80, 85, 90, 92, 95, 98)  # of JPEGs, as programs set them
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
        habits: all at once; none is the reference.
        distance: from all pictures, rms in 8-bit steps. floor: what saving them makes of it.
        left: squared distance in each block of all pictures beyond the floor's, [blocks].
        explained: share of the squared difference between server and reference that is gone with it; low, high: its
            95 % interval over blocks.
        images: that were painted, [3, H, W] each.
    """

    habits: tuple[Habit, ...] = ()
    distance: float = 0.0
    floor: float = _ROUNDING
    left: Tensor = field(default_factory=lambda: torch.zeros(1))
    explained: float = 0.0
    low: float = math.nan
    high: float = math.nan
    images: tuple[Tensor, ...] = ()

    @property
    def words(self) -> str:
        """The habits for people."""
        return " and ".join(map(words_of, self.habits)) or "the reference"

    @property
    def changes(self) -> dict[str, Any]:
        """What all habits change."""
        return {name: value for habit in self.habits for name, value in habit.items()}

    @property
    def is_near(self) -> bool:
        """Whether saving the pictures makes as much of a difference."""
        return self.distance <= _NEAR * self.floor

    @property
    def is_unseen(self) -> bool:
        """Whether nobody sees that the pictures are others, in no block of them."""
        return self.distance <= _UNSEEN and float(self.left.max()) <= _UNSEEN_BLOCK**2

    @property
    def explains_all(self) -> bool:
        """Whether there is nothing more to look for."""
        return self.is_near or self.explained >= _ALL


@dataclass(frozen=True)
class ServerResult:
    """What is known of a server by its pictures.

    Attributes:
        names: of the files. steps: of the sampling runs.
        painted: the server's pictures, [3, H, W] each in [-1, 1]. reference: the description that changes nothing.
        descriptions: the others, the nearest first; one that adds nothing to another comes after it.
        rivals: that cannot be told from the nearest.
        parts: of each habit of the nearest, the share of the squared difference that it takes off.
        declared: what the deployment was said to do. trained: what the region is blanked with in training, in [-1, 1].
        rounding: how far something in bf16 puts the reference's pictures off, as another card or program may.
        along, elsewhere: rms distance from the reference within 8 pixels of the mask's border, and beyond, in 8-bit
            steps; NaN without one.
    """

    names: tuple[str, ...]
    steps: int
    painted: tuple[Tensor, ...]
    reference: Description
    descriptions: tuple[Description, ...]
    rivals: tuple[Description, ...] = ()
    parts: tuple[float, ...] = ()
    declared: Variant = REFERENCE
    trained: float | None = None
    rounding: float = 0.0
    along: float = math.nan
    elsewhere: float = math.nan

    @property
    def nearest(self) -> Description:
        """The description that comes nearest."""
        return self.descriptions[0] if self.descriptions else self.reference

    @property
    def state(self) -> State:
        """What can be said."""
        best, far = self.nearest, self.reference
        if far.is_unseen or far.is_near:
            return "same"
        if best.explained < (MOST if best.distance <= self.rounding else SURELY):  # no more than chance, or bf16, makes
            return "same" if far.distance <= self.rounding else "unexplained"
        if best.changes.items() <= files_of(self.declared).items():
            return "declared"
        return "tie" if self.rivals else "explained"

    @property
    def unexplained(self) -> float:
        """Share of the squared difference that the nearest leaves."""
        return max(0.0, 1 - self.nearest.explained)

    @property
    def looked_at(self) -> set[str]:
        """Names of what was tried; of all where one explains everything."""
        everything = self.state == "same" or (self.state != "unexplained" and self.nearest.explains_all)
        tried = {name for each in self.descriptions for name in each.changes}
        return tried | ({*vars(REFERENCE)} if everything else set())

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        shown, names = ("words", "distance", "explained"), ("state", "steps", "along", "elsewhere", "unexplained")
        rows = [{name: getattr(each, name) for name in shown} for each in (self.reference, *self.descriptions)]
        found = {"pictures": self.names, "floor": self.reference.floor, "descriptions": rows}
        return found | {name: getattr(self, name) for name in names} | {"rivals": [each.words for each in self.rivals]}


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
    began = time.perf_counter()
    with ExitStack() as stack, counting(console) as progress:
        search = _Search(models, eval_set, pictures, painted, stack)
        minutes = (time.perf_counter() - began) * _MOST_RUNS / 60
        runs = f"{counted(len(pictures), 'server picture')}: at most {_MOST_RUNS} sampling runs"
        console.print(f"{runs} each, {minutes:.1f} minutes; fewer when one description explains all")
        search.advance = progress("what the server does", _MOST_RUNS)
        best = search.nearest(habits_of(models, declared, eval_set))
        tried = [each for each in search.done.values() if each.habits]
        found = sorted(tried, key=lambda each: (bool(best.habits) and each is not best, _left(each)))
        rivals, parts = (search.rivals(found[0]), search.parts(found[0])) if found else ((), ())
    masks = [eval_set.border_mask(number) for number in range(len(pictures))]
    along, elsewhere = _along(painted, search.reference.images, masks)
    return ServerResult(
        names=tuple(each.path.name for each in pictures),
        steps=steps,
        painted=tuple(painted),
        reference=search.reference,
        descriptions=tuple(found),
        rivals=rivals,
        parts=parts,
        declared=declared,
        trained=trained_level(eval_set),
        rounding=search.rounding(),
        along=along,
        elsewhere=elsewhere,
    )


@dataclass(eq=False)
class _Search:
    """Paints as a server may, each description once, and keeps what it painted.

    Attributes:
        stack: keeps the network that is loaded. done: changes -> description.
    """

    models: Models
    eval_set: EvalSet
    pictures: Sequence[ServerPicture]
    painted: Sequence[Tensor]
    stack: ExitStack
    advance: Callable[[int], None] = lambda _: None
    done: dict[frozenset[tuple[str, Any]], Description] = field(default_factory=dict)
    _network: tuple[Any, Any] | None = None

    def __post_init__(self) -> None:
        """Paint the reference."""
        images = self._run({})
        of_files = zip(self.pictures, images, self.painted, strict=True)
        self.floors = [_floor(each.path, image, painted) for each, image, painted in of_files]
        self.reference = self.done[frozenset()] = self._judged(Description(), images)

    def nearest(self, tiers: Sequence[Sequence[Habit]]) -> Description:
        """Return what comes nearest of one tier after another, until one explains all."""
        best = self.reference
        if best.is_near or best.is_unseen:
            return best
        pool: list[Habit] = []
        for tier in tiers:
            pool += tier
            best = self._greedy(pool)
            if best.explains_all:
                break
        return best

    def _greedy(self, pool: Sequence[Habit]) -> Description:
        """Return the best habit, the best that adds to it, and so on, without those that add nothing."""
        best = coarse = self.reference
        for _ in range(_HABITS):
            free = [habit for habit in pool if not habit.keys() & coarse.changes.keys() and self._moves(habit, coarse)]
            free.sort(key=lambda habit: str(self.models.runs_as(run_of(habit)[0])))  # a network is loaded once
            found = [each for habit in free if (each := self.paint((*coarse.habits, habit)))]
            kinds: dict[tuple[Any, ...], Description] = {}
            for each in sorted(found, key=_left):
                kinds.setdefault((*each.changes, can_be_refined(each.habits[-1])), each)  # noise is no grey
            chosen = sorted(kinds.values(), key=self._promise)[: 1 if any(each.is_near for each in found) else _KINDS]
            pairs = [(self._refined(each), each) for each in chosen]
            nearer, coarser = min(pairs, key=lambda pair: _left(pair[0]), default=(best, coarse))
            if not self._is_nearer(nearer, best):
                break
            best, coarse = nearer, coarser  # a number that was fitted to one habit alone hides the other
            if best.explains_all:
                break
        while fewer := next((each for each in self._without_one(best) if not self._is_nearer(best, each)), None):
            best = fewer
        return best

    def _promise(self, found: Description) -> float:
        """Return what the newest habit of ``found`` may leave with another number, the reference's own among them."""
        if not can_be_refined(found.habits[-1]):
            return _left(found)
        (name,) = found.habits[-1]
        return promise({value: _left(each) for value, each in self._tried(name, found).items()})

    def _refined(self, found: Description) -> Description:
        """Return ``found`` with the number of each habit that has one nearest to the pictures', the newest first."""
        names = [name for habit in found.habits[::-1] if can_be_refined(habit) for name in habit]
        for name in names * min(2, len(names)):
            habits = found.habits
            for _ in range(_NUMBERS):
                tried = self._tried(name, found)
                found = min(tried.values(), key=_left)
                best = found.is_near and found.explained >= _ALL
                value = None if best else next_value(name, {v: _left(each) for v, each in tried.items()})
                if value is None or not self.paint(tuple({name: value} if name in each else each for each in habits)):
                    break
            found = min(self._tried(name, found).values(), key=_left)
            if name not in found.changes:  # the reference's own number
                break
        return found

    def _tried(self, name: str, like: Description) -> dict[float, Description]:
        """Return number of the habit ``name`` -> what was painted with it, and with all else as in ``like``."""
        own = {"guidance": self.eval_set.guidance, "blank": trained_level(self.eval_set)}
        numbers, others = {}, like.changes | {name: None}
        for each in self.done.values():
            value = each.changes.get(name, own.get(name, getattr(REFERENCE, name)))
            if isinstance(value, int | float) and each.changes | {name: None} == others:
                numbers[value] = each
        return numbers

    def paint(self, habits: tuple[Habit, ...]) -> Description | None:
        """Return the description of all ``habits``; None where the runs are used up."""
        description = Description(habits)
        key = frozenset(description.changes.items())
        if key not in self.done:
            if len(self.done) > _MOST_RUNS:
                return None
            self.done[key] = self._judged(description, self._run(description.changes))
            self.advance(1)
        return self.done[key]

    def _run(self, changes: Habit) -> Sequence[Tensor]:
        """Return the images of a sampling run with ``changes``."""
        variant, run = run_of(changes)
        noise = []
        for batch, picture in zip(self.eval_set.batches, self.pictures, strict=True):
            random = torch.Generator().manual_seed(picture.seed + run["seed"])
            noise.append(torch.randn(batch.latents.shape, generator=random, dtype=run["noise"]).to(batch.latents))
        given = replace(self.eval_set, noise=noise, steps=self.eval_set.steps + run["steps"])
        runs_as = self.models.runs_as(variant)
        if self._network is None or self._network[0] != runs_as:
            self.stack.close()
            self._network = (runs_as, self.stack.enter_context(self.models.transformer(variant)))
        return run_variant(self.models, variant, given, Console(quiet=True), "", self._network[1]).images

    def _judged(self, description: Description, images: Sequence[Tensor]) -> Description:
        """Return ``description``, which painted ``images``, with how near they come."""
        squares = [_in_blocks(_squares(*pair)) for pair in zip(images, self.painted, strict=True)]
        left = torch.cat([each - floor**2 for each, floor in zip(squares, self.floors, strict=True)])
        distance, floor = math.sqrt(torch.cat(squares).mean()), math.sqrt(torch.tensor(self.floors).square().mean())
        found = replace(description, distance=distance, floor=floor, left=left, images=tuple(images))
        if not description.habits:
            return found
        whole = self.reference.left
        low, high = ratio_interval((whole - left).tolist(), whole.tolist())
        return replace(found, explained=1 - _left(found) / float(whole.sum()), low=low, high=min(1.0, high))

    def _moved(self, description: Description) -> Tensor:
        """Return by how much the habits change the reference's pictures, squared, [blocks]."""
        pairs = zip(description.images, self.reference.images, strict=True)
        return torch.cat([_in_blocks(_squares(*pair)) for pair in pairs])

    def _moves(self, habit: Habit, best: Description) -> bool:
        """Return whether ``habit`` alone changes the reference's pictures by enough for what ``best`` leaves."""
        alone = self.done.get(frozenset(habit.items()))
        return alone is None or float(self._moved(alone).sum()) >= 0.02 * _left(best)

    def _is_nearer(self, one: Description, other: Description) -> bool:
        """Return whether ``one`` is nearer than ``other`` by more than chance, and by enough to matter."""
        more = other.left - one.left
        doubt = float(more.std()) / math.sqrt(len(more))
        sure = NormalDist().inv_cdf(1 - 0.05 / max(2, len(self.done)))
        told = float(more.mean()) > sure * doubt or other.distance > _NEAR * one.distance
        return told and float(more.sum()) > _REAL * _left(self.reference)

    def _without_one(self, best: Description) -> list[Description]:
        """Return ``best`` without each of its habits, where it has several; fewer where the runs are used up."""
        several = best.habits if len(best.habits) > 1 else ()
        fewer = [self.paint(tuple(one for one in best.habits if one is not each)) for each in several]
        return [each for each in fewer if each]

    def rivals(self, best: Description) -> tuple[Description, ...]:
        """Return what explains most as well and cannot be told from ``best``, of other habits."""
        others = [
            each for each in self.done.values() if each.explained >= MOST and not {*each.changes} >= {*best.changes}
        ]
        others = [each for each in others if each.distance <= _NEAR * best.distance and not self._is_nearer(best, each)]
        return tuple(sorted(others, key=_left))

    def parts(self, best: Description) -> tuple[float, ...]:
        """Return the share that each habit of ``best`` takes off: what is lost without it, in proportion."""
        without = self._without_one(best)
        if len(without) < len(best.habits):
            return (best.explained / len(best.habits),) * len(best.habits)
        lost = [max(0.0, _left(each) - _left(best)) for each in without]
        return tuple(best.explained * each / (sum(lost) or 1.0) for each in lost)

    def rounding(self) -> float:
        """Return how far off one thing in bf16 puts the reference's pictures at most, in 8-bit steps."""
        done = [each for habit in IN_BF16 if (each := self.done.get(frozenset(habit.items())))]
        return max((math.sqrt(self._moved(each).mean()) for each in done), default=0.0)


def _squares(one: Tensor, other: Tensor) -> Tensor:
    """Return the squared difference of two pictures [3, H, W] at each pixel, [H, W], in 8-bit steps."""
    return (_STEPS * (one.clamp(-1, 1) - other.clamp(-1, 1))).double().square().mean(0)


def _in_blocks(squares: Tensor) -> Tensor:
    """Return the mean of ``squares`` [H, W] in each block, [blocks]."""
    return F.avg_pool2d(squares[None], BLOCK).flatten()


def _left(description: Description) -> float:
    return max(0.0, float(description.left.sum()))


def _along(
    painted: Sequence[Tensor], reference: Sequence[Tensor], masks: Sequence[Tensor | None]
) -> tuple[float, float]:
    """Return the rms difference within 8 pixels of the masks' borders, and beyond, in 8-bit steps; NaN without one."""
    triples = zip(painted, reference, masks, strict=True)
    known = [(_squares(one, other), border_distance(mask, RING)) for one, other, mask in triples if mask is not None]
    if not known:
        return math.nan, math.nan
    squares, distances = (torch.cat([each.flatten() for each in both]) for both in zip(*known, strict=True))
    near = distances <= RING
    return math.sqrt(squares[near].mean()), math.sqrt(squares[~near].mean())


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


def _floor(path: Path, image: Tensor, painted: Tensor) -> float:
    """Return what saving ``image`` [3, H, W] as the file ``path`` was saved changes, rms in 8-bit steps.

    A PNG may have been a JPEG before: then the reference, saved as that JPEG, comes much nearer to ``painted``.
    """
    with Image.open(path) as opened:
        tables, lossy = getattr(opened, "quantization", None), opened.format in ("JPEG", "WEBP")
        own: dict[str, Any] = {"qtables": tables, "subsampling": get_sampling(opened)} if tables else {"quality": 90}
    before = [{"quality": quality, "subsampling": sampling} for quality in _QUALITIES for sampling in (0, 2)]
    distances: list[tuple[float, float]] = []
    for how in [own] if lossy else before:
        saved = io.BytesIO()
        to_image(image).save(saved, "JPEG", **how)
        again = to_pixels(Image.open(saved))
        left, lost = (float(_squares(again, other).mean()) for other in (painted, image))
        distances.append((left, lost))
    left, lost = min(distances)
    if not lossy and left > 0.25 * float(_squares(image, painted).mean()):
        return _ROUNDING
    return max(_ROUNDING, math.sqrt(lost))
