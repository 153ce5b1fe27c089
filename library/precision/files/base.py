"""What every format of quantised files offers: read this before a format.

How a weight is quantised
=========================
A *scheme* rounds a weight W [out, in] to few bits:

  1. rotate: where the format does, W is turned along its inputs, into a basis in which no column is much larger;
  2. group:  the entries are grouped by rows and runs of columns;
  3. step:   each group has one number, its step (its "scale" in files), so that its largest entry just fits;
  4. round:  W / step is rounded to the nearest number that the format has, a *unit*.

    W[o, i] ~ units[o, i] * step[o or 0, i // run]          (then rotated back)

Rounding to nearest, stochastic rounding, and rounding that looks at activations differ only in the units they choose.

Three classes for each format
=============================
    QuantizedWeight  the weight in memory: dequantised, cut into rows and columns, multiplied with
    Scheme           how one is made of a weight in high precision: the four steps above
    StoredWeight     where one lies in a file, and which tensors hold its values and scales

A format is a module here with these three and a function ``find(file)``, which returns the weights of the format among
a file's tensors (``file_tensors``). ``library.precision.checkpoint`` lists the modules. The rest of the code knows no
format by name: the layer that multiplies (``library.precision.linear``), reading and writing checkpoints, merging,
compensated rounding, the report. A format whose tensors are cut one by one derives from ``cut_weight.CutWeight``; one
that is read and never written takes :class:`ReadOnlyScheme` and :class:`StoredReadOnly`.

What was left out
=================
There is no tensor subclass, as torchao has one: a layer holds the plain tensors of its weight and calls
``dequantize`` or ``product`` itself, so that FSDP2, tensor parallelism and the compiler see plain tensors.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from library.errors import UserError
from library.precision.files.file_tensors import FileTensors
from library.precision.names import LayoutKind
from library.safetensors_io import TensorSpecs

HIGH_PRODUCTS = "full_precision_matrix_mult"  # key of ComfyUI's word about a layer


# --- in memory -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantizedWeight(ABC):
    """A frozen weight [out, in] as its format stores it; no method changes it, and views share its memory.

    Subclasses are frozen dataclasses. Fields that hold tensors are what a layer registers and moves; no cast may reach
    them. The first, ``values``, holds most of the bytes.
    """

    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs and inputs."""
        return tuple(self.values.shape)

    @property
    @abstractmethod
    def scheme(self) -> Scheme:
        """How such a weight is made of one in high precision."""

    def steps(self) -> Tensor | None:
        """Return the steps that its units are multiplied with, [1 or out, runs] fp32; None if all are 1."""
        return None

    @property
    def column_block(self) -> int:
        """Inputs that cannot be separated: :meth:`part` cuts columns at multiples of it."""
        return 1

    def tensors(self) -> dict[str, Tensor]:
        """Return field -> tensor; ``values`` first."""
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Return the weight with other ``tensors`` in its fields, as they are after a move."""
        return replace(self, **tensors)

    def to(self, device: torch.device | str) -> Self:
        """Return it on ``device``."""
        return self.with_tensors({name: tensor.to(device) for name, tensor in self.tensors().items()})

    @abstractmethod
    def part(self, rows: slice = slice(None), columns: slice = slice(None)) -> Self:
        """Return some rows and columns, as views; columns begin and end at multiples of :attr:`column_block`."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] that it stands for: fp32 arithmetic, rounded once to ``dtype``."""

    def rounded(self, weight: Tensor) -> Tensor:
        """Return ``weight`` [out, in] rounded to nearest in this format, with steps of its own, fp32."""
        return self.scheme.quantize(weight).dequantize(torch.float32)

    def on_grid(self, weight: Tensor, random: torch.Generator | None = None) -> Tensor:
        """Return ``weight`` [out, in] rounded to numbers that this weight could hold with the steps it has, fp32.

        To nearest; with ``random`` to either neighbour, the expected value unchanged.
        """
        scheme, steps = self.scheme, self.steps()
        units = scheme.round(in_units(scheme.rotate(weight.float()), steps), random is not None, random).float()
        if steps is not None:
            units = (units.view(len(units), steps.shape[1], -1) * steps.unsqueeze(-1)).view(units.shape)
        return scheme.rotate(units)  # its own inverse

    def operand(self, dtype: torch.dtype) -> Tensor:
        """Return what :meth:`rotate`'s result is multiplied with, [out, in]; the weight itself where nothing rotates.

        x @ dequantize().T == rotate(x) @ operand().T
        """
        return self.dequantize(dtype)

    @property
    def rotates(self) -> bool:
        """Whether :meth:`rotate` changes anything."""
        return False

    def rotate(self, x: Tensor) -> Tensor:
        """Return inputs [..., in] as :meth:`operand` wants them, in their own dtype."""
        return x

    def rotate_back(self, gradient: Tensor) -> Tensor:
        """Return the gradient of inputs [..., in] of the gradient of :meth:`rotate`'s result."""
        return gradient

    def unrotated(self) -> Self:
        """Return what multiplies inputs that :meth:`rotate` has turned already: x @ dequantize().T is its operand's."""
        return self

    @property
    def is_operand(self) -> bool:
        """Whether :meth:`product` takes this weight, on a device that has it."""
        return False

    def multiplies_on(self, device: torch.device) -> bool:
        """Return whether :meth:`product` can be had on ``device``, and is faster there than dequantising."""
        return False

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias`` with ``x`` [n, in] rounded as the format's own products need it; [n, out]."""
        raise NotImplementedError

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return weights of this format side by side: the inputs of all of them.

        Raises:
            ValueError: no weight of this format holds them all.
        """
        if len(parts) > 1:
            raise ValueError("such weights cannot be joined by columns")
        return parts[0]

    @classmethod
    @abstractmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Return weights of this format one below the other, each number as it was.

        Raises:
            ValueError: no weight of this format holds them all (another number format, other blocks).
        """


class LevelledWeight(QuantizedWeight):
    """A weight of a format that nothing here writes: a run's numbers lie at the same places between its two ends."""

    @property
    @abstractmethod
    def levels(self) -> Tensor:
        """Return these places, ascending from 0 to 1, fp32 [n]."""

    @abstractmethod
    def ends(self) -> tuple[Tensor, Tensor]:
        """Return the numbers at 0 and at 1 of each run as its scales have them, [out, runs] fp32; either may be less.

        Half the distance of two levels between them is the largest error of rounding to nearest.
        """

    @abstractmethod
    def ends_for(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends that the format's plain rule gives the runs of ``weight`` [out, in]: nothing is clipped."""

    def rounded(self, weight: Tensor) -> Tensor:
        """Return ``weight`` rounded to nearest by the format's plain rule; scales that are stored are not rounded."""
        return self._between(weight, self.ends_for(weight))

    def on_grid(self, weight: Tensor, random: torch.Generator | None = None) -> Tensor:
        """See :meth:`QuantizedWeight.on_grid`."""
        return self._between(weight, self.ends(), random)

    def _between(self, weight: Tensor, ends: tuple[Tensor, Tensor], random: torch.Generator | None = None) -> Tensor:
        first, last = (end.unsqueeze(-1) for end in ends)
        runs, span, levels = weight.float().view(*ends[0].shape, -1), last - first, self.levels
        places = ((runs - first) / torch.where(span == 0, 1.0, span)).clamp_(0, 1)
        above = torch.bucketize(places.contiguous(), levels).clamp_(1, len(levels) - 1)
        return either(places, levels[above - 1], levels[above], random).mul_(span).add_(first).view(weight.shape)


def either(numbers: Tensor, below: Tensor, above: Tensor, random: torch.Generator | None = None) -> Tensor:
    """Return the nearer of two neighbours of each number; with ``random`` one of them, the expected value unchanged."""
    share = (numbers - below) / torch.where(above > below, above - below, 1.0)
    limit = 0.5 if random is None else torch.rand(numbers.shape, generator=random, device=numbers.device)
    return torch.where(share > limit, above, below)


Weight = TypeVar("Weight", bound=QuantizedWeight)


# --- from high precision -------------------------------------------------------------------------------------------


class Scheme(ABC):
    """How a weight in high precision becomes a quantised one.

    Attributes:
        name: the word for it on command lines.
        largest_unit: the largest magnitude of a unit.
    """

    name: str
    largest_unit: float

    @abstractmethod
    def describe(self) -> str:
        """Return it in words."""

    def lacking(self, device: torch.device) -> str | None:
        """Return what ``device`` or this environment lacks to multiply such weights as they are stored, in words."""
        return None

    def fitting(self, shape: Sequence[int]) -> Scheme | None:
        """Return the scheme for a weight of ``shape``, which may be coarser; None if it stays in high precision."""
        return self

    def rotate(self, weight: Tensor) -> Tensor:
        """Return ``weight`` [out, in] fp32 in the basis that is rounded in."""
        return weight

    @abstractmethod
    def groups(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return (rows, runs) of the steps of a weight of ``shape``: 1 or all rows, runs of columns a row.

        Raises:
            ValueError: its columns cannot be cut into runs.
        """

    @abstractmethod
    def steps(self, largest: Tensor, before: Tensor | None = None) -> Tensor | None:
        """Return steps [rows, runs] fp32, just as they will be read back from a file; None if all are 1.

        Args:
            largest: [rows, runs] fp32, what each group has to hold.
            before: steps that were chosen already: none of the result is smaller, and what they share stays.
        """

    @abstractmethod
    def round(self, units: Tensor, stochastic: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """Return the nearest number there is to each of ``units`` fp32; saturating.

        Args:
            stochastic: one of the two neighbours instead, the expected value unchanged. generator: for that.

        Returns:
            In fp32, or in a dtype that has just these numbers.
        """

    @abstractmethod
    def pack(self, units: Tensor, steps: Tensor | None) -> QuantizedWeight:
        """Return the weight of ``units`` [out, in], as :meth:`round` returns them, and of ``steps``."""

    def store(self, layout: LayoutKind, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> StoredWeight:
        """Return how the weight ``name`` is to lie in a new file.

        Args:
            layout: of the file.
            shape: of the weight. dtype: that it has in the source.

        Raises:
            UserError: the layout cannot hold such weights, or nothing here writes them.
        """
        raise UserError(f"{self.describe()}: such weights are read and not written; choose a scheme that is written")

    def quantize(
        self,
        weight: Tensor,
        *,
        stochastic: bool = False,
        generator: torch.Generator | None = None,
        before: Tensor | None = None,
    ) -> QuantizedWeight:
        """Return ``weight`` [out, in] (fp32, bf16 or fp16) in this format.

        Args:
            stochastic: round stochastically instead of to nearest. generator: for that.
            before: steps of the weight that was added to; they stay where they suffice, and with them its grid.

        Raises:
            ValueError: the weight holds a NaN, or its columns cannot be cut into runs.
        """
        values = self.rotate(weight.detach().float())
        steps = self.steps(self.magnitudes(values), before)
        return self.pack(self.round(in_units(values, steps), stochastic, generator), steps)

    def magnitudes(self, values: Tensor) -> Tensor:
        """Return the largest magnitude of each group of ``values`` [out, in], [rows, runs]."""
        rows, runs = self.groups(values.shape)
        largest = values.view(values.shape[0], runs, -1).abs().amax(dim=-1)
        return largest if rows > 1 else largest.amax(dim=0, keepdim=True)


def in_units(values: Tensor, steps: Tensor | None) -> Tensor:
    """Return ``values`` [out, in] divided by their steps [1 or out, runs]."""
    if steps is None:
        return values
    return (values.view(values.shape[0], steps.shape[1], -1) / steps.unsqueeze(-1)).view(values.shape)


def runs_of(inputs: int, block: int) -> int:
    """Return how many runs of ``block`` there are in ``inputs``; raises a ValueError if it does not divide them."""
    if inputs % block:
        raise ValueError(f"{inputs} inputs cannot be cut into blocks of {block}")
    return inputs // block


@dataclass(frozen=True)
class ReadOnlyScheme(Scheme):
    """A format whose weights are read and trained on, and never made here.

    Attributes:
        name: of the format. reason: why none needs to be written, or what to write instead.
    """

    name: str
    reason: str
    largest_unit = 0.0

    def describe(self) -> str:
        """Return the format's name."""
        return self.name

    @property
    def refusal(self) -> str:
        """That it is not written, and why."""
        return f"{self.name} {self.reason}"

    def _refuse(self, *_: object, **__: object) -> Any:
        raise UserError(self.refusal)

    groups = steps = round = pack = quantize = store = _refuse


# --- in a file -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StoredWeight(ABC):
    """Where a quantised weight lies in a file.

    Attributes:
        name: of the tensor with its values.
        shape: of the weight, whatever shape the tensor has.
        layout: the convention that its tensors are named by.
        tensors: field of the weight -> name of the tensor.
        tensor_specs: dtype and shape of these tensors in the file, by their names; empty where nothing is written.
        kept: names of the tensors that say something else of it (markers, scales of activations).
        full_precision: whether the file asks for products in high precision; None: it says nothing of it.
        input_scale: name of the calibrated scale of the layer's inputs.
    """

    name: str
    shape: tuple[int, ...]
    layout: LayoutKind
    tensors: Mapping[str, str]
    tensor_specs: TensorSpecs = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    full_precision: bool | None = None
    input_scale: str | None = None

    @property
    @abstractmethod
    def scheme(self) -> Scheme:
        """How it is made."""

    @property
    def served_rounding(self) -> str | None:
        """How the server that the file is for rounds the layer's inputs (``library.precision.activations``); None: not.

        Read from the file wherever it says so.
        """
        return None

    @property
    def follows_products(self) -> bool:
        """Whether the server multiplies it as the file asks, in high precision or in the format."""
        roundings = (replace(self, full_precision=high).served_rounding for high in (False, True))
        return self.layout in ("comfy_scaled", "comfy_quant") and len({*roundings}) > 1

    def comfy_config(self) -> dict[str, Any]:
        """Return what ComfyUI's ``comfy_quant`` says of such a weight, but for how products are made."""
        raise NotImplementedError

    @abstractmethod
    def read(self, file: FileTensors, rows: slice = slice(None)) -> QuantizedWeight:
        """Return the weight, or some of its rows, in memory of its own.

        Raises:
            UserError: NaN, infinity, a scale that is not positive and finite: a damaged file.
        """

    def specs(self) -> TensorSpecs:
        """Return dtype and shape of each of :attr:`tensors` in the file, by their names in it."""
        return self.tensor_specs

    @abstractmethod
    def written(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Return the tensors that hold ``weight`` in the file, by their names in it, as :meth:`specs` has them."""


@dataclass(frozen=True, kw_only=True)
class StoredReadOnly(StoredWeight):
    """Where a weight lies of a format, ``kind``, that nothing here writes, for ``reason``."""

    reason: ClassVar[str]
    kind: str

    @property
    def scheme(self) -> ReadOnlyScheme:
        """The format, and why none needs to be written."""
        return ReadOnlyScheme(self.kind, self.reason)

    def specs(self) -> TensorSpecs:
        """Refuse: nothing here writes such a file."""
        return self.scheme.store()

    def written(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Refuse: nothing here writes such a file."""
        return self.scheme.store()


# --- for formats ---------------------------------------------------------------------------------------------------


def nvidia_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of ``device``; (0, 0) of what is no NVIDIA card."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if nvidia else (0, 0)


def cached_tensor(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``make``, a function of hashable arguments, with its tensors remembered.

    Where it is first called does not matter: of sampling's inference mode autograd would take none, and those that a
    compiler makes, which have no numbers, are not remembered.
    """
    known: dict[tuple[Any, ...], Tensor] = {}

    @functools.wraps(make)
    def cached(*key: Any) -> Tensor:
        if key in known:
            return known[key]
        with torch.inference_mode(False):
            made = make(*key)
        if not torch.compiler.is_compiling() and detect_fake_mode() is None:  # dynamo cannot trace the second
            known[key] = made
        return made

    return cached
