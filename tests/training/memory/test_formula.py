"""The formula and the table of layouts made with it: against a real step, and against a prepared run."""

from __future__ import annotations

import gc
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import toml
import torch
from torch.profiler import ProfilerActivity, profile

from library.config.schema import ParallelConfig
from library.errors import UserError
from library.models.family_by_name import family_class
from library.models.llm.model import TransformerLM
from library.models.llm.spec import LMConfig, llama
from library.models.registry import lora_targets
from library.nn.checkpointing import ActivationCheckpointing, neighbours
from library.training.memory.budget import tensor_bytes
from library.training.memory.fake_cuda import library_path
from library.training.memory.formula import (
    BlockKind,
    ModelNumbers,
    ModelShape,
    StepOptions,
    model_numbers,
    shape_of,
    step_parts,
)
from library.training.optim.factory import unwrapped
from networks.network import inject_adapter
from networks.options import parse_network_args
from tests.runs import ROOT, run
from tests.tiny import save_single_files
from tests.tiny_qwen import tiny_qwen_pipeline

# What a pass holds at its highest point, by the formula, over what torch's profiler counts. The profiler also sees the
# buffers in which oneDNN packs weights, which differ from processor to processor.
LOW, HIGH = 0.8, 1.25
FLUX = {
    "guidance_embeds": True,
    "num_layers": 2,
    "num_single_layers": 4,
    "attention_head_dim": 64,
    "num_attention_heads": 6,
    "joint_attention_dim": 128,
    "pooled_projection_dim": 64,
    "axes_dims_rope": (8, 28, 28),
}
LLAMA = llama(256, 4, 4, 2, 688, vocab_size=1000, context=512)


def peak(step: Callable[[], None]) -> int:
    """Return the most bytes that ``step`` holds at once besides its gradients, which it adds to those of one before."""
    step()
    gc.collect()  # what that step left in cycles would be let go of in the next and count as less held
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def lora_step(checkpointing: bool, tokens: int, text: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], None]:
    """Return a step of diffusers' FLUX transformer with Tandem's layers and LoRA, on numbers."""
    from diffusers import FluxTransformer2DModel

    from library.config.schema import NetworkConfig
    from library.models.flux.model import optimise_forward

    model = optimise_forward(FluxTransformer2DModel(**FLUX).to(dtype))
    options = parse_network_args(NetworkConfig(network_dim=8, network_alpha=8), lora_targets()["flux"])
    inject_adapter(model, options, lora_targets()["flux"], seed=0)
    if checkpointing:
        blocks = family_class("flux").blocks(model)
        pairs, chained_args = neighbours(blocks), family_class("flux").chained_args
        model.enable_gradient_checkpointing(
            ActivationCheckpointing(len(blocks), pairs=pairs, chained_args=chained_args)
        )
    inputs = {
        "hidden_states": torch.randn(1, tokens, 64),
        "encoder_hidden_states": torch.randn(1, text, 128),
        "pooled_projections": torch.randn(1, 64),
        "timestep": torch.rand(1),
        "guidance": torch.ones(1),
        "img_ids": torch.zeros(tokens, 3),
        "txt_ids": torch.zeros(text, 3),
    }

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = model.train()(**inputs, return_dict=False)[0]
        output.float().square().mean().backward()

    return step


@pytest.mark.parametrize(("tokens", "checkpointing"), [(256, False), (784, True)])
def test_a_lora_steps_peak_is_what_was_estimated(tokens: int, checkpointing: bool) -> None:
    parts = step_parts(model_numbers(ModelShape("flux", FLUX), tokens, 64, 8), StepOptions(checkpointing=checkpointing))
    assert LOW < parts["activations"] / peak(lora_step(checkpointing, tokens, 64)) < HIGH


def test_a_step_in_fp32_too() -> None:
    model = model_numbers(ModelShape("flux", FLUX), 256, 64, 8, torch.float32, autocast=False)
    parts = step_parts(model, StepOptions(base_bytes=4))
    assert LOW < parts["activations"] / peak(lora_step(False, 256, 64, torch.float32)) < HIGH


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pretraining_steps_peak_too(checkpointing: bool) -> None:
    model = TransformerLM(LLAMA).initialise()
    if checkpointing:
        model.enable_gradient_checkpointing()
    tokens = torch.randint(0, 1000, (1, 512))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.train()(tokens, tokens)
        loss.backward()

    whole = model_numbers(ModelShape("llama", LLAMA), 512, 0, 0, torch.float32)
    parts = step_parts(whole, StepOptions(full=True, checkpointing=checkpointing))
    assert parts["weights"] == sum(p.numel() * 4 for p in model.parameters())
    assert parts["optimizer"] == 2 * parts["weights"]
    assert LOW < parts["activations"] / peak(step) < HIGH


def test_the_parts_are_those_of_a_prepared_run(base: Path, dataset: Path, tmp_path: Path) -> None:
    done = run(base, dataset, tmp_path / "out", max_train_steps=1, mixed_precision="bf16", network_dim=4).task
    trained, states = done.engine.parameters, unwrapped(done.engine.optimizer).state.values()
    parts = step_parts(model_numbers(shape_of(str(base)), 16, 24, 4), StepOptions())
    ids = {id(p) for p in trained}
    assert parts["weights"] == tensor_bytes([p for p in done.transformer.parameters() if id(p) not in ids])
    assert parts["LoRA"] == parts["gradients"] == tensor_bytes(trained)
    held = tensor_bytes([value for state in states for key, value in state.items() if key != "step"])
    assert parts["optimizer"] == held


def test_only_layouts_that_can_be_had_are_named() -> None:
    layouts = runpy.run_path(str(ROOT / "tools/plan_parallel.py"))["layouts"]
    model = ModelNumbers({1: 4400, 2: 2650, 4: 1775}, 3200, 200, (BlockKind(4, 1000, 3400, 100),), 1500, True)
    found = list(layouts(model, 16, 8, batch=2))
    assert all(one.replicas(16) == one.dp for one in found)
    assert {one.shard for one in found} == {1, 2, 4, 8, 16}
    assert {one.tp for one in found} == {1, 2, 4}  # of four heads, and within a machine
    assert {(one.pp, one.microbatch_count) for one in found if one.pp > 1} == {(2, 2), (4, 2)}  # of four blocks
    assert [one.dp for one in layouts(model, 1, 1, 1)] == [1]
    assert [one.zero for one in found if one.zero] == [2, 3]
    assert not any(one.zero for one in layouts(model, 16, 8, batch=2, full=True))


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run the tool as Python runs it; return what it printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["plan_parallel.py", *words])
        runpy.run_path(str(ROOT / "tools/plan_parallel.py"), run_name="__main__")
    return capsys.readouterr().out


def test_the_tool_recommends_settings_that_a_training_file_takes(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "--model", "gpt2-124m", "--train", "all", "--gpu_memory", "5", "--gpus", "4")
    assert "a batch of 1 at 1024 tokens" in text  # which is all of its context
    (row,) = re.findall(r"^(.*?)  .*<- recommended", text, re.MULTILINE)
    settings = toml.loads("[" + text.partition("\n[")[2].rpartition("torchrun")[0])
    chosen = ParallelConfig(**settings["parallel"])
    assert {f"{name} = {size}" for name, size in chosen.mesh(4).items() if size > 1} == set(row.strip().split(", "))
    assert "torchrun --nproc-per-node 4 train_llm.py" in text


@pytest.mark.slow
def test_a_layout_with_whole_models_is_counted_before_it_is_recommended(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        library_path()
    except UserError as error:
        pytest.skip(str(error))
    words = ["--model", str(base), "--gpu_memory", "24", "--resolution", "64", "--network_dim", "4"]
    assert re.search(
        r"recommended: one process, bf16; its step takes 0\.\d\d GiB, source: fake device", plan(capsys, *words)
    )


def test_a_model_of_no_family_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer/config.json").write_text('{"_class_name": "OtherTransformer2DModel"}')
    with pytest.raises(UserError, match="a OtherTransformer2DModel, no family of this version; give one of FLUX"):
        shape_of(str(tmp_path))


def test_files_and_folders_are_read_and_what_cannot_fit_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = save_single_files(base, tmp_path / "single").transformer
    whole = shape_of(str(base)), shape_of(str(file))
    one, other = (model_numbers(shape, 16, 8, 4) for shape in whole)
    assert one == other
    assert shape_of(str(tiny_qwen_pipeline(tmp_path / "qwen"))).name == "qwen_image"
    assert isinstance(shape_of("llama3-8b").arguments, LMConfig)
    with pytest.raises(SystemExit) as left:
        plan(capsys, "--model", str(base), "--gpu_memory", "0.5", "--resolution", "64")
    assert left.value.code == 2
    assert "error: nothing fits: one process with fp8, checkpointing needs 0.0 GiB; lower" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        plan(capsys, "--model", "flux2", "--gpu_memory", "24")
    assert "flux2: no file, folder or known model; did you mean 'flux'?" in capsys.readouterr().err
