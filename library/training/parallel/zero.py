"""A LoRA trained by DeepSpeed's ZeRO: each process keeps a part of what the optimizer needs, and steps on that alone.

Of each group of the optimizer DeepSpeed makes one flat fp32 tensor a process. Stage 1 splits these weights and the
optimizer's state, stage 2 also adds up each gradient only where its part is, stage 3 also splits the frozen weights,
and gathers a layer's when it runs. Between steps the LoRA itself is full on every process, in stage 3 as well (it is
told to keep gathered what is as small as a LoRA), so that averages, samples and files see it as ever.

accelerate sets the engine up; its wrapper would also take the optimizer's step within ``backward``. Here backward ends
with the gradients, so that ``library.training.engine`` can look at them first.
DeepSpeed's own access to full states (``safe_get_full_optimizer_state``) takes a collective a tensor, and knows a state
only after a step: here a group is gathered at once, and a state can be loaded before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from torch import Tensor, nn
from torch.optim import Optimizer

from library.accelerator import zero_stage
from library.config.layout_rules import FP8_NOT_GATHERED
from library.errors import UserError
from library.training.parallel.gather import SplitOptimizer

_BUCKET = 2**23  # numbers that are reduced at once, 32 MiB, about as many as DDP's; a buffer of DeepSpeed's is as large


class ZeroOptimizer(SplitOptimizer):
    """The optimizer of a run under ZeRO; ``optimizer`` is torch's, which has this process's shards."""

    def __init__(self, engine: Any, optimizer: Optimizer, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        super().__init__(optimizer)
        self._engine, self._zero, self._groups = engine, engine.optimizer, groups
        ends = accumulate(len(group) for group in groups)
        self._numbers = [range(end - len(group), end) for end, group in zip(ends, groups, strict=True)]
        self._splits_weights = engine.zero_optimization_stage() == 3

    @property
    def shards(self) -> list[Tensor]:
        """This process's part of each group's weights."""
        zero = self._zero
        return zero.fp32_partitioned_groups_flat if self._splits_weights else zero.single_partition_of_fp32_groups

    def measure_norm(self) -> Tensor:
        """Return the norm of all gradients of the step; infinite where one is not finite. Collective."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        if self._splits_weights:
            return combine_grad_norm_groups(self._zero._get_norm_groups())
        return self._zero.scaled_global_norm()

    def step(self, closure: Any = None) -> None:
        """Clip, step on this process's parts, and let everyone have the LoRA.

        Not for gradients that are not finite: stage 3 would leave the LoRA split.
        """
        self._engine.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine's step has freed the gradients."""

    def drop_gradients(self) -> None:
        """Forget what was accumulated."""
        self._zero.zero_grad(set_to_none=True)
        self._zero.averaged_gradients.clear()
        if not self._splits_weights:
            self._zero.all_grad_tensors.clear()
            self._zero.micro_step_id = -1

    @torch.no_grad()
    def take_weights(self) -> None:
        """Take over the LoRA as it is now, where something else than a step has changed it."""
        for i, (part, group) in enumerate(zip(self.shards, self._groups, strict=True)):
            part.copy_(self._scatter(i, [parameter.detach() for parameter in group]))

    def gather_state(self) -> dict[str, Any]:
        main = self.accelerator_state.process_index == 0
        state: dict[int, dict[str, Any]] = {}
        for i, (part, numbers) in enumerate(zip(self.shards, self._numbers, strict=True)):
            for key, value in self.optimizer.state.get(part, {}).items():
                split = isinstance(value, Tensor) and value.shape == part.shape
                values = self.gather(i, value) if split else [value] * len(numbers)
                for number, full in zip(numbers, values, strict=True) if main else ():
                    state.setdefault(number, {})[key] = full.cpu() if split else full
        groups = zip(self.optimizer.param_groups, self._numbers, strict=True)
        return {"state": state, "param_groups": [{**group, "params": list(numbers)} for group, numbers in groups]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this process's parts of a full state, and of the LoRA as it is now."""
        self.take_weights()
        states, local = state_dict["state"], dict[int, dict[str, Any]]()
        for i, numbers in enumerate(self._numbers):
            saved = [states.get(number, {}) for number in numbers]
            if any(saved):
                local[i] = self._scatter_state(i, saved)
        described = [{**group, "params": [i]} for i, group in enumerate(state_dict["param_groups"])]
        params_before = [group["params"] for group in self.optimizer.param_groups]
        for group, part in zip(self.optimizer.param_groups, self.shards, strict=True):
            group["params"] = [part]
        self.optimizer.load_state_dict({"state": local, "param_groups": described})
        for group, params in zip(self.optimizer.param_groups, params_before, strict=True):
            group["params"] = params

    def _scatter_state(self, group: int, saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state of this process's part; parameters that never had a gradient have none, and count as 0."""
        parameters, local = self._groups[group], {}
        for key, value in max(saved, key=len).items():
            if isinstance(value, Tensor) and value.dim():
                full = [s.get(key, torch.zeros_like(p, device="cpu")) for s, p in zip(saved, parameters, strict=True)]
                local[key] = self._scatter(group, [tensor.to(self.shards[group].device) for tensor in full])
            else:
                local[key] = value
        return local

    def gather(self, group: int, part: Tensor) -> list[Tensor]:
        """Return a group's tensors in full, from all processes' shards of them; collective."""
        parameters, processes = self._groups[group], self._engine.dp_world_size
        every = torch.empty(processes, part.numel(), dtype=part.dtype, device=part.device)
        torch.distributed.all_gather(list(every.unbind()), part.detach().contiguous())
        numbers = [parameter.numel() for parameter in parameters]
        if self._splits_weights:
            rows = every.split([-(-n // processes) for n in numbers], dim=1)
            flat = [row.reshape(-1)[:n] for row, n in zip(rows, numbers, strict=True)]
        else:
            flat = list(every.reshape(-1)[: sum(numbers)].split(numbers))
        return [tensor.view_as(parameter) for tensor, parameter in zip(flat, parameters, strict=True)]

    def _scatter(self, group: int, tensors: Sequence[Tensor]) -> Tensor:
        """Return this process's shard of a group's full tensors: stage 3 splits each, the others all in a row."""
        processes, rank = self._engine.dp_world_size, torch.distributed.get_rank()
        flat = [tensor.reshape(-1) for tensor in tensors]
        if self._splits_weights:
            return torch.cat([_local_row(tensor, processes, -(-tensor.numel() // processes), rank) for tensor in flat])
        return _local_row(torch.cat(flat), processes, self.shards[group].numel(), rank)


def _local_row(tensor: Tensor, processes: int, size: int, rank: int) -> Tensor:
    """Return a process's ``size`` numbers of a flat tensor, behind which there are zeros."""
    return torch.cat([tensor, tensor.new_zeros(processes * size - tensor.numel())]).view(processes, size)[rank]


class _Engine(DeepSpeedEngineWrapper):
    """What accelerate calls for ``backward`` and ``clip_grad_norm_``; the step is left to the optimizer."""

    def __init__(self, engine: Any, optimizer: ZeroOptimizer) -> None:
        super().__init__(engine)
        self._optimizer = optimizer

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)

    def get_global_grad_norm(self) -> Tensor:
        return self._optimizer.measure_norm()


def prepare_zero(
    accelerator: Accelerator,
    model: nn.Module,
    trained: Sequence[nn.Parameter],
    optimizer: Optimizer,
    max_grad_norm: float,
) -> tuple[nn.Module, ZeroOptimizer]:
    """Return model and optimizer as DeepSpeed and accelerate run them.

    Args:
        accelerator: set up for ZeRO.
        model: with its LoRA; in stage 3 in host memory.
        trained: the LoRA.
        optimizer: of the LoRA, one that treats every number by itself.
        max_grad_norm: to clip to, 0 for none.

    Raises:
        UserError: stage 3 with an fp8 base; what was set up is not what was asked.
    """
    splits_weights = zero_stage(accelerator) == 3
    if splits_weights and any(parameter.dtype.itemsize == 1 for parameter in model.parameters()):
        raise UserError(f"pretrained_model_name_or_path: an fp8 base; {FP8_NOT_GATHERED}")
    groups = [list(group["params"]) for group in optimizer.param_groups]
    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    settings["gradient_clipping"] = max_grad_norm
    settings["zero_optimization"] |= {
        "reduce_bucket_size": min(_BUCKET, sum(parameter.numel() for parameter in trained)),
        "stage3_param_persistence_threshold": max(parameter.numel() for parameter in trained),
    }
    accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)  # autocast, as without DeepSpeed
    # DeepSpeed would cast weights where it finds bf16 on, from which accelerate knows the precision
    precision, settings["bf16"]["enabled"] = settings["bf16"]["enabled"], False
    if splits_weights:
        _split(model, settings, accelerator.device)
    engine, _ = accelerator.prepare(model, optimizer)
    settings["bf16"]["enabled"] = precision
    if splits_weights:
        trained[0].all_gather(list(trained))  # type: ignore[attr-defined]  # DeepSpeed's
    wrapped = ZeroOptimizer(engine, optimizer, groups)
    accelerator.deepspeed_engine_wrapped = _Engine(engine, wrapped)
    found = engine.zero_optimization_stage(), engine.dp_world_size
    if found != (zero_stage(accelerator), accelerator.num_processes):
        raise UserError(
            f"zero: DeepSpeed set up stage {found[0]} on {found[1]} processes; install requirements/zero.txt"
        )
    return engine, wrapped


def _split(model: nn.Module, settings: dict[str, Any], device: torch.device) -> None:
    """Split the weights of a model in host memory, one after the other, so that no device has to hold all of it."""
    import deepspeed

    deepspeed.zero.Init(module=model, config_dict_or_path=settings)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
