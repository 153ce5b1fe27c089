"""What every deployed format offers: a weight in memory, the way such weights are made, and their place in a file.

    FileTensors      the tensors of a file by name, before anybody knows what they mean
    StoredWeight     where one quantised weight lies among them, and which tensors hold its scales
    QuantizedWeight  the same in memory: read, dequantised, cut, multiplied with
    Scheme           how a weight in high precision becomes one: rotation, groups that share a step, numbers there are

Every format is these three classes in a module of its own, and a function ``find(file)`` that claims its weights. The
layer that multiplies (``library.precision.linear``), the reader and the writer of checkpoints, merging, compensated
rounding and the report know no format by name.

A scheme rounds in *units*: a weight is rotated (where the format does), its entries are grouped by rows and runs of
columns, and each group's numbers are divided by its step:

    weight[o, i] ~ units[o, i] * step[o or 0, i // run]          (then rotated back)

Rounding to nearest, stochastic rounding and rounding that looks at activations differ only in which units they choose.
"""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from library.errors import UserError
from library.precision.names import LayoutKind
from library.safetensors_io import RowRange, TensorEntry, TensorSpecs, read_rows

COMFY_PREFIX = "model.diffusion_model."
HIGH_PRODUCTS = "full_precision_matrix_mult"  # key of ComfyUI's word about a layer


def cached_tensor(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``make``, a function of hashable arguments, with its tensors remembered.

    Where it is first called does not matter: of sampling's inference mode autograd would take none, and those made on
    fake tensors, which have no numbers, are not remembered.
    """
    known: dict[tuple[Any, ...], Tensor] = {}

    @functools.wraps(make)
    def cached(*key: Any) -> Tensor:
        if key in known:
            return known[key]
        with torch.inference_mode(False):
            made = make(*key)
        if type(made) is Tensor:
            known[key] = made
        return made

    return cached


class Encoded(NamedTuple):
    """What a kernel needs that decodes a weight itself (``library.precision.triton_product``); nothing is copied.

    Attributes:
        code: the decoder: ``e4m3fn``, ``e5m2``, ``int8``; ``e2m1`` and ``table`` (two to a byte); ``Q8_0``, ``Q4_0``.
        values: the weight's.
        scale: [1 or out, runs]: fp32, e4m3fn, or the exponents of powers of two (uint8).
        table: fp32: of ``table`` its sixteen numbers; beside scales in e4m3fn their own scale [1 or out, 1].
            Formats without a scale or a table have any tensor there.
    """

    code: str
    values: Tensor
    scale: Tensor
    table: Tensor


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

    def product(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T`` with ``x`` [n, in] rounded as the format's own products need it; [n, out]."""
        raise NotImplementedError

    def encoded(self) -> Encoded | None:
        """Return how a kernel decodes :meth:`operand`; None: none does."""
        return None

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


Weight = TypeVar("Weight", bound=QuantizedWeight)


class CutWeight(QuantizedWeight):
    """A weight of which each tensor is cut and joined by itself; ``scale``, where it has one, is [1 or out, 1].

    Attributes:
        spans: field -> inputs that one of its columns is for; of every tensor but ``scale``.
    """

    spans: ClassVar[Mapping[str, int]]

    @property
    def column_block(self) -> int:
        """The widest span."""
        return max(self.spans.values())

    def part(self, rows: slice = slice(None), columns: slice = slice(None)) -> Self:
        """Return some rows and columns, as views."""
        block_slice(columns, self.column_block)  # refuses an edge within a block
        tensors = self.tensors()
        cut = {name: tensors[name][rows, block_slice(columns, span)] for name, span in self.spans.items()}
        if "scale" in tensors:
            cut["scale"] = scale_of_rows(tensors["scale"], rows)
        return self.with_tensors(cut)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the inputs of ``parts`` side by side; their scale and their other fields have to be the same.

        Raises:
            ValueError: it is not.
        """
        first, tensors = _first_alike(parts), [part.tensors() for part in parts]
        if "scale" in tensors[0] and not all(torch.equal(each["scale"], tensors[0]["scale"]) for each in tensors):
            raise ValueError("they have different scales")
        return first.with_tensors({name: torch.cat([each[name] for each in tensors], dim=1) for name in first.spans})

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Return weights one below the other; different scales of tensors become scales of rows."""
        first, tensors = _first_alike(parts), [part.tensors() for part in parts]
        stacked = {name: torch.cat([each[name] for each in tensors]) for name in first.spans}
        if (scale := tensors[0].get("scale")) is not None:
            one = len(scale) == 1 and all(torch.equal(each["scale"], scale) for each in tensors)
            by_rows = [each["scale"].expand(part.shape[0], 1) for part, each in zip(parts, tensors, strict=True)]
            stacked["scale"] = scale.clone() if one else torch.cat(by_rows)
        return first.with_tensors(stacked)


def _first_alike(parts: Sequence[Weight]) -> Weight:
    """Return the first of ``parts``; raises a ValueError if they differ in what is no tensor: type, rotation."""
    words = [[v for f in fields(part) if not isinstance(v := getattr(part, f.name), Tensor)] for part in parts]
    if any(each != words[0] for each in words):
        raise ValueError(f"one is {' and one '.join(sorted({part.scheme.describe() for part in parts}))}")
    return parts[0]


def scale_of_rows(scale: Tensor, rows: slice) -> Tensor:
    """Return what of a ``scale`` [1 or out, ...] is of ``rows``."""
    return scale if len(scale) == 1 else scale[rows]


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


def device_is_capable(device: torch.device, capability: tuple[int, int]) -> bool:
    """Return whether ``device`` is a GPU of Nvidia's with at least this compute capability."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= capability


_CPU_CHUNK, _GPU_CHUNK = 1 << 18, 1 << 24  # numbers


def in_chunks(weight: Weight, numbers: Callable[[Weight], Tensor], dtype: torch.dtype) -> Tensor:
    """Return what ``numbers`` makes of ``weight``, fp32 [out, in], in ``dtype``, some rows at a time.

    What is needed on the way, several times the size of the result, stays in a CPU's cache: chunks of 256 thousand
    numbers are the fastest (4.2 ms for two million in Q4_K, 13 ms at once).
    """
    outputs, inputs = weight.shape
    rows = max(1, (_CPU_CHUNK if weight.values.device.type == "cpu" else _GPU_CHUNK) // max(1, inputs))
    if torch.compiler.is_compiling() or rows >= outputs:
        return numbers(weight).to(dtype)
    out = torch.empty(outputs, inputs, dtype=dtype, device=weight.values.device)
    for start in range(0, outputs, rows):
        out[start : start + rows] = numbers(weight.part(slice(start, start + rows)))
    return out


def block_slice(columns: slice, block: int) -> slice:
    """Return the blocks of ``block`` inputs that ``columns`` are.

    Raises:
        ValueError: they do not begin and end at a block's edge.
    """
    start, stop = columns.start or 0, columns.stop
    for edge in (start, stop or 0):
        if edge % block:
            raise ValueError(f"column {edge} lies within a block of {block}")
    return slice(start // block, None if stop is None else stop // block)


def runs_of(inputs: int, block: int) -> int:
    """Return how many runs of ``block`` there are in ``inputs``; raises a ValueError if it does not divide them."""
    if inputs % block:
        raise ValueError(f"{inputs} inputs cannot be cut into blocks of {block}")
    return inputs // block


def in_units(values: Tensor, steps: Tensor | None) -> Tensor:
    """Return ``values`` [out, in] divided by their steps [1 or out, runs]."""
    if steps is None:
        return values
    return (values.view(values.shape[0], steps.shape[1], -1) / steps.unsqueeze(-1)).view(values.shape)


@dataclass(frozen=True, kw_only=True)
class StoredWeight(ABC):
    """Where a quantised weight lies in a file.

    Attributes:
        name: of the tensor with its values.
        shape: of the weight, whatever shape the tensor has.
        layout: the convention that its tensors are named by.
        tensors: field of the weight -> name of the tensor.
        held: dtype and shape of these tensors in the file, by their names; empty where nothing is written.
        kept: names of the tensors that say something else of it (markers, scales of activations).
        full_precision: whether the file asks for products in high precision; None: it says nothing of it.
        input_scale: name of the calibrated scale of the layer's inputs.
    """

    name: str
    shape: tuple[int, ...]
    layout: LayoutKind
    tensors: Mapping[str, str]
    held: TensorSpecs = field(default_factory=dict)
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
    def heeds_products(self) -> bool:
        """Whether the server multiplies it as the file asks, in high precision or in the format."""
        asked = (replace(self, full_precision=high).served_rounding for high in (False, True))
        return self.layout in ("comfy_scaled", "comfy_quant") and len({*asked}) > 1

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
        return self.held

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


@dataclass(frozen=True)
class FileTensors:
    """The tensors of a model's files by name, and their strings."""

    path: Path
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]

    def dtype(self, name: str) -> str | None:
        """Return the dtype of tensor ``name`` as the file calls it; None if there is no such tensor."""
        entry = self.entries.get(name)
        return entry.dtype if entry is not None else None

    def read(self, name: str, rows: slice = slice(None), held: tuple[int, ...] | None = None) -> Tensor:
        """Return some rows of tensor ``name``; as bytes of shape ``held``, if given, whatever the file calls them."""
        entry = self.entries[name]
        if held is not None:
            entry = replace(entry, dtype="U8", shape=held)
        return read_rows({name: entry}, [RowRange(name, rows.start or 0, rows.stop)])

    def read_scale(self, name: str) -> Tensor:
        """Return tensor ``name`` in fp32, a scale: positive and finite."""
        scale = self.read(name).float()
        if not (torch.isfinite(scale).all() and (scale > 0).all()):
            raise self.refuse(name, "holds a scale that is not positive and finite", "download it again")
        return scale

    def refuse(
        self, name: str, why: str, remedy: str = "use the bf16 file, or one of a format that is read"
    ) -> UserError:
        """Return the error for tensor ``name``."""
        return UserError(f"{self.path}: {name!r} {why}; {remedy}")

    @cached_property
    def layer_configs(self) -> dict[str, dict[str, Any]]:
        """Layer -> what ComfyUI's ``comfy_quant`` says of it, from its marker or from the header."""
        configs: dict[str, dict[str, Any]] = {}
        if "_quantization_metadata" in self.metadata:
            try:
                layers = json.loads(self.metadata["_quantization_metadata"])["layers"]
                configs |= {self.full_name(layer): dict(config) for layer, config in layers.items()}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise self.refuse("_quantization_metadata", "is not the JSON object ComfyUI writes") from None
        for name in (name for name in self.entries if name.rpartition(".")[2] == "comfy_quant"):
            try:
                configs[name.rpartition(".")[0]] = dict(json.loads(bytes(self.read(name).tolist())))
            except (ValueError, TypeError, RecursionError):
                raise self.refuse(name, "is not the JSON object ComfyUI writes") from None
        for layer, config in configs.items():
            if not isinstance(kind := config.get("format"), str | None):
                raise self.refuse(f"{layer}.comfy_quant", f"names the format {kind!r}, which is not read")
        return configs

    def full_name(self, layer: str) -> str:
        """Return ``layer`` with the file's prefix, which some writers leave out of the header."""
        for prefix in ("", COMFY_PREFIX):
            if f"{prefix}{layer}.weight" in self.entries:
                return prefix + layer
        return layer
