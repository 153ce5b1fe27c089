"""Which size an image is trained at.

A model trains on many shapes of about the same area. Whose rule finds them, the dataset says
(``Dataset.bucket_rule``):

- **Tandem's**: sides are multiples of the model's patch, and the area of ``resolution`` is the only bound. Of all such
  shapes the fewest are taken that keep 97 % of every image's pixels: each shape costs a compile and a graph. Images
  whose shape would have fewer samples an epoch than a batch go to the best other shape that keeps 90 % of them. The
  shapes follow from the sizes of the dataset's images alone, not from their order.
- **sd-scripts'** (``BucketManager``): all multiples of ``bucket_reso_steps`` between ``min_bucket_reso`` and
  ``max_bucket_reso`` whose area is at most that of ``resolution``, for each width the tallest such height. An image
  goes to the bucket of its own size if there is one, else to that with the nearest aspect ratio.
- **musubi-tuner's** (``BucketSelector``): for each width in whole patches from half of the square's side to that side,
  the tallest height within the area, and both turned round. An image goes to the nearest aspect ratio.

The image is resized until it just covers its shape, and the overhang is cropped. With ``bucket_no_upscale`` an image is
only ever made smaller: by Tandem's rule its shape is no larger than it (but one patch a side at least), by the others
its own (reduced) size rounded down. Without ``enable_bucket`` there is one shape, ``resolution``.

What is kept is counted against the whole image at the area of ``resolution`` (with ``bucket_no_upscale`` its own, if
that is less), or at the size it is resized to if that is more: pixels that are cropped and pixels that a smaller area
leaves out count alike.

What is encoded is the bucket-sized centre crop; for ``random_crop`` it is the whole resized image (rounded
down to whole patches), so that a crop can be chosen every epoch among the cached latents.

Control images are resized by musubi-tuner's keys (its docs/dataset_config.md):

- without any, to the size that the image is trained at, the overhang cropped;
- ``control_resolution``: to its own proportions, at about that area;
- ``no_resize_control``: not resized, only trimmed to whole patches; with ``control_resolution`` too, that is the
  largest area.

Every side is a multiple of the model's patch. Where a size in whole patches does not have the image's proportions
exactly, the image covers it and the overhang, less than a patch, is cropped.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from library.data.config import BucketRule, Dataset
from library.errors import UserError, counted, names_in_short

Size = tuple[int, int]  # width, height in pixels
Images = Sequence[tuple[Size, int]]  # of a dataset: size and samples an epoch of each image, 0 of one that is held out

KEPT = 0.97  # of an image's pixels, by Tandem's rule
KEPT_OF_FEW = 0.90  # of those whose own shape would not fill a batch
_REMEDY = "remove the image or set bucket_no_upscale = false"
KOHYA_STEPS = 64  # sd-scripts' default of bucket_reso_steps
_RULES: dict[BucketRule, str] = {
    "tandem": "by Tandem's rule",
    "kohya": "by sd-scripts' rule",
    "musubi": "by musubi-tuner's rule",
    None: "alike for all",
}


@dataclass(frozen=True, slots=True)
class Fit:
    """How one image becomes training pixels: resize, crop ``encoded`` at ``offset``; train on ``bucket``."""

    resized: Size
    offset: Size  # left, top of the encoded box in the resized image
    encoded: Size  # what the image encoder sees
    bucket: Size  # what the model sees; smaller than ``encoded`` only with random_crop


class Bucketing:
    """The buckets of one dataset.

    Args:
        dataset: its settings.
        pixel_multiple: every side must be a multiple of this (VAE factor times patch size).
        images: all of its images, in any order: by Tandem's rule the shapes follow from them.
    """

    def __init__(self, dataset: Dataset, pixel_multiple: int, images: Images = ()) -> None:
        settings = dataset.settings
        self.where, self.resolution = dataset.where, dataset.resolution
        self.area = dataset.resolution[0] * dataset.resolution[1]
        self.pixel_multiple = pixel_multiple
        self.rule = dataset.bucket_rule
        self.no_upscale = self.rule is not None and settings.bucket_no_upscale
        self.steps = (settings.bucket_reso_steps or KOHYA_STEPS) if self.rule == "kohya" else pixel_multiple
        self.sizes: list[Size] = [dataset.resolution]
        self.limits: Size | None = None  # of a bucket's side
        self._shapes: dict[Size, Size] = {}  # of each image's size, by Tandem's rule
        self._fits: dict[tuple[Size, bool], Fit] = {}
        if self.rule is None:
            for side in dataset.resolution:
                self._require_multiple("resolution", side)
            return
        self._require_multiple("bucket_reso_steps", self.steps)
        if (min(dataset.resolution) if self.rule == "kohya" else math.isqrt(self.area)) < self.steps:
            than = f"bucket_reso_steps {self.steps}; set bucket_reso_steps = {pixel_multiple}"
            than = than if self.steps > pixel_multiple else f"a patch of the model, {self.steps} pixels; raise it"
            raise UserError(f"{self.where}: resolution {size_text(dataset.resolution)} is smaller than {than}")
        if self.rule == "kohya":
            self.limits = self._limits(settings.min_bucket_reso, settings.max_bucket_reso)
            self.sizes = bucket_sizes(dataset.resolution, *self.limits, self.steps)
        elif self.rule == "musubi":
            self.sizes = musubi_sizes(self.area, self.steps)
        else:
            samples = Counter[Size]()
            for size, number in images:
                samples[size] += number
            self._shapes = self._fewest_shapes(samples, settings.batch_size)

    def _require_multiple(self, key: str, value: int) -> None:
        unit = self.pixel_multiple
        if value % unit:
            good = max(unit, round(value / unit) * unit)
            raise UserError(f"{self.where}: {key} {value} is not a multiple of {unit}, the model's patch; use {good}")

    def _limits(self, low: int | None, high: int | None) -> Size:
        """Limits of a bucket's side; unless given kohya's 256 and 1024, or wider to hold the resolution."""
        shortest, longest = sorted(self.resolution)
        than = f"than resolution {size_text(self.resolution)}; use at"
        if low is not None and low > shortest:
            raise UserError(f"{self.where}: min_bucket_reso {low} is larger {than} most {shortest}")
        if high is not None and high < longest:
            raise UserError(f"{self.where}: max_bucket_reso {high} is smaller {than} least {longest}")
        low = low if low is not None else (256 if shortest >= 256 else shortest // 2)
        high = high if high is not None else (1024 if longest <= 1024 else 2 * longest)
        return max(self.steps, low // self.steps * self.steps), math.ceil(high / self.steps) * self.steps

    def fit(self, size: Size, random_crop: bool, name: str) -> Fit:
        """Return how an image of ``size`` (width, height) is resized and cropped; ``name`` is for the
        message.
        """
        if (known := self._fits.get((size, random_crop))) is None:
            known = self._fit(size, name)
            if random_crop:
                known = _cropped(known.resized, _whole_units(known.resized, self.pixel_multiple), known.bucket)
            self._fits[size, random_crop] = known
        return known

    def _fit(self, size: Size, name: str) -> Fit:
        if self.rule == "tandem":
            return cover(size, self._shapes[size])
        if self.rule == "kohya" and self.no_upscale:
            resized = self._shrunk(size)
            return _cropped(resized, self._whole_steps(resized, size, name))
        if self.no_upscale and size[0] * size[1] <= self.area:
            return cover(size, self._whole_steps(size, size, name))
        if self.rule == "kohya" and size in self.sizes:
            return cover(size, size)
        aspect = size[0] / size[1]
        return cover(size, min(self.sizes, key=lambda bucket: abs(bucket[0] / bucket[1] - aspect)))

    def _shrunk(self, size: Size) -> Size:
        """Size to which sd-scripts brings an image with bucket_no_upscale: down to the area of resolution, never up."""
        width, height = size
        if width * height <= self.area:
            return size
        aspect = width / height
        by_width = self._rounded(math.sqrt(self.area * aspect))
        by_height = self._rounded(self.area / math.sqrt(self.area * aspect))
        error_width = abs(by_width / max(1, self._rounded(by_width / aspect)) - aspect)
        error_height = abs(self._rounded(by_height * aspect) / max(1, by_height) - aspect)
        if error_width < error_height:  # the side that rounds with less distortion keeps its whole steps
            return by_width, int(by_width / aspect + 0.5)
        return int(by_height * aspect + 0.5), by_height

    def _whole_steps(self, resized: Size, size: Size, name: str) -> Size:
        bucket = _whole_units(resized, self.steps)
        if min(bucket) == 0:
            raise UserError(f"{name}: {size_text(size)} gives a side below {self.steps} pixels; {_REMEDY}")
        return bucket

    def _rounded(self, side: float) -> int:
        return int(side + 0.5) // self.steps * self.steps

    def kept(self, size: Size, fit: Fit) -> float:
        """Return the share of an image's pixels that ``fit`` keeps (see above)."""
        scale = max(fit.resized[0] / size[0], fit.resized[1] / size[1])
        whole = max(self._wanted(size), size[0] * size[1] * scale * scale)
        return fit.bucket[0] * fit.bucket[1] / whole

    def _wanted(self, size: Size) -> float:
        """Pixels of the whole image at the size it should be trained at."""
        return min(self.area, size[0] * size[1] * self._largest_scale(size) ** 2) if self.no_upscale else self.area

    def _largest_scale(self, size: Size) -> float:
        return max(1.0, self.pixel_multiple / min(size)) if self.no_upscale else math.inf

    def _fewest_shapes(self, samples: Mapping[Size, int], batch_size: int) -> dict[Size, Size]:
        """Return the shape of each size, by Tandem's rule; ``samples``: how many an epoch has of it.

        Shapes that keep enough of an image lie in an interval around its aspect ratio, so the fewest are found by
        taking, for the first image that has none yet, the one that serves the most others (greedy interval cover).
        """
        order = sorted(samples, key=lambda size: (size[0] / size[1], size))
        serving = {size: self._keeping(size, KEPT) or self._best(size) for size in order}
        served: dict[Size, set[Size]] = defaultdict(set)  # shape -> sizes
        for size, shape in ((size, shape) for size, shapes in serving.items() for shape in shapes):
            served[shape].add(size)
        taken = {shape for shapes in serving.values() if len(shapes) == 1 for shape in shapes}
        waiting = {size: None for size, shapes in serving.items() if not taken & shapes.keys()}

        def gain(shape: Size) -> tuple[int, float, Size]:
            sizes = served[shape] & waiting.keys()
            return len(sizes), math.fsum(serving[size][shape] for size in sizes), shape

        while waiting:
            taken.add(best := max(serving[next(iter(waiting))], key=gain))
            for size in served[best]:
                waiting.pop(size, None)
        members: dict[Size, list[Size]] = defaultdict(list)  # shape -> sizes
        for size, shapes in serving.items():
            members[_most({one: shapes[one] for one in taken & shapes.keys()})].append(size)
        number = {shape: sum(samples[size] for size in sizes) for shape, sizes in members.items()}
        for shape in sorted(number, key=lambda shape: (number[shape], shape)):
            few = members[shape] if sum(samples[size] for size in members[shape]) < batch_size else ()
            rest = members.keys() - {shape} if few else set()
            others = [self._keeping(size, KEPT_OF_FEW, rest) for size in few]
            if few and all(others):
                del members[shape]
                for size, able in zip(few, others, strict=True):
                    members[_most(able)].append(size)
        return {size: shape for shape, sizes in members.items() for size in sizes}

    def _best(self, size: Size) -> dict[Size, float]:
        shares = self._keeping(size, KEPT_OF_FEW) or self._keeping(size, 0)
        return {_most(shares): max(shares.values())}

    def _keeping(self, size: Size, least: float, among: Collection[Size] | None = None) -> dict[Size, float]:
        """Return the shapes that keep ``least`` of an image, with the share that they keep."""
        near = (shape for shape in self._near(size, max(least, 0.5)) if among is None or shape in among)
        shares = {shape: self.kept(size, cover(size, shape)) for shape in near}
        return {shape: kept for shape, kept in shares.items() if kept >= least}

    def _near(self, size: Size, least: float) -> Iterator[Size]:
        """Yield the shapes in whole patches whose sides are within a factor of ``least`` of the image's own."""
        unit, aspect = self.pixel_multiple, size[0] / size[1]
        sides = (math.sqrt(self._wanted(size) * ratio) for ratio in (aspect, 1 / aspect))
        sides = (min(max(side, unit), self.area / unit) / unit for side in sides)
        widths, heights = (range(max(1, math.ceil(n * least)), max(1, int(n / least)) + 1) for n in sides)
        for width in (unit * n for n in widths):
            for height in (unit * n for n in heights):
                scale = max(width / size[0], height / size[1])
                if width * height <= self.area and scale <= self._largest_scale(size) * (1 + 1e-9):
                    yield width, height


def _most(shares: Mapping[Size, float]) -> Size:
    """Return the shape that keeps most."""
    return max(shares, key=lambda shape: (shares[shape], shape))


def bucket_sizes(resolution: Size, low: int, high: int, steps: int) -> list[Size]:
    """All sizes with sides in multiples of ``steps`` from ``low`` to ``high`` and at most the area."""
    area = resolution[0] * resolution[1]
    square = math.isqrt(area) // steps * steps
    heights = {width: min(high, area // width // steps * steps) for width in range(low, high + 1, steps)}
    return _turned([(square, square), *((width, height) for width, height in heights.items() if height >= low)])


def musubi_sizes(area: int, steps: int) -> list[Size]:
    """musubi-tuner's sizes: the tallest of each width from half of the square's side to all of it, and turned round."""
    side = math.isqrt(area)
    widths = range(max(steps, side // 2 // steps * steps), side + steps, steps)
    return _turned([(width, area // width // steps * steps) for width in widths if area // width >= steps])


def _turned(sizes: Iterable[Size]) -> list[Size]:
    return sorted({turned for size in sizes for turned in (size, size[::-1])})


def describe_sizes(buckets: Bucketing, sizes: Sequence[Size]) -> str:
    """Return a line: whose rule finds the sizes, the shapes and what they keep of the images of ``sizes``."""
    fits = [(size, buckets.fit(size, random_crop=False, name="an image")) for size in sizes]
    shares = [buckets.kept(size, fit) for size, fit in fits]
    shapes = sorted(Counter(fit.bucket for _, fit in fits).items())
    listed = names_in_short([f"{number} at {size_text(shape)}" for shape, number in shapes], 12)
    mean = sum(shares) / max(1, len(shares))
    kept = f"{mean:.1%} of the pixels kept in {counted(len(shapes), 'shape')} ({listed})"
    if few := sum(share < KEPT for share in shares):
        kept += f"; {counted(few, 'image')} below {KEPT:.0%}, {min(shares):.1%} at least"
        kept += " (no shape keeps more, or too few for a batch of it)" if buckets.rule == "tandem" else ""
    return f"sizes {_RULES[buckets.rule]}: {kept}"


@dataclass(frozen=True, slots=True)
class ControlSizing:
    """How control images are sized: ``resolution`` (width, height) gives an area; ``keep``: no_resize_control.

    ``of_musubi``: to the size that musubi-tuner has for it (``calculate_bucket_resolution``), often a patch off.
    """

    resolution: Size | None = None
    keep: bool = False
    of_musubi: bool = False

    def fit(self, size: Size, trained: Size, unit: int, name: str) -> Fit:
        """Return how a control image is resized and cropped.

        Args:
            size: the image's (width, height).
            trained: the size its image is trained at.
            unit: sides become multiples of this.
            name: the image's path, for the message.
        """
        width, height = size
        area = None if self.resolution is None else self.resolution[0] * self.resolution[1]
        if self.keep and (area is None or width * height <= area):
            if min(whole := _whole_units(size, unit)) == 0:
                raise UserError(
                    f"{name}: {size_text(size)} is smaller than a patch of {unit}; remove no_resize_control"
                )
            return _cropped(size, whole)
        target = trained
        if area is not None:
            root = math.sqrt(area * width / height)
            target = (_whole(root, unit), _whole(root * height / width, unit))
            if self.of_musubi:
                widths = (unit * n for n in range(max(1, int(root) // unit - 2), int(root) // unit + 3))
                sizes = [(wide, area // wide // unit * unit) for wide in widths if area // wide >= unit]
                target = min(sizes, key=lambda one: abs(one[0] / one[1] - width / height), default=target)
        return cover(size, target)


def cover(size: Size, target: Size) -> Fit:
    """Return the fit that resizes ``size`` until it just covers ``target`` and crops the overhang evenly."""
    scale = max(target[0] / size[0], target[1] / size[1])
    resized = (max(target[0], int(size[0] * scale + 0.5)), max(target[1], int(size[1] * scale + 0.5)))
    return _cropped(resized, target)


def _cropped(resized: Size, encoded: Size, bucket: Size | None = None) -> Fit:
    """Return the fit that crops ``encoded`` from the middle."""
    offset = ((resized[0] - encoded[0]) // 2, (resized[1] - encoded[1]) // 2)
    return Fit(resized, offset, encoded, bucket or encoded)


def _whole_units(size: Size, unit: int) -> Size:
    return size[0] // unit * unit, size[1] // unit * unit


def _whole(side: float, unit: int) -> int:
    return max(unit, round(side / unit) * unit)


def same_shape(one: Size, other: Size) -> bool:
    """Return whether two sizes have the same proportions, a side being off by 1 % at most."""
    return abs(one[0] * other[1] - one[1] * other[0]) <= 0.01 * one[0] * other[1]


def size_text(size: Size) -> str:
    """Return a size as it is shown, such as 1024x768."""
    return f"{size[0]}x{size[1]}"
