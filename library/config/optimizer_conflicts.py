"""Optimizer settings that contradict each other, found before anything is loaded.

A setting that could only be ignored is refused: a person who writes ``lr_scheduler_num_cycles = 3`` beside
``lr_scheduler = "cosine"`` expects three cycles and would get one. Refused is only what was set on purpose
(pydantic's ``model_fields_set``) to something else than the default; a config that spells out defaults runs.

The optimizer is judged by its name here, so that the check needs no import of optimizer packages. What only
the built optimizer knows is checked again by ``library.training.optimizers`` and
``library.training.schedules``.
"""

from __future__ import annotations

from collections.abc import Iterator

from library.config.schema import OptimizerConfig

BY_ELEMENT = ("AdamW", "Adam", "SGD", "SGDNesterov")  # see treats_numbers_alone
DECAYING = ("linear", "cosine", "cosine_with_restarts", "polynomial", "rex", "warmup_stable_decay")
# Below this, an optimizer that estimates its step size was surely given another optimizer's learning rate.
SMALLEST_LR_FACTOR = 0.01

_ONLY_WITH: dict[str, tuple[str, ...]] = {
    "lr_scheduler_power": ("polynomial",),
    "lr_scheduler_num_cycles": ("cosine_with_restarts",),
    "lr_scheduler_min_lr_ratio": DECAYING,
    "lr_decay_steps": ("warmup_stable_decay",),
    "lr_warmup_steps": ("constant_with_warmup", *DECAYING),
}


def treats_numbers_alone(optimizer_type: str) -> bool:
    """Return whether the optimizer treats every number of a weight by itself, so that it can be given a part of it."""
    return optimizer_type.lower() in [name.lower() for name in BY_ELEMENT]


def estimates_step_size(optimizer_type: str) -> bool:
    """Return whether the named optimizer (short name or class path) finds its own step size ``d``."""
    return _class_name(optimizer_type).startswith(("prodigy", "dadapt"))


def adapts_each_group(optimizer_type: str) -> bool:
    """Return whether the named optimizer estimates a step size for each parameter group, so that rates may differ."""
    return _class_name(optimizer_type).startswith("prodigyplus")


def effective_learning_rate(config: OptimizerConfig) -> float:
    """Return the learning rate to train with: the one that was set, else the optimizer's customary one.

    Optimizers that estimate their step size take a factor instead of a rate, customarily 1.0.
    """
    if "learning_rate" not in config.model_fields_set and estimates_step_size(config.optimizer_type):
        return 1.0
    return config.learning_rate


def find_conflicts(config: OptimizerConfig) -> Iterator[str]:
    """Yield one line about each setting that could have no effect or fights another."""
    yield from _schedule_conflicts(config)
    yield from _optimizer_conflicts(config)


def _schedule_conflicts(config: OptimizerConfig) -> Iterator[str]:
    scheduler = config.lr_scheduler
    for key, schedulers in _ONLY_WITH.items():
        if _is_set(config, key) and scheduler not in schedulers:
            known = ", ".join(schedulers)
            yield f"{key} has no effect with lr_scheduler {scheduler!r}; remove it or choose one of: {known}"
    if scheduler == "constant_with_warmup" and not config.lr_warmup_steps:
        yield "lr_scheduler 'constant_with_warmup' needs lr_warmup_steps above 0; set it or choose 'constant'"
    if scheduler == "warmup_stable_decay" and not config.lr_decay_steps:
        yield "lr_scheduler 'warmup_stable_decay' needs lr_decay_steps above 0 (such as 0.2); set it"


def _optimizer_conflicts(config: OptimizerConfig) -> Iterator[str]:
    name = _class_name(config.optimizer_type)
    if config.trust_class_paths and "." not in config.optimizer_type:
        yield "trust_class_paths has no effect without a class path (a.b.C) in optimizer_type; remove it"
    flags = {argument.replace(" ", "") for argument in config.optimizer_args}
    if "schedulefree" in name and config.lr_scheduler != "constant" and "use_schedulefree=False" not in flags:
        yield (
            f"{config.optimizer_type} averages weights instead of lowering the learning rate, lr_scheduler "
            f'{config.lr_scheduler!r} would fight it; set lr_scheduler = "constant" (for a warm-up, '
            "AdamWScheduleFree takes warmup_steps in optimizer_args)"
        )
    if name == "adafactor" and flags & {"relative_step=True", "warmup_init=True"}:
        for key in ("learning_rate", "text_encoder_lr", "lr_scheduler"):
            if _is_set(config, key):
                yield f"{key} has no effect with Adafactor's relative_step=True; remove one of the two"
    lr = effective_learning_rate(config)
    if estimates_step_size(config.optimizer_type) and 0 < lr < SMALLEST_LR_FACTOR:
        yield (
            f"learning_rate {lr:g} multiplies the step size that {config.optimizer_type} estimates, "
            "nothing would be learned; set learning_rate = 1.0 or leave it out"
        )


def _class_name(optimizer_type: str) -> str:
    return optimizer_type.rsplit(".", 1)[-1].lower()


def _is_set(config: OptimizerConfig, key: str) -> bool:
    """Return whether ``key`` was given, and given another value than its default."""
    return key in config.model_fields_set and getattr(config, key) != type(config).model_fields[key].default
