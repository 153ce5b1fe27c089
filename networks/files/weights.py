"""One module's LoRA in memory: what files are read into and written from.

One layer's adapter in memory, of whatever kind but plain LoRA, and the weight it makes of the base's.

The formulas are ComfyUI's (``comfy/weight_adapter``), whose names the tensors have. Two of them deserve a warning:

* ``dora_scale`` with a row for each output is divided there by the row lengths of the *base*, |W|, not of V = W + s B A
  as in the paper and in peft (``lora_magnitude_vector``). A DoRA trained as in the paper is right in ComfyUI if its
  ``dora_scale`` is m |W| / |V|; so it is written here. With a column for each input it is divided by V's columns.
* ComfyUI's ``alpha`` of OFT and BOFT is no scale but a limit on |Q|, 0 for none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from networks.adapters.orthogonal import cayley, rotate


@dataclass(frozen=True)
class LoraWeights:
    """The update ``alpha / rank * up @ down`` of one linear layer.

    Attributes:
        down: [rank, in]. up: [out, rank]. Any floating dtype, the same device.
        alpha: numerator of the scale.
    """

    down: Tensor
    up: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        """Rows of ``down``."""
        return self.down.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Output rows and input columns of the layer."""
        return self.up.shape[0], self.down.shape[1]

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    def delta(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the update, [out, in], computed in ``dtype``."""
        return torch.mm(self.up.to(dtype), self.down.to(dtype)).mul_(self.scale)

    def apply(self, weight: Tensor, strength: float) -> Tensor:
        """Return ``weight`` [out, in] fp32 plus ``strength`` times the update."""
        return weight + self.delta(torch.float32).mul_(strength)


def names_in_short(names: Sequence[str], shown: int = 5) -> str:
    """Return the first few names and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


TITLES = {"lora": "LoRA", "dora": "DoRA", "lokr": "LoKr", "loha": "LoHa", "oft": "OFT", "boft": "BOFT"}
ADAPTER_MARKS = {  # what in a key speaks of a kind
    ".dora_scale": "dora",
    ".lora_magnitude_vector": "dora",
    ".oft_blocks": "oft",
    ".lokr_": "lokr",
    ".hada_": "loha",
}


@dataclass(frozen=True)
class AdapterWeights:
    """A change to one linear layer.

    Attributes:
        kind: "dora", "lokr", "loha", "oft" or "boft".
        tensors: by name: ``down``, ``up`` and ``magnitude`` or ``dora_scale``; ``lokr_w1`` or ``lokr_w1_a`` and
            ``lokr_w1_b``, ``lokr_w2`` likewise; ``hada_w1_a``, ``hada_w1_b``, ``hada_w2_a``, ``hada_w2_b``;
            ``oft_blocks``.
        alpha: numerator of the scale; the limit on |Q| of oft and boft.
    """

    kind: str
    tensors: Mapping[str, Tensor]
    alpha: float

    @property
    def shape(self) -> tuple[int, int | None]:
        """Output rows and input columns of the layer; None where the kind does not say."""
        t = self.tensors
        if self.kind == "dora":
            return t["up"].shape[0], t["down"].shape[1]
        if self.kind == "loha":
            return t["hada_w1_a"].shape[0], t["hada_w1_b"].shape[1]
        if self.kind == "lokr":
            (rows, columns), (more_rows, more_columns) = self._side("lokr_w1").shape, self._side("lokr_w2").shape
            return rows * more_rows, columns * more_columns
        return t["oft_blocks"].shape[-3] * t["oft_blocks"].shape[-1], None

    @property
    def scale(self) -> float:
        """Factor of the update, of the kinds that add one."""
        t = self.tensors
        for name in ("down", "lokr_w2_b", "lokr_w1_b", "hada_w1_b"):
            if name in t:
                return self.alpha / t[name].shape[0]
        return 1.0

    def apply(self, weight: Tensor, strength: float) -> Tensor:
        """Return ``weight`` [out, in] fp32 changed by ``strength`` times what the adapter changes."""
        t = {name: tensor.float() for name, tensor in self.tensors.items()}
        if self.kind == "lokr":
            return weight + strength * self.scale * torch.kron(self._side("lokr_w1"), self._side("lokr_w2"))
        if self.kind == "loha":
            product = (t["hada_w1_a"] @ t["hada_w1_b"]) * (t["hada_w2_a"] @ t["hada_w2_b"])
            return weight + strength * self.scale * product
        changed = self._decomposed(weight, t) if self.kind == "dora" else self._rotated(weight, t["oft_blocks"])
        return weight + strength * (changed - weight)

    def _decomposed(self, weight: Tensor, t: Mapping[str, Tensor]) -> Tensor:
        merged = weight + self.scale * (t["up"] @ t["down"])
        if "magnitude" in t:
            return merged * (t["magnitude"].reshape(-1, 1) / merged.norm(dim=1, keepdim=True))
        scale = t["dora_scale"]
        if scale.shape[0] == weight.shape[0]:
            return merged * (scale.reshape(-1, 1) / weight.norm(dim=1, keepdim=True))
        return merged * (scale.reshape(1, -1) / merged.norm(dim=0, keepdim=True))

    def _rotated(self, weight: Tensor, blocks: Tensor) -> Tensor:
        if self.alpha > 0:
            size = (blocks - blocks.transpose(-1, -2)).norm() + 1e-8
            blocks = blocks * min(1.0, self.alpha / float(size))
        return rotate(weight.t(), cayley(blocks)).t()

    def _side(self, name: str) -> Tensor:
        """Return w1 or w2 of a LoKr, multiplied out."""
        t = self.tensors
        return t[name].float() if name in t else t[f"{name}_a"].float() @ t[f"{name}_b"].float()


def non_lora_kind(keys: Iterable[str]) -> str | None:
    """Return the kind that a file's keys speak of if it is no plain LoRA; "oft" for BOFT too."""
    return next((kind for key in keys for mark, kind in ADAPTER_MARKS.items() if mark in key), None)
