"""Muon for hidden matrices and AdamW for everything else, as one optimizer.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) orthogonalises a matrix's momentum; it is made for
the matrices inside blocks, not for embeddings, heads and vectors. torch has it; here the two are joined, so that the
schedule, clipping and states see one optimizer. With ``match_rms_adamw`` (Moonlight, arXiv 2502.16982) a Muon step has
the size of an AdamW step, and one learning rate does for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer


class MuonWithAdamW(Optimizer):
    """Both optimizers, each over its own parameter groups."""

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
        ours = [group for group in groups if group["name"] == "hidden"]
        others = [group for group in groups if group["name"] != "hidden"]
        options: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        self.muon = Muon(ours, lr=lr, adjust_lr_fn="match_rms_adamw", **options)
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
