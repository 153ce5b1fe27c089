"""What happens to the weights after an update: an average follows them, their norms are limited and measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from library.errors import counted, names_in_short, undone
from networks.adapters.base import AdapterLinear

_NOTED, _CHECKED = 10, 20  # steps after a run's first, between which every kind of layer should move


@contextmanager
def given_back(tensors: Sequence[Tensor], what: str) -> Iterator[None]:
    """Let ``tensors`` be written to inside the block; afterwards they are as they were before it, bit for bit.

    The copies are made first: an error in making them changes nothing.

    Raises:
        NotRestoredError: they could not be given back; ``what`` says what they held meanwhile.
    """
    copies = [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def put_back() -> None:
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)

    with undone(what, put_back):
        yield


class WeightAverage:
    """An exponential moving average of the LoRA's weights (Polyak averaging), shown and saved instead of them.

    After every optimizer step ``average = decay * average + (1 - decay) * weights``. A long memory would hold on to the
    untrained weights for as long, so the decay grows with the number t of updates up to the one asked for:
    ``min(decay, (1 + t) / (10 + t))``, the warm-up of TensorFlow's and diffusers' averages. Averages are fp32 whatever
    dtype the weights have: in bf16 an update by a thousandth would be rounded away. They cost
    four bytes for each weight.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self._parameters = list(parameters)
        self._decay = decay
        self.updates = 0
        self.averages = [p.detach().float().clone() for p in parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are after an optimizer step."""
        share = 1 - min(self._decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        torch._foreach_lerp_(self.averages, [p.detach().float() for p in self._parameters], share)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside the block the parameters hold their averages; afterwards they are back bit for bit."""
        with given_back(self._parameters, "the average of the weights"):
            with torch.no_grad():
                for parameter, average in zip(self._parameters, self.averages, strict=True):
                    parameter.copy_(average)
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return averages and number of updates."""
        return {"updates": self.updates, "averages": list(self.averages)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self.updates = state_dict["updates"]
        for average, saved in zip(self.averages, state_dict["averages"], strict=True):
            average.copy_(saved)


class WeightNormLimit:
    """Max norm regularisation: no layer's update grows beyond a norm (``scale_weight_norms``, kohya's sd-scripts).

    After each optimizer step the update ``D = s B A`` of every layer, s = alpha / rank, is compared with the limit m
    (``apply_max_norm_regularization`` in ``networks/lora_flux.py`` there):

        r = min(|D|, m) / max(|D|, m / 2)        if |D| > m:  A *= sqrt(r), B *= sqrt(r)

    so that what was larger has the norm m. The Frobenius norm needs no product of the weight's size:
    ``|B A|^2 = sum((B^T B) * (A A^T))``, two matrices of rank x rank. What is measured stays on the device until a step
    is logged.

    Attributes:
        limit: m above.
        layers: with ``lora_A``, ``lora_B`` and a scale.
    """

    def __init__(self, limit: float, layers: Sequence[AdapterLinear]) -> None:
        self.limit, self.layers = limit, layers
        self._norms: Tensor | None = None  # [layers] fp32, before scaling

    @torch.no_grad()
    def apply(self, is_taken: Tensor) -> None:
        """Scale down what is too large, after a step of the optimizer that is taken; ``is_taken`` [] tells."""
        norms = []
        for layer in self.layers:
            down, up = (part for name, part in layer.trained().items() if name in ("lora_A.weight", "lora_B.weight"))
            norm = product_norm(up, down) * layer.scale
            norms.append(norm)
            factor = (self.limit / norm.clamp(min=self.limit)).sqrt()
            for part in (down, up):
                part.copy_(torch.where((factor < 1) & is_taken.to(factor.device), part.float() * factor, part.float()))
        self._norms = torch.stack([norm.to(norms[0].device) for norm in norms])

    def metrics(self) -> dict[str, float]:
        """Return what sd-scripts logs of the last step, under its names; the device is waited for.

        How many layers were scaled, and the largest and the mean norm after that.
        """
        if self._norms is None:
            return {}
        kept = self._norms.clamp(max=self.limit)
        return {
            "max_norm/keys_scaled": float((self._norms > self.limit).sum()),
            "max_norm/max_key_norm": float(kept.max()),
            "norm/avg_key_norm": float(kept.mean()),
        }


def product_norm(up: Tensor, down: Tensor) -> Tensor:
    """Return the Frobenius norm [] fp32 of ``up @ down``, [out, rank] and [rank, in]."""
    up, down = up.float(), down.float()
    with torch.autocast(up.device.type, enabled=False):
        return ((up.t() @ up) * (down @ down.t())).sum().clamp_min(0).sqrt()


class UpdateNorms:
    """How far training has moved each layer of an adapter, and which layers it does not move.

    Of a layer that is the Frobenius norm of the change, since the run's first step, of the factor that begins at zero:
    B of a LoRA (``AdapterLinear.from_zero``). While that factor is zero the layer changes nothing, and weight decay,
    which moves the other factors without any gradient, leaves it at zero. So one pass over half of the weights tells,
    and a new adapter needs no copy of its start; one that goes on from a file or a state keeps it in host memory, four
    bytes a weight.

    Norms are read at the logged steps up to ``checked_at`` and at every save. At ``checked_at`` a layer is at fault if
    it has not moved at all, or if no layer of its kind has since step ``_NOTED``. While a schedule warms up, the rate
    below a tenth of what it leads to, this waits for the next logged step.

    Attributes:
        checked_at: the step at which layers that have learnt nothing are named.
        is_checked: whether that was done.
        values: the norms that were read last, one a layer. read_at: at which step that was.
        grad_norm: of the last logged step.
    """

    def __init__(self, layers: Mapping[str, AdapterLinear], kinds: Mapping[str, str], first_step: int) -> None:
        """Take the start of ``layers``, of which ``kinds`` tells the kind that a table shows."""
        factors = {
            name: p for name, layer in layers.items() for part, p in layer.trained().items() if part in layer.from_zero
        }
        self._factors, self._kinds = factors, {name: kinds[name] for name in factors}
        self._first, self.checked_at, self.is_checked = first_step, first_step + _CHECKED, False
        self._start: list[Tensor] | None = None
        self._noted: Tensor | None = None
        self.values, self.read_at = [0.0] * len(factors), -1
        self.grad_norm: float | None = None
        if any(self.measure().tolist()):
            self._start = [factor.detach().to("cpu", torch.float32, copy=True) for factor in factors.values()]

    @torch.no_grad()
    def measure(self) -> Tensor:
        """Return the norms, [layers] fp32 on the device."""
        factors = [factor.detach().float() for factor in self._factors.values()]
        if self._start is not None:
            factors = [now - start.to(now.device) for now, start in zip(factors, self._start, strict=True)]
        return torch.stack([norm.to(factors[0].device) for norm in torch._foreach_norm(factors)])

    def after_step(self, step: int) -> None:
        """Remember, on the device, the norms that the check compares with."""
        if step == self._first + _NOTED:
            self._noted = self.measure()

    def read(self, step: int, norms: Tensor | None = None) -> dict[str, float]:
        """Return the norm of each kind of layer as metrics call it, of ``norms`` measured after ``step`` or of now."""
        self.values, self.read_at = (self.measure() if norms is None else norms).tolist(), step
        squares: defaultdict[str, float] = defaultdict(float)
        for kind, value in zip(self._kinds.values(), self.values, strict=True):
            squares[kind] += value**2
        return {f"update_norm/{kind}": total**0.5 for kind, total in squares.items()}

    @property
    def is_zero(self) -> bool:
        """Whether the adapter, as read last, changes nothing, or is what a file had that it was begun from."""
        return not any(self.values) and (self._start is None or self._first == 0)

    def check(self, groups: Sequence[Mapping[str, Any]], at_end: bool = False) -> str | None:
        """Return, once, a warning that names the layers that have learnt nothing by the step read last, if any.

        Args:
            groups: of the optimizer, as its schedule has left them.
            at_end: no later step can be waited for.
        """
        warms_up = any(float(group["lr"]) < 0.1 * float(group.get("initial_lr", 0.0)) for group in groups)
        is_late = self.read_at >= self.checked_at and not warms_up
        if self.is_checked or self.read_at <= self._first or not (is_late or at_end):
            return None
        self.is_checked = True
        # a few steps, or those of a rate near zero, may be too small to show beside what is there
        noted = self._noted.tolist() if is_late and self._noted is not None else [0.0] * len(self.values)
        kinds = list(self._kinds.values())
        moving = {kind for kind, now, before in zip(kinds, self.values, noted, strict=True) if now != before}
        stalled = [not now or kind not in moving for kind, now in zip(kinds, self.values, strict=True)]
        if not any(stalled):
            return None
        if not any(float(group.get("initial_lr", group["lr"])) for group in groups):
            reason = "the learning rate is 0; set learning_rate"
        elif self.grad_norm == 0:
            reason = "all gradients are zero; check masks and loss weights"
        elif self._start is not None or all(stalled):
            reason = "no gradient reaches them, or the learning rate is too small to change them; raise learning_rate"
        else:
            reason = "no gradient reaches them; leave them out with exclude_patterns in network_args"
        layers = f"{sum(stalled):,} of {counted(len(stalled), 'layer')}"
        of_kinds = ", ".join(dict.fromkeys(compress(kinds, stalled)))
        names = names_in_short(list(compress(self._factors, stalled)))
        return f"after step {self.read_at}, {layers} ({of_kinds}) have learnt nothing: {names}; {reason}"
