"""The optimizers, a row each: where a class lives, its defaults, and what the rules must know of it by name alone.

``optimizer_type`` is one of these names (ours and kohya's, in any case), any other class of ``torch.optim``, or a
dotted path to a class. The rules judge it by its row, so that a configuration is checked without importing a package;
``library.training.optim.factory`` imports the class. A new optimizer is a row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class OptimizerType:
    """One optimizer.

    Attributes:
        module, name: where its class lives.
        defaults: arguments it gets where the user names none.
        splits: for which parts of a weight its step is that part of the whole step: "elements" for any, "rows" where
            all processes step their rows at once (Prodigy's sums go over all of them), "no" for none.
        estimates: the step size ``d`` that it finds by itself: none, one of the run, or one a parameter group.
        averages: whether it trains other weights than it would deploy (schedule-free).
    """

    module: str
    name: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    splits: Literal["no", "rows", "elements"] = "no"
    estimates: Literal["no", "run", "group"] = "no"
    averages: bool = False


_NESTEROV = {"momentum": 0.9, "nesterov": True}  # kohya's defaults for its SGDNesterov names


def _classes(module: str, names: str, **about: Any) -> dict[str, OptimizerType]:
    """Return the rows of optimizers that are alike and called as their classes are."""
    return {name: OptimizerType(module, name, **about) for name in names.split()}


OPTIMIZERS: dict[str, OptimizerType] = {
    "AdamW": OptimizerType("torch.optim", "AdamW", {"fused": True}, splits="elements"),
    **_classes("torch.optim", "Adam SGD", splits="elements"),
    "SGDNesterov": OptimizerType("torch.optim", "SGD", _NESTEROV, splits="elements"),
    **_classes("bitsandbytes.optim", "AdamW8bit PagedAdamW PagedAdamW8bit PagedAdamW32bit Lion8bit PagedLion8bit"),
    **_classes("bitsandbytes.optim", "AdEMAMix8bit PagedAdEMAMix8bit"),
    "SGDNesterov8bit": OptimizerType("bitsandbytes.optim", "SGD8bit", _NESTEROV),
    "Prodigy": OptimizerType("prodigyopt", "Prodigy", splits="rows", estimates="run"),
    **_classes("prodigyplus", "ProdigyPlusScheduleFree", estimates="group", averages=True),
    "Adafactor": OptimizerType("transformers.optimization", "Adafactor"),
    "CAME": OptimizerType("library.training.optim.optimizers", "CAME"),
    "SOAP": OptimizerType("library.training.optim.optimizers", "SOAP"),
    "Lion": OptimizerType("lion_pytorch", "Lion"),
    **_classes("schedulefree", "AdamWScheduleFree RAdamScheduleFree SGDScheduleFree", averages=True),
    "DAdaptation": OptimizerType("dadaptation.experimental", "DAdaptAdamPreprint", estimates="run"),
    **_classes("dadaptation.experimental", "DAdaptAdamPreprint DAdaptAdanIP", estimates="run"),
    **_classes("dadaptation", "DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD", estimates="run"),
}
PIP_NAMES = {  # where the package is not called as its module
    "prodigyplus": "prodigy-plus-schedule-free",
    "lion_pytorch": "lion-pytorch",
}
ELEMENTWISE = tuple(name for name, row in OPTIMIZERS.items() if row.splits == "elements")
SHARDABLE = tuple(name for name, row in OPTIMIZERS.items() if row.splits != "no")


def optimizer_named(optimizer_type: str) -> OptimizerType | None:
    """Return the row of a name in any case, or of the class that ends a dotted path, in whichever package."""
    wanted = optimizer_type.rsplit(".", 1)[-1].lower()
    by_class = "." in optimizer_type
    return next((row for name, row in OPTIMIZERS.items() if wanted == (row.name if by_class else name).lower()), None)


def estimates_step_size(optimizer_type: str) -> bool:
    """Return whether the optimizer finds its own step size ``d``, for which ``learning_rate`` is a factor."""
    row = optimizer_named(optimizer_type)
    return row is not None and row.estimates != "no"


def adapts_each_group(optimizer_type: str) -> bool:
    """Return whether the optimizer estimates a step size for each parameter group, so that rates may differ."""
    row = optimizer_named(optimizer_type)
    return row is not None and row.estimates == "group"
