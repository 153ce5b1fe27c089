"""What every training stage keeps: averaged weights, a resumable state on disk, a line of progress."""

import os
import time
from pathlib import Path

import torch


class AveragedWeights:
    """Exponential moving average of a module's parameters; a warm-up soon forgets the start."""

    def __init__(self, module: torch.nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.shadow = {name: value.detach().clone() for name, value in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: torch.nn.Module) -> None:
        self.updates += 1
        weight = 1.0 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                self.shadow[name].lerp_(value, weight)
            else:
                self.shadow[name].copy_(value)

    def state_dict(self) -> dict:
        return {"updates": self.updates, "shadow": self.shadow}

    def load_state_dict(self, state: dict) -> None:
        self.updates, self.shadow = state["updates"], state["shadow"]


class RunState:
    """What a stage trains: the model, its average, its optimizers; on disk all that a resumed run needs."""

    def __init__(self, model: torch.nn.Module, decay: float, optimizers: list[torch.optim.Optimizer]) -> None:
        self.model, self.optimizers = model, optimizers
        self.average = AveragedWeights(model, decay)

    def restore(self, path: Path) -> int:
        """Load a saved state; return the step to go on from."""
        state = load_state(path)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return state["step"]

    def save(self, path: Path, step: int, **more: object) -> None:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"model": self.model.state_dict(), "average": self.average.state_dict(), "optimizers": optimizers}
        save_state(path, state | {"step": step} | more)


def save_state(path: Path, state: dict) -> None:
    """Write under a temporary name, then rename: a state on disk is always a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load_state(path: Path) -> dict:
    if not path.exists():
        raise ValueError(f"{path}: no saved state; run the earlier stage first, or this one without --resume")
    return torch.load(path, map_location="cpu", weights_only=True)


def cosine_rate(step: int, steps: int, peak: float, warmup: int = 100, floor: float = 0.02) -> float:
    """Linear warm-up, then half a cosine from `peak` down to `floor` * `peak`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = torch.tensor((step - warmup) / max(1, steps - warmup)).clamp(0, 1)
    return peak * float(floor + (1 - floor) * 0.5 * (1 + torch.cos(done * torch.pi)))


class Progress:
    """Prints one line every `every` steps: step, smoothed losses, seconds a step, minutes to go."""

    def __init__(self, stage: str, first_step: int, steps: int, every: int) -> None:
        self.stage, self.steps, self.every = stage, steps, every
        self.started, self.first_step = time.perf_counter(), first_step
        self.means: dict[str, float] = {}

    def report(self, step: int, losses: dict[str, float]) -> None:
        for name, value in losses.items():
            self.means[name] = 0.98 * self.means[name] + 0.02 * value if name in self.means else value
        if (step + 1) % self.every and step + 1 != self.steps:
            return
        pace = (time.perf_counter() - self.started) / (step + 1 - self.first_step)
        words = "  ".join(f"{name} {value:.4f}" for name, value in self.means.items())
        print(
            f"{self.stage} {step + 1}/{self.steps}  {words}  {pace:.3f} s/it  "
            f"{pace * (self.steps - step - 1) / 60:.1f} min to go",
            flush=True,
        )
