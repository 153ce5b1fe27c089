"""What linear layers are given to multiply: collected while a model runs on calibration data.

A layer's second moment is [in, in]: 38 MB for FLUX's 3072 inputs, 940 MB for the 15360 of a single block's last
layer, 60 GB for all layers together. So layers are taken in groups whose moments fit into a given memory, and the
calibration runs once for each group. Keeping sampled token rows of all layers instead would need one run, but fewer
rows than inputs leave the moment without full rank, just where the formulas invert it; rows are therefore only kept
of held-out batches, a few hundred a layer, to measure with. Layers that share an input (q, k, v) share what is
collected.

Forward hooks would miss most layers: attention and LoRA layers call each other without going through ``__call__``
(``library.nn.frozen_linear``, ``networks.adapters.lora``). A layer that is watched is wrapped instead, in a module that
those short cuts do not know, and is put back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from library.randomness import generator

Forward = Callable[[], Tensor]
CHECK_ROWS = 512  # rows a layer kept of held-out batches: an rms over them is good to about 1/sqrt(2 * 512) = 3 %


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of one layer over the calibration.

    Attributes:
        moment: [in, in] fp32, X^T X / n over all rows of the batches to fit.
        count: n.
        amax: [in] fp32, largest magnitude of each channel.
        rows: [k, in] fp32, sampled rows of the held-out batches; k is 0 where there are none.
    """

    moment: Tensor
    count: int
    amax: Tensor
    rows: Tensor

    @property
    def rms(self) -> Tensor:
        """Root mean square of each channel, [in]."""
        return self.moment.diagonal().clamp_min(0).sqrt()


def collect_inputs(
    model: nn.Module,
    names: Sequence[str],
    fit: Sequence[Forward],
    check: Sequence[Forward] = (),
    *,
    memory_bytes: int = 4 << 30,
    seed: int = 0,
) -> Iterator[dict[str, LayerInputs]]:
    """Yield the inputs of the layers ``names`` of ``model``, group by group; each layer is in one group.

    Args:
        model: is run by the calls of ``fit`` and ``check``; LoRA and fp8 layers may be in it.
        names: modules that take one tensor [..., in].
        fit: each runs the model on one batch.
        check: the same on batches that nothing is fitted to.
        memory_bytes: for the moments of one group; a single layer that needs more is a group of its own.
        seed: chooses the rows that are kept.

    Raises:
        ValueError: a layer is never called, or is given a NaN or an infinity.
    """
    shared = _layers_by_input(model, names, fit[0])
    for group in _groups(model, shared, memory_bytes):
        sums = {names[0]: _Sum(model.get_submodule(names[0]).in_features) for names in group}
        with torch.no_grad():
            with watched(model, {first: sums[first].add for first in sums}):
                for run in fit:
                    run()
            share = -(-CHECK_ROWS // max(1, len(check)))
            for number, run in enumerate(check):
                keys = {first: (seed, "rows", first, number) for first in sums}
                with watched(model, {first: partial(sums[first].keep, share, key) for first, key in keys.items()}):
                    run()
        yield {name: inputs for names in group for inputs in (sums[names[0]].finish(names[0]),) for name in names}
        del sums


class _Sum:
    """Adds up what a layer is given."""

    def __init__(self, features: Any) -> None:
        self.features: int = features
        self.moment: Tensor | None = None
        self.amax = torch.zeros(0)
        self.count = 0
        self.rows: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        rows = x.detach().reshape(-1, self.features).float()
        if self.moment is None:
            self.moment = rows.new_zeros(self.features, self.features)
            self.amax = rows.new_zeros(self.features)
        self.moment.addmm_(rows.t(), rows)
        self.amax = torch.maximum(self.amax, rows.abs().amax(dim=0))
        self.count += rows.shape[0]

    def keep(self, count: int, key: tuple[int | str, ...], x: Tensor) -> None:
        rows = x.detach().reshape(-1, self.features)
        chosen = torch.randperm(rows.shape[0], generator=generator(*key))[:count].to(rows.device)
        self.rows.append(rows[chosen].float())

    def finish(self, name: str) -> LayerInputs:
        assert self.moment is not None
        if not torch.isfinite(self.amax).all():
            raise ValueError(f"{name}: was given a NaN or an infinity")
        rows = torch.cat(self.rows) if self.rows else self.moment.new_zeros(0, self.features)
        moment = self.moment.div_(self.count)
        self.moment = None  # divided once
        return LayerInputs(moment, self.count, self.amax, rows)


def _layers_by_input(model: nn.Module, names: Sequence[str], run: Forward) -> list[list[str]]:
    """Return the layers in the order in which they are called, those with the very same input together."""
    shared: list[list[str]] = []
    last: list[Tensor] = []  # kept alive, so that no other input can have its identity

    def note(name: str, x: Tensor) -> None:
        if not any(name in layers for layers in shared):
            if last and last[0] is x:
                shared[-1].append(name)
            else:
                shared.append([name])
        last[:] = [x]

    with torch.no_grad(), watched(model, {name: partial(note, name) for name in names}):
        run()
    if missing := sorted(set(names) - {name for layers in shared for name in layers}):
        raise ValueError(f"never called: {', '.join(missing)}")
    return shared


def _groups(model: nn.Module, shared: Sequence[list[str]], memory_bytes: int) -> Iterator[list[list[str]]]:
    """Yield runs of layers whose moments together need at most ``memory_bytes``."""
    group: list[list[str]] = []
    used = 0
    for names in shared:
        features: Any = model.get_submodule(names[0]).in_features
        needed = 4 * features**2
        if group and used + needed > memory_bytes:
            yield group
            group, used = [], 0
        group.append(names)
        used += needed
    if group:
        yield group


class _Watched(nn.Module):
    """A layer that shows its input before it is called; everything else is asked of the layer."""

    def __init__(self, layer: nn.Module, show: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.layer = layer
        self._show = show

    def forward(self, x: Tensor) -> Any:
        self._show(x)
        return self.layer(x)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


@contextmanager
def watched(model: nn.Module, shows: Mapping[str, Callable[[Tensor], None]]) -> Iterator[None]:
    """Show what the layers named in ``shows`` are given, while the block runs."""
    layers = {name: model.get_submodule(name) for name in shows}
    try:
        for name, layer in layers.items():
            model.set_submodule(name, _Watched(layer, shows[name]))
        yield
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)
