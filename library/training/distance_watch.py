"""Prodigy and D-Adaptation estimate their own step size d; what it looks like when that does not work.

Looked at only where learning rates are read anyway, at steps that are logged.

- **d never leaves d0.** The estimate grows from d0 as soon as gradients agree over some steps. Where it has not by a
  tenth of the run (at least 50 steps, at most 500), nothing is learnt: the steps are d0, a millionth, of their size.
- **d grows without bound.** A step of Adam's kind moves each weight by about d * lr. LoRA's A begins at numbers of
  about 1 / sqrt(inputs), 0.02 for 3072; with d * lr above 0.1 each single step is larger than what it changes, and the
  estimate, which is of the distance to the solution, only follows that. A d that is not finite is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

LARGEST_STEP = 0.1
_TOO_SMALL = 1e-5  # a d0 above a tenth of the usual rate of a LoRA may be right as it is
_GROWN = 1.01  # times d0: has left it


@dataclass
class DistanceWatch:
    """Watches d in the learning rates of logged steps; each remark is made once."""

    total_steps: int
    starts: Mapping[str, float]  # d0 of each parameter group
    _told: set[str] = field(default_factory=set)

    @property
    def patience(self) -> int:
        """Steps after which d should have left d0."""
        return min(max(self.total_steps // 10, 50), 500)

    def look(self, step: int, rates: Mapping[str, float]) -> list[str]:
        """Return what is to be said after ``step``.

        Args:
            step: of the run.
            rates: of ``read_learning_rates``.
        """
        return [remark for kind, remark in self._remarks(step, rates) if self._is_new(kind)]

    def _is_new(self, kind: str) -> bool:
        new = kind not in self._told
        self._told.add(kind)
        return new

    def _remarks(self, step: int, rates: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        for key, d in rates.items():
            if not key.startswith("d/"):
                continue
            group = key.removeprefix("d/")
            first = self.starts.get(group, 0.0)  # where it is not known, a d that is stuck is not told
            taken = rates.get(f"d*lr/{group}", d)
            if not math.isfinite(d) or taken > LARGEST_STEP:
                yield (
                    "grows",
                    f"warning: step {step}: d of {group} has grown to {d:.3g} (d * lr {taken:.3g}, larger than the "
                    "LoRA's weights): it does not settle; set optimizer_args use_bias_correction=True and "
                    "safeguard_warmup=True, lower d_coef (0.5), or learning_rate = 1.0 if it is higher",
                )
            elif step >= self.patience and d <= _GROWN * first and taken <= _TOO_SMALL:
                yield (
                    "stuck",
                    f"warning: step {step}: d of {group} is still {d:.3g}, where it began: nothing is learnt; set "
                    "optimizer_args d0=1e-5 (or 1e-4), raise d_coef (2), remove the warm-up, or set a higher "
                    "batch_size if the loss is very noisy",
                )
