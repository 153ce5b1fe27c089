"""Training a LoRA least in the directions of a layer's inputs that general images use most.

What a LoRA changes elsewhere is ``s B A x`` for the inputs ``x`` that a layer has there. Their second moment has a few
large eigenvalues: of the tiny FLUX's attention 32 of 160 directions hold 85 % of it, of its modulation one holds 96 %.
A subject rarely needs these. So A is trained as ``A = Z M`` with

    M = I - U (1 - w) U^T        U [in, k]: the leading eigenvectors, w_i = sqrt((rest + d) / (e_i + d))

where e_i are their eigenvalues, rest is the mean of the others and d a hundredth of the mean of all: along every
direction a step changes about as much of a general image's output. That is the square root of the moment's inverse, the
input's half of K-FAC's preconditioner (Martens and Grosse 2015, arXiv 1503.05671), taken on the data to keep as natural
continual learning does (Kao et al. 2021, arXiv 2106.08085). Starting outside of the leading directions is not enough
(LoRA-Null, arXiv 2503.02659; CorDA, 2406.05223): a new subject is learnt with large steps, which leave the start
(``bench/preservation.py``: no gain).

Z is never stored. An optimizer that follows gradients alone moves Z by what it makes of the gradients ``G M`` of Z, and
A by that times M: hooks around its step do both. Files, averages and everything else see A.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from library.precision.parity.activations import watched
from library.randomness import generator

_OVERSAMPLED = 16  # columns of the sketch beyond the directions that are wanted
_DAMPING = 0.01  # d above, of the mean eigenvalue


class Directions(NamedTuple):
    """A layer's leading input directions.

    Attributes:
        basis: U above, [in, k] fp32.
        lost: 1 - w above, [k] fp32, in [0, 1).
    """

    basis: Tensor
    lost: Tensor


class InputPreconditioner:
    """Takes the steps of the A of LoRA layers as the module's text says."""

    def __init__(self, downs: Mapping[str, nn.Parameter], count: int) -> None:
        """Take A of each layer, [rank, in] fp32; until :meth:`set` the steps are ordinary ones.

        ``count`` is k above; a layer has at most half as many as inputs.
        """
        groups: defaultdict[torch.Size, dict[str, nn.Parameter]] = defaultdict(dict)
        for name, down in downs.items():
            groups[down.shape][name] = down
        self._groups = [_Group(layers, count) for layers in groups.values()]

    def attach(self, optimizer: Optimizer) -> None:
        """Change the steps of ``optimizer``, which has these parameters among others."""
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    @torch.no_grad()
    def set(self, found: Mapping[str, Directions], start: bool) -> None:
        """Take the directions of each layer; with ``start`` A, as it was drawn, becomes A M."""
        for group in self._groups:
            for row, (name, down) in enumerate(group.downs.items()):
                group.basis[row].copy_(found[name].basis)
                group.lost[row].copy_(found[name].lost)
                if start:
                    down.copy_(group.applied(down[None], [row])[0])

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in self._groups:
            group.before()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in self._groups:
            group.after()

    def state_dict(self) -> dict[str, Any]:
        """Return the directions."""
        return {"basis": [group.basis for group in self._groups], "lost": [group.lost for group in self._groups]}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take the directions that :meth:`state_dict` returned."""
        for group, basis, lost in zip(self._groups, state_dict["basis"], state_dict["lost"], strict=True):
            group.basis.copy_(basis)
            group.lost.copy_(lost)


class _Group:
    """Layers whose A have one shape, so that few kernels serve all of them."""

    def __init__(self, downs: Mapping[str, nn.Parameter], count: int) -> None:
        self.downs, (first, *_) = downs, downs.values()
        size = min(count, first.shape[1] // 2)
        self.basis = first.new_zeros(len(downs), first.shape[1], size)
        self.lost = first.new_zeros(len(downs), size)
        self.stepped: list[nn.Parameter] = []

    def applied(self, values: Tensor, rows: list[int]) -> Tensor:
        """Return ``values`` [n, rank, in] times M of the layers ``rows``."""
        every = len(rows) == len(self.basis)
        basis, lost = (self.basis, self.lost) if every else (self.basis[rows], self.lost[rows])
        return torch.baddbmm(values, (values @ basis) * lost[:, None], basis.mT, alpha=-1)

    @torch.no_grad()
    def before(self) -> None:
        self.rows = [row for row, down in enumerate(self.downs.values()) if down.grad is not None]
        downs = [*self.downs.values()]
        self.stepped = [downs[row] for row in self.rows]
        if gradients := [down.grad for down in self.stepped if down.grad is not None]:
            torch._foreach_copy_(gradients, self.applied(torch.stack(gradients), self.rows).unbind())
            self.before_step = torch.stack([down.detach() for down in self.stepped])

    @torch.no_grad()
    def after(self) -> None:
        if self.stepped:
            steps = torch.stack([down.detach() for down in self.stepped]) - self.before_step
            moved = self.before_step + self.applied(steps, self.rows)
            torch._foreach_copy_([down.detach() for down in self.stepped], moved.unbind())
            del self.before_step


@torch.no_grad()
def leading_directions(
    model: nn.Module, names: Iterable[str], run: Callable[[], None], count: int, seed: int
) -> dict[str, Directions]:
    """Return the leading directions of what the layers ``names`` of ``model`` are given in ``run``.

    A layer's whole moment is never held: a first run multiplies it by few random columns, a second by an orthonormal
    basis of the product (subspace iteration, Halko et al. 2011, arXiv 0909.4061), from which the leading part follows
    (the Nystroem approximation, Tropp et al. 2017, arXiv 1706.05736, algorithm 3).
    """
    sketches = {name: _Sketch(model.get_submodule(name), count, (seed, "directions", name)) for name in names}
    with watched(model, {name: partial(_Sketch.add, sketch) for name, sketch in sketches.items()}):
        run()
        for sketch in sketches.values():
            sketch.refine()
        run()
    return {name: sketch.directions() for name, sketch in sketches.items()}


class _Sketch:
    """The second moment of a layer's inputs, times random columns."""

    def __init__(self, layer: Any, count: int, key: tuple[int | str, ...]) -> None:
        self.features: int = layer.in_features
        self.size = min(count, self.features // 2)
        columns = min(self.features, self.size + _OVERSAMPLED)
        drawn = torch.randn(self.features, columns, generator=generator(*key), dtype=torch.float64)
        self.columns, self.product = torch.linalg.qr(drawn)[0].float(), torch.zeros(())
        self.trace, self.seen = torch.zeros((), dtype=torch.float64), 0

    def add(self, x: Tensor) -> None:
        rows = x.detach().reshape(-1, self.features).float()
        if not self.seen:
            self.columns, self.trace = self.columns.to(rows.device), self.trace.to(rows.device)
            self.product = rows.new_zeros(self.columns.shape)
        with torch.autocast(rows.device.type, enabled=False):
            self.product.addmm_(rows.t(), rows @ self.columns)
        self.trace += rows.square().sum(dtype=torch.float64)
        self.seen += len(rows)

    def refine(self) -> None:
        """Begin again with a basis of what was found."""
        if self.seen:
            self.columns = torch.linalg.qr(self.product.double())[0].float()
            self.trace, self.seen = torch.zeros_like(self.trace), 0

    def directions(self) -> Directions:
        """Return what was found; a layer that is never called, or is given a NaN, loses none."""
        trace = float(self.trace)
        if not 0 < trace < float("inf"):
            return Directions(torch.zeros(self.features, self.size), torch.zeros(self.size))
        columns, product = self.columns.double(), self.product.double()
        core = columns.t() @ product
        eigenvalues, vectors = torch.linalg.eigh((core + core.t()) / 2)
        significant = eigenvalues > 1e-7 * eigenvalues[-1]  # the others are rounding of fp32
        root = torch.where(significant, eigenvalues, torch.inf).rsqrt()
        basis, singular, _ = torch.linalg.svd(product @ (vectors * root), full_matrices=False)
        values = singular.square()[: self.size]
        damping = _DAMPING * trace / self.features
        rest = max(0.0, trace - float(values.sum())) / (self.features - self.size)
        kept = ((rest + damping) / (values + damping)).sqrt().clamp_max(1)
        return Directions(basis[:, : self.size].float(), (1 - kept).float())
