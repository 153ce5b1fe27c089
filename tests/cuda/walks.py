"""What is walked through on the fake device; run by ``device.py`` in a process of its own each."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate  # noqa: F401  # before the device is one: they look for it as they are imported
import peft  # noqa: F401
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel  # noqa: F401  # and all that these import
from PIL import Image
from torch._dynamo.utils import counters
from transformers import CLIPTextModel, Qwen2_5_VLModel, Qwen3Model, T5EncoderModel  # noqa: F401

import library.training.trainer as trainer_module
from library.config import load_config
from library.config.load import load_for
from library.config.scripts import LLM
from library.models.family_by_name import family_class
from library.precision.linear import QuantizedLinear
from library.safetensors_io import read_entries
from library.training.engine import Engine
from library.training.memory import dry_run
from library.training.memory.dummy_checkpoint import write_dataset, write_model, write_specs
from library.training.memory.trace import tracing
from library.training.tasks.image_lora import ImageLora
from library.training.tasks.image_step import FlowStep, StepInputs
from library.training.tasks.pretraining import Pretraining
from tests import chat_runs
from tests.cuda.captured import memory, refusals  # noqa: F401  # called by name
from tests.cuda.formats import write_quantised
from tests.cuda.watched_trace import WatchedTrace, pretend
from tests.curves import without_curves
from tests.pretraining_runs import write_corpus

_READ_IN_THE_MIDDLE = ("flux2", "flux3", "krea2", "qwen_image_21")  # layers of their text encoders


def train(
    folder: Path,
    model_type: str = "flux",
    blocks: int = 2,
    flags: Sequence[str] = (),
    batch: int = 1,
    side: int = 1024,
    file: str | None = None,
    planted: str | None = None,
    dataset_text: str = "",
    steps: int = 3,
    counted: bool = False,
) -> dict[str, Any]:
    """Train as ``train_lora.py`` does, at full width with few blocks; of ``steps`` only the last is logged.

    Args:
        flags: of the command line. file: the format of a quantised transformer. dataset_text: more of its TOML.
        planted: a fault, see ``_PLANTED``. counted: with the count before a run, which takes as long as the steps.

    Returns:
        The host's waits in steps that are not logged; of each step the bytes by part at its peak; live copies of
        quantised weights after forward; the files; how many graphs were compiled.
    """
    config = _config(folder, model_type, blocks, flags, batch, side, file, dataset_text, steps, counted)
    trace, copies = WatchedTrace(), list[str]()
    pretend(trace)
    if planted is not None:
        _PLANTED[planted]()
    _watch(trace, copies)
    unread = mock.patch("library.training.checkpoint.metadata.sha256_of", return_value="")  # of gigabytes of holes
    with tracing(trace), without_curves(), unread:
        task = ImageLora(config)
        trainer_module.train(task)
    saved = [path.name for path in (folder / "run").iterdir()]
    return {
        "waits": _waits(trace, steps),
        "phases": trace.phases,
        "copies": copies,
        "saved": saved,
        "graphs": counters["stats"]["unique_graphs"],
    }


def _config(
    folder: Path,
    model_type: str,
    blocks: int,
    flags: Sequence[str],
    batch: int,
    side: int,
    file: str | None,
    dataset_text: str = "",
    steps: int = 3,
    counted: bool = False,
) -> Any:
    """Write a model and a dataset; return the configuration of their run, as of :func:`train`."""
    base = write_model(model_type, folder / "model", blocks)
    family: Any = family_class(model_type)
    _keep_one_layer_of_a_block(base / "vae")
    if not model_type.startswith(_READ_IN_THE_MIDDLE):
        for encoder in base.glob("text_encoder*"):
            _keep_two_layers(encoder)
    elif model_type.startswith(("flux2_klein", "flux3")):  # as many layers, the first ones
        read = len(family.text_encoder.layers)
        family.text_layers, family.read_layers = read, tuple(range(1, read + 1))
    if file is not None:
        base, flags = _with_file(base, model_type, file, flags)
    data = write_dataset(folder / "data", family.conditioning, side)
    for i, known in itertools.product(range(1, batch), sorted(data.parent.glob("*/0.*"))):
        shutil.copy(known, known.with_stem(str(i)))
    of_dataset, subset = (
        data.read_text().replace("batch_size = 1", f"batch_size = {batch}").split("[[datasets.subsets]]")
    )
    subset += f"num_repeats = {4 * steps}\n"  # more than are trained on: the end of an epoch is logged
    data.write_text(f"{of_dataset}{dataset_text}[[datasets.subsets]]{subset}")
    return load_config([
        "--model_type", model_type, "--pretrained_model_name_or_path", str(base), "--dataset_config", str(data),
        "--output_dir", str(folder / "run"), "--max_train_steps", str(steps), "--log_every_n_steps", "100",
        "--network_dim", "16", "--mixed_precision", "bf16", "--max_data_loader_n_workers", "0", "--overwrite",
        *([] if counted else ["--no-memory_dry_run"]), *flags,
    ])  # fmt: skip


def capture(
    folder: Path,
    model_type: str = "flux",
    blocks: int = 2,
    flags: Sequence[str] = (),
    batch: int = 1,
    side: int = 256,
    file: str | None = None,
    planted: str | None = None,
) -> dict[str, Any]:
    """Capture forward and backward of two batches, the second copied over the first; arguments as of :func:`train`.

    Returns:
        What was refused; the first operation that differs between the two; how many there are.
    """
    config = _config(folder, model_type, blocks, flags, batch, side, file)
    trace = WatchedTrace()
    pretend(trace)
    logs = list[list[str]]()
    with tracing(trace):
        task = dry_run.opened_task(ImageLora, config, folder)
        sample, _ = dry_run.largest(task.data)
        images = [Image.new("RGB", control.fit.encoded) for control in sample.control_images]
        captions, shown = ["a house", "a bright house"], [images] * 2 if task.text_encoder.sees_references else None
        texts = task.text_encoder.encode(captions, shown)
        task.text_encoder.release()
        task.load_networks()
        task.wrap_networks()
        model, flow = task.engine.models[0].train(), task.step

        def inputs(number: int) -> StepInputs:
            made = dry_run.noise_batch(task, texts[number % 2]).to("cuda")
            return flow.inputs(replace(made, text=task.family.rounded_text(made.text)), number)

        def step(given: StepInputs) -> None:
            loss, _ = flow.compute(model, given)
            task.accelerator.backward(loss * number if planted else loss)

        number, static = 0, inputs(0)
        for _ in range(3 if "--torch_compile" in flags else 1):  # what is made once is made
            step(static)
        for number in (1, 2):
            for tensor, new in zip(static.tensors(), inputs(number).tensors(), strict=True):
                tensor.copy_(new)
            torch._foreach_zero_([p.grad for p in task.engine.parameters if p.grad is not None])
            with trace.logging() as log, torch.cuda.graph(torch.cuda.CUDAGraph()):
                step(static)
            logs.append(log)
    differ = next((pair for pair in zip(*logs, strict=False) if pair[0] != pair[1]), None)
    return {"refused": trace.refused, "differ": differ, "operations": [len(log) for log in logs]}


def plan(
    folder: Path, model_type: str = "flux", blocks: int = 2, flags: Sequence[str] = (), side: int = 1024
) -> dict[str, Any]:
    """Count what a run takes; return the bytes by phase and part, what captures refused, how many graphs there are."""
    config, trace = _config(folder, model_type, blocks, flags, 1, side, None), WatchedTrace()
    pretend(trace)
    with tracing(trace):
        task = dry_run.opened_task(ImageLora, config, folder)
        dry_run._trace_run(task, config, trace, folder)
    graphs = None if task.engine.graphs is None else len(task.engine.graphs._graphs)
    return {"phases": trace.phases, "refused": trace.refused, "graphs": graphs}


def loaded(folder: Path, model_type: str, blocks: int, flags: Sequence[str]) -> dict[str, int]:
    """Load what is trained; return the bytes on the device."""
    config, trace = _config(folder, model_type, blocks, flags, 1, 256, None), WatchedTrace()
    pretend(trace)
    with tracing(trace):
        task = dry_run.opened_task(ImageLora, config, folder)
        task.load_networks()
        task.wrap_networks()
    return {"bytes": trace.live}


def _keep_two_layers(encoder: Path) -> None:
    """Leave two layers of a text encoder, and of its vision tower; each more does the same."""
    path = encoder / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config.get("text_config", {}), config.get("vision_config", {})):
        part |= {key: 2 for key in ("num_hidden_layers", "num_layers", "depth") if key in part}
        part |= {"fullatt_block_indexes": [1]} if "fullatt_block_indexes" in part else {}
        part.pop("layer_types", None)
    path.write_text(json.dumps(config))
    _leave_out(encoder, r"\D*(block|blocks|layers)\.([2-9]|\d\d)\..*")


def _keep_one_layer_of_a_block(vae: Path) -> None:
    """Leave one of two layers of each of an autoencoder's blocks, where its configuration says how many there are."""
    path = vae / "config.json"
    config = json.loads(path.read_text())
    if "layers_per_block" in config:
        path.write_text(json.dumps(config | {"layers_per_block": 1}))
        _leave_out(vae, r"encoder\.down_blocks\.\d\.resnets\.1\.|decoder\.up_blocks\.\d\.resnets\.2\.")


def _leave_out(folder: Path, pattern: str) -> None:
    """Write the folder's weights anew without those whose names match."""
    (weights,) = folder.glob("*.safetensors")
    specs = {name: entry.spec for name, entry in read_entries([weights])[0].items()}
    write_specs(weights, {name: spec for name, spec in specs.items() if not re.match(pattern, name)})


def pretrain(folder: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Pretrain as ``train_llm.py`` does for three steps; return the host's waits, as :func:`train`."""
    corpus = write_corpus(folder)
    config = load_for(LLM, [
        "--data_dir", str(corpus), "--output_dir", str(folder / "run"), "--max_train_steps", "3", "--log_every_n_steps",
        "100", "--train_batch_size", "2", "--mixed_precision", "bf16", "--overwrite", *flags,
    ])  # fmt: skip
    trace = WatchedTrace()
    pretend(trace)
    _watch(trace, [])
    with tracing(trace), without_curves():
        trainer_module.train(Pretraining(config))
    return {"waits": _waits(trace, 3), "saved": [path.name for path in (folder / "run").iterdir()]}


def chat(folder: Path, **settings: object) -> dict[str, Any]:
    """Train a LoRA on a tiny language model for three steps; return the host's waits, as :func:`train`."""
    place, trace = chat_runs.write_place(folder), WatchedTrace()
    pretend(trace)
    _watch(trace, [])
    settings |= {"max_train_steps": 3, "log_every_n_steps": 100, "mixed_precision": "bf16", "train_batch_size": 1}
    with tracing(trace):
        chat_runs.run(place, folder / "run", gradient_accumulation_steps=1, **settings)
    return {"waits": _waits(trace, 3), "saved": [path.name for path in (folder / "run").iterdir()]}


_ENGINE = "library/training/engine.py"  # a fused optimizer's first step, which makes its state, is one


def _waits(trace: WatchedTrace, steps: int) -> list[list[str]]:
    """Return the host's waits in ``steps`` but the last, without those of optimizers that cannot skip a step.

    Nor those of a capture, which compares a shape's first replay with its step.
    """
    phases = {f"step {i}" for i in range(1, steps)}
    found = [wait for wait in trace.waits if wait.phase in phases and not wait.where[-1].startswith(_ENGINE)]
    found = [wait for wait in found if not any(place.endswith(" _run_and_capture") for place in wait.where)]
    return [[wait.phase, wait.operation, *wait.where] for wait in found]


def _with_file(folder: Path, model_type: str, file: str, flags: Sequence[str]) -> tuple[Path, Sequence[str]]:
    """Return a file of ``folder``'s transformer in the format ``file``, and ``flags`` with those of its other parts."""
    layout = family_class(model_type).layout
    parts = {part.option: folder for part in (layout.vae, *layout.text_encoders)}
    parts |= {part.option: folder / part.folder for part in layout.tokenizers}
    made = write_quantised(folder / "transformer" / "diffusion_pytorch_model.safetensors", file)
    return made, [*flags, *(word for option, path in parts.items() for word in (f"--{option}", str(path)))]


def _watch(trace: WatchedTrace, copies: list[str]) -> None:
    """Name steps in the walk; after each forward pass look for what holds a quantised weight in high precision."""
    own_epoch, own_batch, own_compute = trainer_module.Trainer._epoch, Engine.forward_backward, FlowStep.compute
    training = list[bool]()  # not in a dry run

    def epoch(self: Any) -> None:
        training.append(True)
        own_epoch(self)

    def batch(self: Any, loss_of: Any, batch: Any, step: int, *arguments: Any) -> Any:
        if training:
            trace.phase = f"step {step + 1}"
        return own_batch(self, loss_of, batch, step, *arguments)

    def compute(self: Any, model: Any, *arguments: Any) -> Any:
        trace.relabel((*model.parameters(), *model.buffers()), "weights")
        found = own_compute(self, model, *arguments)
        shapes = {layer.outline.shape for layer in model.modules() if isinstance(layer, QuantizedLinear)}
        for part, made in trace.living():
            if part == "activations" and made.shape in shapes and "16" in made.dtype:
                copies.append(f"{made.operation} {made.shape}")
        return found

    trainer_module.Trainer._epoch, Engine.forward_backward = epoch, batch  # type: ignore[method-assign]
    FlowStep.compute = compute  # type: ignore[method-assign]


def _item() -> None:
    own = FlowStep.compute

    def compute(self: Any, *arguments: Any) -> Any:
        found, metrics = own(self, *arguments)
        if float(found) > 1e9:
            raise AssertionError
        return found, metrics

    FlowStep.compute = compute  # type: ignore[method-assign]


def _device() -> None:
    own = FlowStep.compute

    def compute(self: Any, *arguments: Any) -> Any:
        found, metrics = own(self, *arguments)
        return (found * torch.ones(2)).mean(), metrics

    FlowStep.compute = compute  # type: ignore[method-assign]


def _activation() -> None:
    import library.models.blocks as flux_blocks
    import library.models.flux.model as flux

    flux.project_recomputed = lambda linears, prologue, *inputs: flux_blocks.project_together(
        linears, prologue(*inputs)
    )


# Faults that a walk must find: the loss read in every step, the loss times a tensor of the host, layers' inputs saved
# beside what they are made of.
_PLANTED: dict[str, Callable[[], None]] = {"item": _item, "device": _device, "activation": _activation}


def tool(folder: Path, name: str, words: Sequence[str]) -> dict[str, Any]:
    """Run ``tools/NAME.py``; return the peak."""
    import importlib

    module = importlib.import_module(f"tools.{name}")
    trace = WatchedTrace()
    pretend(trace)
    sys.argv = [name, *words]
    with tracing(trace):
        module.main()
    return {"peak": trace.peak}


def make_model(folder: Path, model_type: str, blocks: int) -> dict[str, Any]:
    """Write a model of published width into ``folder/model``."""
    return {"path": str(write_model(model_type, folder / "model", blocks))}
