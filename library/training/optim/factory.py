"""Optimizers by name, by kohya's name or by class path, and what the training loop must know about them.

A config goes in; a ``torch.optim.Optimizer`` comes out, built from the named library's own class:

- ``optimizer_type`` is looked up in ``OPTIMIZERS`` (ours and kohya's names, any case), then among
  ``torch.optim``'s classes; a name with a dot is imported as ``package.module.Class``.
- ``optimizer_args`` are ``key=value`` with a Python literal as value and go to the class's constructor,
  checked against its signature. ``betas=0.9,0.99`` and ``betas=(0.9, 0.99)`` are the same.
- parameter groups are torch's dicts; ``lr`` may differ by group (LoRA+) and ``name`` is what the metrics
  call them.

Three things are added to every optimizer, whatever its origin:

- bf16 weights are stepped in fp32 and rounded stochastically, with ``full_bf16``
  (``stochastic_rounding.py``);
- a state dict is loaded in the dtypes it was saved in. torch casts every state tensor to its parameter's
  dtype, which turns fp32 moments of bf16 weights into bf16, and the bf16 statistics of prodigy-plus into
  fp32: either way a resumed run would leave the path of the uninterrupted one;
- ``averaged_weights`` shows what a schedule-free optimizer would deploy, for saving, sampling and
  validating, and puts the training weights back bit for bit. (The libraries' own ``eval()``/``train()`` swap
  loses the last bits, so that how often one looks would change what is trained.)

Choices: AdamW is torch's with its fused kernel (one pass over the weights instead of ten). Adafactor is
transformers', not torch's, because kohya's configs use its arguments, and with ``relative_step=False`` and
``scale_parameter=False`` unless asked otherwise: the library's defaults ignore the learning rate, and scale
the step by the weights' size, which is zero for a fresh LoRA up-projection. Lion is lion-pytorch's; torch
has none.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

from library.config.markers import split_pairs
from library.config.optimizer_types import OPTIMIZERS, PIP_NAMES, OptimizerType, adapts_each_group, estimates_step_size
from library.config.schema import OptimizerConfig
from library.errors import UserError, did_you_mean, undone
from library.training.optim.after_update import given_back
from library.training.optim.lr_tracker import estimates_distance
from library.training.optim.stochastic_rounding import update_stochastically, weights_in_float32

_PACKAGES = {place.module.split(".")[0] for place in OPTIMIZERS.values()}
_UNFIT = {"Optimizer", "LBFGS", "SparseAdam"}  # of torch.optim: base class, needs a closure, needs sparse gradients


def build_optimizer(
    config: OptimizerConfig, parameter_groups: list[dict[str, Any]], full_bf16: bool, seed: int = 0
) -> Optimizer:
    """Build the optimizer that ``config`` names over ``parameter_groups``, ready for its first step.

    Args:
        config: the optimizer's type, arguments and learning rate.
        parameter_groups: torch's parameter groups: ``params``, and where wanted ``lr`` and ``name``.
        full_bf16: the weights are bf16; update them with stochastic rounding.
        seed: where the random bits of stochastic rounding come from.

    Raises:
        UserError: unknown optimizer, package not installed, unknown or refused argument, learning rates that
            differ by group where the optimizer takes only one.
    """
    cls, usual = _find_class(config.optimizer_type, config.trust_class_paths)
    chosen = parse_optimizer_args(config.optimizer_args)
    check_arguments(cls, chosen, config.optimizer_type)
    # torch refuses fused beside these two, and the person's choice goes first
    defaults = {k: v for k, v in usual.items() if k != "fused" or not {"foreach", "differentiable"} & set(chosen)}
    arguments: dict[str, Any] = {**defaults, **chosen, "lr": config.learning_rate}
    groups = [{"lr": arguments["lr"], **group} for group in parameter_groups]
    if cls.__name__ == "Adafactor" and cls.__module__.startswith("transformers"):
        arguments = _settle_adafactor(arguments)
    try:
        optimizer = cls(groups, **arguments)
    except (ValueError, TypeError, AssertionError, RuntimeError) as error:
        reason = str(error) or "a value out of range"
        raise UserError(
            f"{config.optimizer_type}: {reason.splitlines()[0]}; change learning_rate or optimizer_args"
        ) from error
    _check_step_size_factors(optimizer, config.optimizer_type)
    _load_in_saved_dtypes(optimizer)
    if full_bf16:
        update_stochastically(optimizer, seed)
    if has_averaged_weights(optimizer):
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def check_optimizer(config: OptimizerConfig) -> None:
    """Check that the optimizer exists, is installed and takes its arguments, as far as that shows without weights.

    Raises:
        UserError: as ``build_optimizer``.
    """
    cls, _ = _find_class(config.optimizer_type, config.trust_class_paths)
    check_arguments(cls, parse_optimizer_args(config.optimizer_args), config.optimizer_type)


def describe_optimizer(config: OptimizerConfig) -> str:
    """Return class path and chosen arguments, as sd-scripts writes them: ``torch.optim.adamw.AdamW(eps=1e-08)``."""
    cls, _ = _find_class(config.optimizer_type, config.trust_class_paths)
    chosen = ",".join(f"{key}={value}" for key, value in parse_optimizer_args(config.optimizer_args).items())
    return f"{cls.__module__}.{cls.__name__}" + (f"({chosen})" if chosen else "")


def check_rates(optimizer_type: str, rates: Collection[float]) -> None:
    """Check that an optimizer that estimates one step size for all weights gets one learning rate.

    Raises:
        UserError: it gets several; those of 0 do not count.
    """
    if estimates_step_size(optimizer_type) and not adapts_each_group(optimizer_type) and len(set(rates) - {0.0}) > 1:
        raise UserError(
            f"{optimizer_type} takes one learning rate for all weights and has several; "
            "remove loraplus_lr_ratio and set text_encoder_lr to learning_rate, or use ProdigyPlusScheduleFree, which "
            "adapts each group by itself"
        )


def parse_optimizer_args(optimizer_args: list[str]) -> dict[str, Any]:
    """Turn ``["weight_decay=0.01", "betas=0.9,0.99"]`` into keyword arguments.

    Raises:
        UserError: no ``=``, a key given twice, or a value that is no Python literal.
    """
    arguments: dict[str, Any] = {}
    for key, value in split_pairs(optimizer_args, "optimizer_args").items():
        try:
            arguments[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            spelt = value.capitalize() if value.lower() in ("true", "false", "none") else repr(value)
            raise UserError(f"optimizer_args: {key}: {value!r} is no Python value; write {key}={spelt}") from None
    return arguments


def has_averaged_weights(optimizer: Optimizer) -> bool:
    """Return whether the optimizer trains other weights than it would deploy (the schedule-free kinds)."""
    bare = unwrapped(optimizer)
    return callable(getattr(bare, "eval", None)) and callable(getattr(bare, "train", None))


@contextmanager
def averaged_weights(optimizer: Optimizer) -> Iterator[None]:
    """Inside the block the weights are those to save, sample from and validate.

    For schedule-free optimizers that is the average they keep; for all others nothing happens. Afterwards
    the training weights are back bit for bit (one copy of them is held meanwhile). Save a training state
    outside of the block: it is the training weights that go on. Nothing may step the optimizer inside.
    """
    bare = unwrapped(optimizer)
    if not has_averaged_weights(bare):
        yield
        return
    parameters = [p for group in bare.param_groups for p in group["params"]]

    def train() -> None:
        with weights_in_float32(parameters):
            bare.train()  # type: ignore[attr-defined]

    what = "the average that the optimizer keeps"
    with given_back(parameters, what), undone(what, train):
        with weights_in_float32(parameters):
            bare.eval()  # type: ignore[attr-defined]
        yield


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside accelerate's wrappers."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _find_class(optimizer_type: str, trusted: bool) -> tuple[type[Optimizer], Mapping[str, Any]]:
    """Return the class, and arguments that it gets where none are chosen."""
    if "." in optimizer_type:
        module, name = optimizer_type.rsplit(".", 1)
        package = module.split(".")[0]
        if not trusted and package not in _PACKAGES:
            raise UserError(
                f"optimizer_type: importing {optimizer_type} runs code of {package or 'no package'!r}, which is none "
                f"of {', '.join(sorted(_PACKAGES))}; set trust_class_paths = true if you trust it"
            )
        return _import_class(module, name, optimizer_type), {}
    known = {name.lower(): place for name, place in OPTIMIZERS.items()}
    for name, value in vars(torch.optim).items():
        if isinstance(value, type) and issubclass(value, Optimizer) and name not in _UNFIT:
            known.setdefault(name.lower(), OptimizerType("torch.optim", name))
    place = known.get(optimizer_type.lower())
    if place is None:
        spelt = {
            name.lower(): name for name in [*OPTIMIZERS, *(p.name for p in known.values() if p.module == "torch.optim")]
        }
        nearest = difflib.get_close_matches(optimizer_type.lower(), spelt, n=1)
        remedy = f"did you mean {spelt[nearest[0]]!r}?" if nearest else f"choose one of {', '.join(OPTIMIZERS)}."
        raise UserError(f"optimizer_type: no optimizer {optimizer_type!r}; {remedy} A class path (a.b.C) works too")
    return _import_class(place.module, place.name, optimizer_type), place.defaults


def _import_class(module: str, name: str, optimizer_type: str) -> type[Optimizer]:
    """Import ``module.name``, or say what is missing."""
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        if error.name is not None and error.name.split(".")[0] != package:
            raise UserError(
                f"optimizer_type: {optimizer_type}: {module} cannot be imported ({error}); repair it"
            ) from error
        if importlib.util.find_spec(package) is None:
            pip = PIP_NAMES.get(package, package)
            raise UserError(
                f"optimizer_type: {optimizer_type} needs the package {package!r}; run pip install {pip}"
            ) from error
        raise UserError(f"optimizer_type: {module} cannot be imported ({error}); check the class path") from error
    cls = getattr(loaded, name, None)
    if cls is None:
        near = did_you_mean(name, [key for key, value in vars(loaded).items() if isinstance(value, type)])
        raise UserError(f"optimizer_type: {module} has no class {name!r}{near or '; check the class path'}")
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise UserError(f"optimizer_type: {optimizer_type} is no torch.optim.Optimizer; name a subclass of it")
    step = inspect.signature(cls.step).parameters.get("closure")
    if step is not None and step.default is inspect.Parameter.empty:
        raise UserError(f"optimizer_type: {optimizer_type} evaluates the loss inside step (a closure); use AdamW")
    return cls


def check_arguments(cls: type[Optimizer], arguments: Mapping[str, Any], optimizer_type: str) -> None:
    """Refuse arguments that the constructor does not take."""
    parameters = inspect.signature(cls).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    takes_any &= cls.__module__.split(".")[0] != "pytorch_optimizer"  # which passes over names that it does not know
    valid = [name for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD][1:]
    for key in arguments:
        if key == "lr":
            raise UserError("optimizer_args: lr is set by learning_rate; set that instead")
        if key not in valid and not (takes_any and key.isidentifier()):
            choices = ", ".join(name for name in valid if name != "lr")
            near = did_you_mean(key, valid)
            raise UserError(f"optimizer_args: {optimizer_type} takes no {key!r}{near or ';'} it takes {choices}")


def _settle_adafactor(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for transformers' Adafactor (the module's docstring says why).

    With ``relative_step`` the class insists on no learning rate and computes its own; the groups' ``lr`` then
    stays as a value that nobody reads. ``warmup_init`` means relative_step, as kohya takes it.
    """
    relative = bool(arguments.get("relative_step") or arguments.get("warmup_init"))
    settled = {"scale_parameter": relative, **arguments, "relative_step": relative}
    return {**settled, "lr": None} if relative else settled


def _check_step_size_factors(optimizer: Optimizer, optimizer_type: str) -> None:
    """Check the learning rates of optimizers that estimate their step size; there they are factors near 1."""
    group = optimizer.param_groups[0]
    if not estimates_distance(group):
        return
    rates = sorted({float(group["lr"]) for group in optimizer.param_groups} - {0.0})
    check_rates(optimizer_type, rates)
    if rates and (rates[0] < 0.1 or rates[-1] > 10):
        warnings.warn(
            f"{optimizer_type} multiplies its step size estimate by learning_rate {rates[0]:g}; 1.0 is usual",
            stacklevel=3,
        )


def _load_in_saved_dtypes(optimizer: Optimizer) -> None:
    """Make ``optimizer.load_state_dict`` keep the dtype of every state tensor.

    Replaced on the object rather than by torch's hooks, since bitsandbytes overrides the method without them.
    """
    load = optimizer.load_state_dict

    def load_exactly(state_dict: dict[str, Any]) -> None:
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        load(state_dict)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for saved_id, parameter in zip(saved_ids, parameters, strict=True):
            state = optimizer.state.get(parameter, {})
            for key, saved in state_dict["state"].get(saved_id, {}).items():
                loaded = state.get(key)
                if isinstance(saved, Tensor) and isinstance(loaded, Tensor) and saved.dtype != loaded.dtype:
                    state[key] = saved.detach().to(loaded.device, copy=True)

    optimizer.load_state_dict = load_exactly  # type: ignore[method-assign]


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
