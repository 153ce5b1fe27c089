"""CAME (Luo et al. 2023, arXiv 2307.02047, algorithm 2): Adafactor's memory with a measure of confidence.

Of a matrix's squared gradients the means of rows and of columns are kept, ``V ~ r c^T / mean(r)``, as Adafactor does;
the update that follows is clipped and averaged, and then divided by how far it lately was from its average, which is
kept factored too:

    u = g / sqrt(V(g^2 + eps1))                 u /= max(1, rms(u) / clip_threshold)
    m = b1 m + (1 - b1) u                       w -= lr * (m / sqrt(V((u - m)^2 + eps2)) + weight_decay * w)

A vector has its full second moment and no confidence. There is no bias correction, as in the authors' package
(came-pytorch 0.1.3), whose arguments these are. Written here because that package has had no release since 2023 and
pytorch_optimizer, which has it too, brings a hundred others; for a LoRA it is one average a weight beside two vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class CAME(Optimizer):
    """See the module's text.

    Args:
        params: parameters or groups of them.
        lr: learning rate; about half of AdamW's.
        eps: added to squared gradients and to squared deviations.
        clip_threshold: root mean square of an update above which it is scaled down.
        betas: decay of the average, of the squared gradients and of the deviations.
        weight_decay: decoupled, times ``lr``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
    ) -> None:
        if len(betas) != 3 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas {betas} are not three numbers from 0 to below 1")
        if len(eps) != 2 or clip_threshold <= 0:
            raise ValueError("eps are two numbers, and clip_threshold is above 0")
        values = {"lr": lr, "eps": eps, "clip_threshold": clip_threshold, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, values)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad.float(), group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta_mean, beta_square, beta_apart) = self.state[parameter], group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(gradient)
        square = _averaged(state, "exp_avg_sq", gradient.square().add_(group["eps"][0]), beta_square)
        update = gradient * square
        update /= (update.square().mean().sqrt() / group["clip_threshold"]).clamp(min=1.0)
        mean = state["exp_avg"].lerp_(update, 1 - beta_mean)
        step = mean
        if gradient.ndim > 1:
            apart = (update - mean).square_().add_(group["eps"][1])
            step = mean * _averaged(state, "exp_avg_res", apart, beta_apart)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(step.to(parameter.dtype), alpha=-group["lr"])


def _averaged(state: dict[str, Any], name: str, values: Tensor, beta: float) -> Tensor:
    """Let averages in ``state`` take in positive ``values``; return one over the root of what they say of each."""
    if values.ndim < 2:
        return _average(state, name, values, beta).rsqrt()
    rows = _average(state, f"{name}_row", values.mean(dim=-1), beta)
    columns = _average(state, f"{name}_col", values.mean(dim=-2), beta)
    return (rows / rows.mean(dim=-1, keepdim=True)).rsqrt().unsqueeze(-1) * columns.rsqrt().unsqueeze(-2)


def _average(state: dict[str, Any], name: str, values: Tensor, beta: float) -> Tensor:
    if name not in state:
        state[name] = torch.zeros_like(values)
    return state[name].mul_(beta).add_(values, alpha=1 - beta)
