"""One layer's adapter as files hold it, of each kind, and the weight it makes of the base's.

These are the plain formulas, on full weights; merging uses them. The layers that are trained (``networks.adapters``)
compute the same without forming a weight. A new kind is a class here, in :data:`KINDS`, and a layer there.

The formulas are ComfyUI's (``comfy/weight_adapter``), whose names the tensors have. One of them deserves a warning:
``dora_scale`` with a row for each output is divided there by the row norms of the *base*, |W|, not of V = W + s B A as
in the paper, in peft (``lora_magnitude_vector``) and where LyCORIS and OneTrainer train it. A DoRA trained as in the
paper is right in ComfyUI if its ``dora_scale`` is m |W| / |V|; so it is written here. With a column for each input all
of them divide by V's columns. In memory the name tells: rows of V are ``magnitude``, rows of the base ``dora_scale``
(:func:`networks.files.adapters.load_adapter` decides which a file means).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from library.config.markers import MOST_STRENGTH
from library.errors import UserError
from library.models.layer_names import KeyNames


class RowsDependError(ValueError):
    """What becomes of some rows of a layer depends on the others."""


@dataclass(frozen=True)
class AdapterWeights:
    """A change to one linear layer.

    Attributes:
        kind: as ``network_type`` names it, if it can be trained. title: the same in messages.
        marks: what in a file's key shows the kind.
        trained: whether ``network_type`` may name it.
        complete: the sets of tensors that an adapter of this kind may consist of, by name.
        tensors: by name, on one device, of any floating dtype.
        alpha: numerator of the scale.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    marks: ClassVar[tuple[str, ...]] = ()
    complete: ClassVar[tuple[set[str], ...]]
    trained: ClassVar[bool] = True
    tensors: Mapping[str, Tensor]
    alpha: float

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], alpha: float) -> Self:
        """Return an adapter of this kind."""
        return cls(tensors, alpha)

    @property
    def rank(self) -> int:
        """Columns of the products it is made of; 0 where it is made of none."""
        return rank_of(self.tensors)

    @property
    def scale(self) -> float:
        """alpha / rank; 1 where there are no products."""
        return self.alpha / self.rank if self.rank else 1.0

    @property
    def shape(self) -> tuple[int, int | None]:
        """Output rows and input columns of the layer; None where the kind does not say."""
        raise NotImplementedError

    def scaled(self, factor: float) -> Self:
        """Return the same change, its update ``factor`` times as large."""
        return self.of(self.tensors, self.alpha * factor)

    def made_for_other(self, shape: Sequence[int]) -> str | None:
        """Return in words the shape of layers that it is for; None if ``shape`` is one."""
        rows, columns = self.shape
        return None if tuple(shape) == (rows, columns or shape[1]) else f"{rows}x{columns or 'any'}"

    def apply(self, weight: Tensor, strength: float) -> Tensor:
        """Return ``weight`` [out, in] fp32 changed by ``strength`` times what the adapter changes."""
        raise NotImplementedError

    def beside(self, x: Tensor, strength: float, base: Callable[[], Tensor]) -> Tensor:
        """Return what ``strength`` times the change adds to a layer's outputs of ``x`` [..., in], in its dtype.

        ``base`` returns the layer's weight [out, in] fp32, of which some kinds need the norms.
        """
        weight = base()
        return F.linear(x, (self.apply(weight, strength) - weight).to(x.dtype))

    def to(self, where: torch.device | torch.dtype) -> Self:
        """Return the same change on a device, or in a floating dtype."""
        moved = {name: t.to(where) if t.is_floating_point() else t for name, t in self.tensors.items()}
        return self.of(moved, self.alpha)

    def of_rows(self, rows: Tensor) -> AdapterWeights:
        """Return the same change of some output rows alone, in the order of ``rows`` [n] int64.

        Raises:
            RowsDependError: what becomes of these rows depends on others too.
        """
        raise NotImplementedError


def rank_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the rank that alpha is divided by, 0 where there is none."""
    return next((tensors[n].shape[0] for n in ("down", "lokr_w2_b", "lokr_w1_b", "hada_w1_b") if n in tensors), 0)


def unscaled_alpha(tensors: Mapping[str, Tensor]) -> float:
    """Return the alpha by which nobody scales: the rank, or where there is none what others take for it, w2's side."""
    return float(rank_of(tensors) or max(tensors["lokr_w2"].shape))


class AddedWeights(AdapterWeights):
    """What is added to the base's weight."""

    def delta(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the update, [out, in], computed in ``dtype``."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """Return the update's outputs of ``x`` [..., in]: [..., out], in its dtype."""
        return F.linear(x, self.delta().to(x.dtype))

    def apply(self, weight: Tensor, strength: float) -> Tensor:
        """W + strength * delta."""
        return weight + self.delta().mul_(strength)

    def beside(self, x: Tensor, strength: float, base: Callable[[], Tensor]) -> Tensor:
        """See the base class."""
        return self.product(x) * strength


class LoraWeights(AddedWeights):
    """The update ``alpha / rank * up @ down``, down [rank, in], up [out, rank]."""

    kind, title, complete = "lora", "LoRA", ({"down", "up"},)

    def __init__(self, down: Tensor, up: Tensor, alpha: float) -> None:
        super().__init__({"down": down, "up": up}, alpha)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], alpha: float) -> Self:
        """Return a LoRA of ``down`` and ``up``."""
        return cls(tensors["down"], tensors["up"], alpha)

    @property
    def down(self) -> Tensor:
        """A, [rank, in]."""
        return self.tensors["down"]

    @property
    def up(self) -> Tensor:
        """B, [out, rank]."""
        return self.tensors["up"]

    @property
    def shape(self) -> tuple[int, int]:
        """Output rows and input columns of the layer."""
        return self.up.shape[0], self.down.shape[1]

    def delta(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """s B A."""
        return torch.mm(self.up.to(dtype), self.down.to(dtype)).mul_(self.scale)

    def product(self, x: Tensor) -> Tensor:
        """See the base class; B (A x)."""
        return F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype)) * self.scale

    def of_rows(self, rows: Tensor) -> LoraWeights:
        """See the base class."""
        return LoraWeights(self.down, self.up[rows], self.alpha)


class LokrWeights(AddedWeights):
    """``lokr_w1`` or its factors ``lokr_w1_a`` and ``lokr_w1_b``; ``lokr_w2`` likewise.

    Rows of a product are mostly none themselves: ``rows`` [n], never in a file, picks those that are meant.
    """

    kind, title, marks = "lokr", "LoKr", (".lokr_",)
    complete = tuple(
        w1 | w2 for w1 in ({"lokr_w1"}, {"lokr_w1_a", "lokr_w1_b"}) for w2 in ({"lokr_w2"}, {"lokr_w2_a", "lokr_w2_b"})
    )

    @property
    def shape(self) -> tuple[int, int | None]:
        """See the base class."""
        (rows, columns), (more_rows, more_columns) = self.w1().shape, self.w2().shape
        picked = self.tensors.get("rows")
        return rows * more_rows if picked is None else len(picked), columns * more_columns

    def delta(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """s w1 (x) w2."""
        product = torch.kron(self.w1(dtype), self.w2(dtype)).mul_(self.scale)
        return product if (picked := self.tensors.get("rows")) is None else product[picked.to(product.device)]

    def product(self, x: Tensor) -> Tensor:
        """See the base class; w1 x w2^T of each x as a matrix [in_1, in_2]."""
        w1, w2 = self.w1(x.dtype), self.w2(x.dtype)
        low = F.linear(x.reshape(-1, w1.shape[1], w2.shape[1]), w2)
        out = (w1 @ low).mul_(self.scale).reshape(*x.shape[:-1], len(w1) * len(w2))
        return out if (picked := self.tensors.get("rows")) is None else out[..., picked]

    def scaled(self, factor: float) -> LokrWeights:
        """See the base class; without a rank, alpha scales nothing."""
        if self.rank:
            return LokrWeights(self.tensors, self.alpha * factor)
        return LokrWeights({**self.tensors, "lokr_w1": self.tensors["lokr_w1"].float() * factor}, self.alpha)

    def of_rows(self, rows: Tensor) -> LokrWeights:
        """See the base class."""
        picked = self.tensors.get("rows")
        return LokrWeights({**self.tensors, "rows": rows if picked is None else picked[rows]}, self.alpha)

    def with_plain_w1(self) -> LokrWeights:
        """Return the same change with the scale in ``lokr_w1``, multiplied out, and an alpha by which nobody scales.

        musubi-tuner's ``networks/lokr.py`` knows no other w1. Its network takes an alpha for alpha / rank or for
        nothing by the layer's size, whatever ``factor`` cut it, and the larger side of a plain w2 for the rank.
        """
        w1 = self.to(torch.device("cpu")).w1(torch.float64).detach() * self.scale
        others = {name: tensor for name, tensor in self.tensors.items() if not name.startswith("lokr_w1")}
        return LokrWeights({"lokr_w1": w1, **others}, unscaled_alpha(others))

    def w1(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the smaller factor, multiplied out."""
        return self._side("lokr_w1", dtype)

    def w2(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the larger factor, multiplied out."""
        return self._side("lokr_w2", dtype)

    def _side(self, name: str, dtype: torch.dtype) -> Tensor:
        t = self.tensors
        return t[name].to(dtype) if name in t else t[f"{name}_a"].to(dtype) @ t[f"{name}_b"].to(dtype)


class LohaWeights(AddedWeights):
    """``hada_w1_a``, ``hada_w1_b``, ``hada_w2_a``, ``hada_w2_b``."""

    kind, title, marks = "loha", "LoHa", (".hada_",)
    complete = ({"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"},)

    @property
    def shape(self) -> tuple[int, int | None]:
        """See the base class."""
        return self.tensors["hada_w1_a"].shape[0], self.tensors["hada_w1_b"].shape[1]

    def delta(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """s (a1 b1) * (a2 b2)."""
        t = {name: tensor.to(dtype) for name, tensor in self.tensors.items()}
        return (t["hada_w1_a"] @ t["hada_w1_b"]).mul_(t["hada_w2_a"] @ t["hada_w2_b"]).mul_(self.scale)

    def as_lora(self) -> LoraWeights:
        """Return the same update as a LoRA, in float64: its rank is the product of the two ranks."""
        a1, b1, a2, b2 = (self.tensors[f"hada_w{i}_{side}"].double() for i in (1, 2) for side in "ab")
        up, down = (a1[:, :, None] * a2[:, None]).flatten(1), (b1[:, None] * b2[None]).flatten(0, 1)
        return LoraWeights(down, up, self.scale * len(down))

    def of_rows(self, rows: Tensor) -> LohaWeights:
        """See the base class."""
        return LohaWeights({n: t[rows] if n.endswith("_a") else t for n, t in self.tensors.items()}, self.alpha)


class FullWeights(AddedWeights):
    """The difference itself, ``diff``: of a weight [out, in]; of a bias [out], under the module's name and ".bias".

    ComfyUI's and LyCORIS's ``.diff`` and ``.diff_b``; a LoRA's ``lora_B.bias`` becomes one.
    """

    kind, title, complete, trained = "diff", "difference", ({"diff"},), False

    @property
    def shape(self) -> tuple[int, int | None]:
        """See the base class."""
        rows, *columns = self.tensors["diff"].shape
        return rows, columns[0] if columns else None

    def scaled(self, factor: float) -> FullWeights:
        """See the base class."""
        return FullWeights({"diff": self.tensors["diff"].float() * factor}, self.alpha)

    def delta(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The difference, a copy."""
        return self.tensors["diff"].to(dtype, copy=True)

    def of_rows(self, rows: Tensor) -> FullWeights:
        """See the base class."""
        return FullWeights({"diff": self.tensors["diff"][rows]}, self.alpha)


class TokenRowWeights(AdapterWeights):
    """Rows of an embedding or a head, ``token_rows`` [n, in], in place of those of the ``token_indices`` [n] int64.

    PEFT's trainable tokens; the indices, in ascending order here, are in its config.
    """

    kind, title, marks = "tokens", "file with rows of tokens", (".token_adapter.",)
    complete, trained = ({"token_rows", "token_indices"},), False

    @property
    def shape(self) -> tuple[int, int | None]:
        """The fewest rows that the layer has, and its columns."""
        return int(self.tensors["token_indices"][-1]) + 1, self.tensors["token_rows"].shape[1]

    def made_for_other(self, shape: Sequence[int]) -> str | None:
        """See the base class."""
        rows, columns = self.shape
        return None if shape[0] >= rows and shape[1] == columns else f"at least {rows}x{columns}"

    def apply(self, weight: Tensor, strength: float) -> Tensor:
        """W with its rows, ``strength`` of the way from those that it had."""
        indices, changed = self.tensors["token_indices"], weight.clone()
        changed[indices] = torch.lerp(weight[indices], self.tensors["token_rows"].to(weight), strength)
        return changed


BIASES = ("diff_b", "up_bias")


def bias_of(biases: Mapping[str, Tensor], scale: float) -> FullWeights:
    """Return what a module's ``biases``, of :data:`BIASES`, add to the base's.

    peft multiplies that of B by the LoRA's ``scale`` too, ComfyUI adds ``.diff_b`` as it stands.
    """
    parts = [bias.float() * (scale if name == "up_bias" else 1.0) for name, bias in biases.items()]
    if len({part.shape for part in parts}) > 1 or parts[0].ndim != 1:
        raise ValueError("its biases are no vectors of one length")
    return FullWeights({"diff": torch.stack(parts).sum(0)}, 1.0)


ADDED_INPUTS = "the LoRA is for fewer inputs, the others add nothing"


def fitted(name: str, weights: AdapterWeights, keys: KeyNames, columns: int) -> AdapterWeights:
    """Return the weights of module ``name`` for a layer of ``columns``.

    A LoRA of a row that ``gains_columns`` gets zeros in A for the further ones, as diffusers loads one of FLUX.1 dev
    into Fill (``_maybe_expand_lora_state_dict``).
    """
    if not isinstance(weights, LoraWeights) or weights.shape[1] >= columns or not keys.gains_columns(name):
        return weights
    return LoraWeights(F.pad(weights.down, (0, columns - weights.shape[1])), weights.up, weights.alpha)


NORMS = ("magnitude", "dora_scale")


class DoraWeights(AdapterWeights):
    """A LoRA and norms: ``magnitude`` [out], rows of V; or ``dora_scale`` [out, 1], rows of W, or [1, in], V's columns.

    Made of a trained layer it has both.
    """

    kind, title = "dora", "DoRA"
    marks: ClassVar[tuple[str, ...]] = (".dora_scale", ".lora_magnitude_vector", ".magnitude")
    complete: ClassVar[tuple[set[str], ...]] = ({"down", "up", "magnitude"}, {"down", "up", "dora_scale"})
    added: ClassVar[type[AddedWeights]] = LoraWeights

    @property
    def update(self) -> AddedWeights:
        """What is added to W to make V."""
        return self.added.of({n: t for n, t in self.tensors.items() if n not in NORMS}, self.alpha)

    @property
    def shape(self) -> tuple[int, int | None]:
        """See the base class."""
        return self.update.shape

    def apply(self, weight: Tensor, strength: float) -> Tensor:
        """W + strength * (m V / |V| - W)."""
        merged = self.update.apply(weight, 1.0)
        if (magnitude := self.tensors.get("magnitude")) is not None:
            norm, wanted = merged.norm(dim=1, keepdim=True), magnitude.reshape(-1, 1)
        else:
            wanted = self.tensors["dora_scale"]
            rows = wanted.shape[0] == weight.shape[0]
            norm = weight.norm(dim=1, keepdim=True) if rows else merged.norm(dim=0, keepdim=True)
        return weight + strength * (merged * (wanted.float() / norm) - weight)

    def apply_in(self, dtype: torch.dtype, weight: Tensor, strength: float) -> Tensor:
        """Return what ComfyUI makes of ``weight`` [out, in], in ``dtype``: every step is rounded to it.

        ``weight_decompose`` (``comfy/weight_adapter/base.py``) adds the dtype's epsilon to the norms, 0.0078 in bf16.
        """
        base, wanted = weight.to(dtype), self.tensors.get("dora_scale", self.tensors.get("magnitude"))
        assert wanted is not None
        merged = base + self.update.delta(dtype)
        wanted = wanted.reshape(-1, 1) if len(wanted) == len(base) else wanted
        norm = base.norm(dim=1, keepdim=True) if len(wanted) == len(base) else merged.norm(dim=0, keepdim=True)
        merged *= wanted.to(dtype) / (norm + torch.finfo(dtype).eps)
        return merged if strength == 1.0 else base + strength * (merged - base)

    def of_rows(self, rows: Tensor) -> DoraWeights:
        """See the base class."""
        norms = {name: tensor for name, tensor in self.tensors.items() if name in NORMS}
        if any(len(norm) != self.shape[0] for norm in norms.values()):
            raise RowsDependError("the norms are those of all columns of the joined layer")
        kept = {name: norm[rows] for name, norm in norms.items()}
        return type(self)({**self.update.of_rows(rows).tensors, **kept}, self.alpha)


class DoraLokrWeights(DoraWeights):
    """The same with a LoKr: LyCORIS's ``weight_decompose``."""

    kind, title, added = "lokr with dora_scale", "LoKr with dora_scale", LokrWeights
    trained = False
    marks: ClassVar[tuple[str, ...]] = ()
    complete = tuple(names | {norm} for names in LokrWeights.complete for norm in NORMS)


class DoraLohaWeights(DoraWeights):
    """The same with a LoHa."""

    kind, title, added = "loha with dora_scale", "LoHa with dora_scale", LohaWeights
    trained = False
    marks: ClassVar[tuple[str, ...]] = ()
    complete = tuple(names | {norm} for names in LohaWeights.complete for norm in NORMS)


@dataclass(frozen=True)
class CombinedWeights(AddedWeights):
    """Changes of several files to one layer, or of one at a strength of its own; in no file.

    Attributes:
        parts: each with its strength. What depends on the weight sees it as the parts before left it.
    """

    kind, title, trained = "combined", "combination", False
    parts: tuple[tuple[AdapterWeights, float], ...] = ()

    @classmethod
    def of_parts(cls, parts: Iterable[tuple[AdapterWeights, float]]) -> Self:
        """Return the combination of ``parts``, which are not empty."""
        return cls({}, 1.0, tuple(parts))

    @property
    def shape(self) -> tuple[int, int | None]:
        """See the base class."""
        return self.parts[0][0].shape

    def scaled(self, factor: float) -> Self:
        """See the base class."""
        return self.of_parts((part, strength * factor) for part, strength in self.parts)

    def to(self, where: torch.device | torch.dtype) -> Self:
        """See the base class."""
        return self.of_parts((part.to(where), strength) for part, strength in self.parts)

    def of_rows(self, rows: Tensor) -> CombinedWeights:
        """See the base class."""
        return self.of_parts((part.of_rows(rows), strength) for part, strength in self.parts)

    def apply(self, weight: Tensor, strength: float) -> Tensor:
        """See the base class."""
        for part, own in self.parts:
            weight = part.apply(weight, own * strength)
        return weight

    def delta(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """See the base class; only where all parts are added."""
        return torch.stack([part.delta(dtype) * own for part, own in self.parts]).sum(0)  # type: ignore[attr-defined]

    def beside(self, x: Tensor, strength: float, base: Callable[[], Tensor]) -> Tensor:
        """See the base class."""
        if not all(isinstance(part, AddedWeights) for part, _ in self.parts):
            return AdapterWeights.beside(self, x, strength, base)
        first, *others = (part.beside(x, own * strength, base) for part, own in self.parts)
        return sum(others, start=first)


_ALL = (
    *(LoraWeights, DoraWeights, LokrWeights, LohaWeights, DoraLokrWeights, DoraLohaWeights),
    *(FullWeights, TokenRowWeights),
)
KINDS: dict[str, type[AdapterWeights]] = {each.kind: each for each in _ALL}
TITLES = {kind: each.title for kind, each in KINDS.items()}
ADAPTER_MARKS = {mark: kind for kind, each in KINDS.items() for mark in each.marks}


def fold_scale(module: AdapterWeights, evenly: bool = False) -> AdapterWeights:
    """Return the same change with alpha = rank, the scale multiplied into B; of a LoRA or a DoRA.

    B becomes fp64 on the CPU, so that it is rounded once, when it is written; a power of two rounds nothing. ``evenly``
    puts half of the scale's power of two into A instead: fp16 has few bits for small numbers. Either way the factors of
    one run's saves are scaled alike, so that their average means what it did.
    """
    scale = module.scale
    if scale == 1.0:
        return module
    half = 2.0 ** (math.frexp(scale)[1] // 2) if evenly else 1.0
    down, up = module.tensors["down"], module.tensors["up"]
    factors = {"down": down * half if evenly else down, "up": up.detach().cpu().double() * (scale / half)}
    return type(module).of({**module.tensors, **factors}, float(module.rank))


def non_lora_kind(keys: Iterable[str]) -> str | None:
    """Return the kind that a file's keys show if it is no plain LoRA."""
    return next((kind for key in keys for mark, kind in ADAPTER_MARKS.items() if mark in key), None)


def same_down(a: AdapterWeights, b: AdapterWeights) -> bool:
    """Return whether two LoRAs have one A and alpha: parts of one that was trained on a joined layer."""
    if not isinstance(a, LoraWeights) or not isinstance(b, LoraWeights):
        return False
    return a.alpha == b.alpha and a.down.shape == b.down.shape and torch.equal(a.down, b.down)


def check_strength(where: str, strength: float) -> None:
    """Refuse a strength that is not finite, or so large that nothing is left of the model; ``where`` names the LoRA."""
    if not abs(strength) <= MOST_STRENGTH:
        raise UserError(f"{where}: a strength of {strength:g}; give one from -{MOST_STRENGTH:g} to {MOST_STRENGTH:g}")
