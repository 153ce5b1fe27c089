"""A training step as a run takes it, on a published model with random weights: what ``bench/gpu.py`` measures.

The task, its LoRA, its memory policy, compilation, the engine and the step's graph are those of ``train_lora.py``
(:class:`~library.training.tasks.image_lora.ImageLora`), from a configuration. Other than in a run are three things: the
transformer's weights are random instead of a file's, the batch is noise, and nothing is saved. 1024 x 1024 pixels, 512
text tokens, rank 16 on every layer that is trained by default in fp32, AdamW.

The model has its published size; ``Step(tiny=True)`` is built alike and small enough for a CPU. Weights and batch
follow from seeds, so that two processes on one device take the same steps. Tiny models are made on the CPU: there a
card and a CPU take the same ones.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.families import LoraStep
from bench.measure import reset_peak, resident, wait_for
from library.config.schema import TrainConfig
from library.models.family_by_name import family_class
from library.precision.recipe import Recipe, WeightLoader, quantize_model, scheme_named
from library.training.memory.dry_run import noise_batch, opened_task
from library.training.memory.dummy_checkpoint import with_dummies, write_dataset
from library.training.step_graphs import EAGER_STEPS
from library.training.tasks.image_lora import ImageLora

RANK, TEXT_TOKENS = 16, 512
_NAMES = {"flux2_klein": "flux-2-klein-base-9b"}  # of a file, where that tells one of several sizes
_FLUX_LIKE = {"num_attention_heads": 4, "attention_head_dim": 64}
_TINY: dict[str, dict[str, Any]] = {  # arguments of a transformer; a head of 64 is one that every kernel takes
    "flux": {**_FLUX_LIKE, "num_layers": 2, "num_single_layers": 4, "axes_dims_rope": (16, 24, 24)},
    "qwen_image": {**_FLUX_LIKE, "num_layers": 4, "axes_dims_rope": (16, 24, 24)},
    "z_image": {"dim": 256, "n_layers": 4, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4,
                "axes_dims": [16, 24, 24]},
    "krea2": {**_FLUX_LIKE, "num_layers": 4, "num_key_value_heads": 2, "intermediate_size": 512,
              "text_hidden_dim": 128, "text_num_attention_heads": 2, "text_num_key_value_heads": 2,
              "text_intermediate_size": 256, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1,
              "axes_dims_rope": (16, 24, 24)},
    "flux2_klein": {**_FLUX_LIKE, "num_layers": 2, "num_single_layers": 4, "joint_attention_dim": 384,
                    "axes_dims_rope": (16, 16, 16, 16)},
}  # fmt: skip
_TINY_SIDE, _TINY_TEXT = 128, 64  # pixels, tokens


@dataclass(frozen=True)
class StepCase:
    """A step.

    Attributes:
        family: a ``model_type``.
        base: the frozen weights: "bf16", or a scheme; "row" and "int8_row" are multiplied as they are stored where the
            device can.
        compiled, graph: blocks by Inductor; forward and backward as one CUDA graph.
        attention: the option.
        mixed_precision: the option; "no" computes in fp32.
        backend: what compiles, the option `dynamo_backend`.
    """

    family: str
    base: str = "bf16"
    compiled: bool = False
    graph: bool = False
    attention: str = "auto"
    mixed_precision: str = "bf16"
    backend: str = "inductor"

    def name(self) -> str:
        """Return the row's name."""
        base = self.base if self.mixed_precision == "bf16" else "fp32"
        attention = "" if self.attention == "auto" else f"attention {self.attention}"
        how = ["compiled" if self.compiled else "", "graph" if self.graph else "", attention]
        return ", ".join([self.family, base, *filter(None, how)])

    def config(self, on_cpu: bool = False) -> TrainConfig:
        """Return the configuration of a run that takes such steps; its model and dataset are not there.

        ``on_cpu`` is the same run where nothing is multiplied as it is stored: activations are rounded as those
        products round them. Inductor and graphs are left out.
        """
        sections: dict[str, dict[str, Any]] = {
            "model": {"model_type": self.family, "pretrained_model_name_or_path": _NAMES.get(self.family, "published")},
            "dataset": {"dataset_config": "one image", "max_data_loader_n_workers": 0},
            "network": {"network_dim": RANK, "network_alpha": RANK},
            "optimizer": {"optimizer_type": "AdamW", "learning_rate": 1e-4},
            "training": {
                "gradient_checkpointing": True,
                "mixed_precision": self.mixed_precision,
                "attention": self.attention,
                "seed": 1,
            },
            "accelerate": {"torch_compile": self.compiled, "cuda_graph": self.graph and not on_cpu},
        }
        if self.compiled:
            sections["accelerate"]["dynamo_backend"] = "eager" if on_cpu else self.backend
        if self.base != "bf16":
            sections["precision"] = {"fp8_scaled": True}
            if on_cpu and (rounding := {"row": "row", "int8_row": "int8", "int8_convrot": "int8"}.get(self.base)):
                sections["precision"]["quantised_activations"] = rounding
        return TrainConfig.model_validate(sections)


class Step:
    """A loaded case, which takes one step after the other.

    Attributes:
        task: of a run.
        base_bytes: of the frozen weights.
    """

    def __init__(self, case: StepCase, device: torch.device, tiny: bool = False, depth: Sequence[int] = ()) -> None:
        """Load it.

        Args:
            device: a CPU or the process's card; where there is a card it has to be hidden for the CPU.
            depth: numbers of blocks in the order of ``Family.depths``; default: all.
        """
        family = family_class(case.family)
        self._case, self._tiny = case, tiny
        self._arguments = {**(_TINY[case.family] if tiny else {}), **dict(zip(family.depths, depth, strict=False))}
        config = case.config(on_cpu=device.type == "cpu")
        with tempfile.TemporaryDirectory() as folder:
            images = write_dataset(Path(folder, "images"), side=_TINY_SIDE if tiny else 1024)
            dataset = config.dataset.model_copy(update={"dataset_config": str(images)})
            complete, _ = with_dummies(config.model_copy(update={"dataset": dataset}), Path(folder))
            self.task: Any = opened_task(ImageLora, complete, Path(folder))
            self.task.family.load_transformer = self._random_transformer
            self.task.load_networks()
            self.task.wrap_networks()
        self.engine, self.number = self.task.engine, 0
        for model in self.engine.models:
            model.train()
        settings, random = self.task.transformer.config, torch.Generator().manual_seed(2)
        tokens = _TINY_TEXT if tiny else TEXT_TOKENS
        text = {name: torch.randn(shape, generator=random) for name, shape in text_shapes(settings, tokens).items()}
        self.batch = noise_batch(self.task, text).to(device)
        tensors = [*self.task.transformer.parameters(), *self.task.transformer.buffers()]
        self.base_bytes = sum(t.numel() * t.element_size() for t in tensors if not t.requires_grad)

    def loss(self) -> Tensor:
        """Take a step as the trainer does, without logging; return its loss [], still on the device."""
        loss = self.backward()
        self.update()
        return loss

    def backward(self) -> Tensor:
        """Run forward and backward; return the loss [], still on the device."""
        return self.engine.forward_backward(self.task.loss, self.batch, self.number)[0]

    def update(self) -> None:
        """Take the step of the gradients that are there."""
        norm = self.engine.clip(self.number)
        self.engine.settle()  # the step before, while the device works on this one
        self.engine.update(norm)
        self.number += 1

    def gradients(self) -> Tensor:
        """Return up to 512 numbers of each LoRA weight's gradient in a step that is not taken, fp32 on the CPU."""
        self.engine.settle()
        self.backward()
        flat = [p.grad.detach().flatten() for p in self.engine.parameters if p.grad is not None]
        found = torch.cat([each[:: -(-len(each) // 512)].float() for each in flat]).cpu()
        self.engine.drop_gradients()
        return found

    def _random_transformer(
        self, dtype: torch.dtype, device: torch.device | str, backend: Any = "auto", *, fp8: WeightLoader
    ) -> Any:
        """Return what the family's ``load_transformer`` would, of random weights; a tiny one is made on the CPU."""
        family, base = self.task.family, self._case.base
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            with torch.device("cpu" if self._tiny else device):
                transformer = family.outline({**family.files.transformer_config, **self._arguments})
                for parameter in transformer.parameters():
                    if parameter.ndim > 1:  # else gates would be zero, as some are at first: blocks without a gradient
                        parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
        finally:
            torch.set_default_dtype(torch.float32)
        wide = frozenset(family.transformer_class._keep_in_fp32_modules or ())
        for name, parameter in transformer.named_parameters():
            parameter.data = parameter.data.float() if not wide.isdisjoint(name.split(".")) else parameter.data
        transformer = transformer.to(device).requires_grad_(False).eval()
        transformer.loaded_dtype = dtype
        if base != "bf16":
            quantize_model(transformer, Recipe(scheme_named(base)), compute=fp8.compute)
        return family.optimise_forward(transformer, backend)


def measured(
    case: StepCase, steps: int, timed: int, tiny: bool, depth: Sequence[int], device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield a row of ``case``; of one with a graph the row of the same without it before.

    A row has the losses of the first ``steps``, the ``gradients`` of the next (as :meth:`Step.gradients`), of a graph
    also how far they are off those of the same step without it, and with ``timed`` the median seconds of so many steps
    and the peak of memory since all was loaded.

    Raises:
        RuntimeError: the loss is not finite; the step was not captured.
    """
    step = Step(case, device, tiny, depth)
    reset(device)
    graphs = step.engine.graphs
    if graphs is not None:
        graphs.is_off = True
    begun = time.perf_counter()
    losses = [step.loss().item()]
    first_s = time.perf_counter() - begun
    losses += [step.loss().item() for _ in range(steps - 1)]
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"losses are {losses}")
    gradients = step.gradients()
    found = {"losses": losses, "gradients": gradients.numpy(), "weights_gib": step.base_bytes / 2**30}
    yield {"graphed": False, "first_s": first_s} | found | timing(step, timed, device)
    if not case.graph:
        return
    gradients, error = step.gradients(), 0.0  # of the weights as they are now
    if graphs is not None:
        graphs.is_off = False
    for _ in range(EAGER_STEPS + 2):  # the last is a replay
        error = relative_error(step.gradients(), gradients)
    if device.type == "cuda" and (graphs is None or graphs.is_off):
        raise RuntimeError("the step was not captured; the line above says why")
    yield {"graph_error": error} | found | timing(step, timed, device)


def timing(step: Step | LoraStep, timed: int, device: torch.device) -> dict[str, float]:
    """Return the median seconds of ``timed`` steps, and the peak of memory in GiB."""
    seconds = []
    for number in range(timed + 1):  # the first warms up
        wait_for(device)
        begun = time.perf_counter()
        step.loss()
        wait_for(device)
        seconds += [time.perf_counter() - begun] if number else []
    if not timed:
        return {}
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else resident("VmHWM")
    return {"step_s": statistics.median(seconds), "peak_gib": peak / 2**30}


def reset(device: torch.device) -> None:
    """Let the peak of memory begin anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of ``expected``."""
    return float((found - expected).double().norm() / expected.double().norm())


def text_shapes(settings: Any, tokens: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of a caption's embeddings, so many ``tokens``; ``settings``: the transformer's config."""
    if "text_hidden_dim" in settings:
        width = settings.num_text_layers * settings.text_hidden_dim
    else:
        width = settings.cap_feat_dim if "cap_feat_dim" in settings else settings.joint_attention_dim
    shapes: dict[str, tuple[int, ...]] = {"prompt_embeds": (tokens, width)}
    if "pooled_projection_dim" in settings:
        shapes["pooled_prompt_embeds"] = (settings.pooled_projection_dim,)
    return shapes
