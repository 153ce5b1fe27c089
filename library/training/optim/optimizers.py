"""Optimizers that are written here: CAME, SOAP, and Muon joined with AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer


class _PerParameter(Optimizer):
    """An optimizer whose step updates each parameter that has a gradient by itself."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step."""
        assert closure is None, "the loss is not evaluated again"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class CAME(_PerParameter):
    """CAME (Luo et al. 2023, arXiv 2307.02047, algorithm 2): Adafactor's memory with a measure of confidence.

    Of a matrix's squared gradients the means of rows and of columns are kept, ``V ~ r c^T / mean(r)``, as Adafactor
    does; the update that follows is clipped and averaged, and then divided by how far it lately was from its average,
    which is kept factored too:

        u = g / sqrt(V(g^2 + eps1))                 u /= max(1, rms(u) / clip_threshold)
        m = b1 m + (1 - b1) u                       w -= lr * (m / sqrt(V((u - m)^2 + eps2)) + weight_decay * w)

    A vector has its full second moment and no confidence. There is no bias correction, as in the authors' package
    (came-pytorch 0.1.3), whose arguments these are. Written here because that package has had no release since 2023 and
    pytorch_optimizer, which has it too, brings a hundred others; for a LoRA it is one average a weight beside two
    vectors.

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

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, gradient, (beta_mean, beta_square, beta_apart) = self.state[parameter], gradient.float(), group["betas"]
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


class SOAP(_PerParameter):
    """SOAP: Adam in the eigenbasis of Shampoo's preconditioners (Vyas et al. 2024, https://arxiv.org/abs/2409.11321).

    Adam scales every entry of a matrix G by itself. Where entries work together, as a LoRA's rank directions do, the
    directions that matter are turned against the entries, and Adam hardly sees them. Here the moments are those of

        G' = Q_L^T G Q_R,    Q_L, Q_R: eigenvectors of the running means of G G^T and G^T G

    and the step is turned back. Between refreshes Q stays; a refresh is a step of the power method and a QR
    decomposition (the paper's algorithm 4). A side longer than ``max_precondition_dim`` is not turned: of a LoRA's
    factors the side of the rank is, which costs next to nothing. On a loss with little noise, as a teacher's, it goes
    further in the same number of steps than AdamW.

    Args:
        lr: a step's size, as AdamW's. betas: of both moments. shampoo_beta: of the preconditioners.
        eps: added to the root of the second moment. weight_decay: decoupled, as AdamW's.
        precondition_frequency: steps between refreshes of the basis.
        max_precondition_dim: longest side that gets a basis, whose memory is twice its square.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 128,
    ) -> None:
        if precondition_frequency < 1:
            raise ValueError(f"precondition_frequency {precondition_frequency} is below 1")
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"shampoo_beta": shampoo_beta, "precondition_frequency": precondition_frequency}
        super().__init__(params, defaults | {"max_precondition_dim": max_precondition_dim})

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[parameter], group["betas"]
        gradient = gradient.to(torch.promote_types(parameter.dtype, torch.float32))
        if not state:
            state |= {"step": 0, "mean": torch.zeros_like(gradient), "square": torch.zeros_like(gradient)}
            for side in self._sides(gradient, group["max_precondition_dim"]):
                state[f"outer_{side}"] = _outer(gradient, side)
                state[f"basis_{side}"] = torch.linalg.eigh(state[f"outer_{side}"])[1].flip(1).contiguous()
        state["step"] += 1
        turned = _turn(gradient, state)
        state["mean"].lerp_(gradient, 1 - first)
        state["square"].mul_(second).addcmul_(turned, turned, value=1 - second)
        mean = _turn(state["mean"], state) / (1 - first ** state["step"])
        size = (state["square"] / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(_turn(mean.div_(size), state, back=True).to(parameter.dtype), alpha=-group["lr"])
        for side in self._sides(gradient, group["max_precondition_dim"]):
            outer = state[f"outer_{side}"].lerp_(_outer(gradient, side), 1 - group["shampoo_beta"])
            if state["step"] % group["precondition_frequency"] == 0:
                state[f"basis_{side}"] = torch.linalg.qr(outer @ state[f"basis_{side}"])[0].contiguous()

    @staticmethod
    def _sides(gradient: Tensor, max_precondition_dim: int) -> list[int]:
        return (
            [side for side, size in enumerate(gradient.shape) if size <= max_precondition_dim]
            if gradient.ndim == 2
            else []
        )


def _outer(gradient: Tensor, side: int) -> Tensor:
    return gradient @ gradient.t() if side == 0 else gradient.t() @ gradient


def _turn(gradient: Tensor, state: dict[str, Any], back: bool = False) -> Tensor:
    """Return ``gradient`` in the basis of ``state``, or from it; sides without one stay. A new tensor."""
    left, right = state.get("basis_0"), state.get("basis_1")
    turned = gradient.clone()
    if left is not None:
        turned = (left if back else left.t()) @ turned
    if right is not None:
        turned = turned @ (right.t() if back else right)
    return turned


class MuonWithAdamW(Optimizer):
    """Muon for hidden matrices and AdamW for everything else, as one optimizer.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) orthogonalises a matrix's momentum; it is made
    for the matrices inside blocks, not for embeddings, heads and vectors. torch has it; here the two are joined, so
    that the schedule, clipping and states see one optimizer. With ``match_rms_adamw`` (Moonlight, arXiv 2502.16982) a
    Muon step has the size of an AdamW step, and one learning rate does for both.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        """Let Muon have the group called ``hidden``, AdamW the others."""
        hidden = [group for group in groups if group["name"] == "hidden"]
        others = [group for group in groups if group["name"] != "hidden"]
        options: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        self.muon = Muon(hidden, lr=lr, adjust_lr_fn="match_rms_adamw", **options)
        self.adamw = AdamW(others, lr=lr, betas=betas, fused=True)
        super().__init__([p for group in groups for p in group["params"]], {"lr": lr})
        self._join()

    def _join(self) -> None:
        """Show the groups and states of both as this optimizer's; the objects are shared, not copied."""
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step of both."""
        assert closure is None, "neither evaluates the loss again"
        self.muon.step()
        self.adamw.step()

    def state_dict(self) -> dict[str, Any]:
        """Return both states."""
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put both states back."""
        self.muon.load_state_dict(state_dict["muon"])
        self.adamw.load_state_dict(state_dict["adamw"])
        self._join()
