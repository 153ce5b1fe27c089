"""One process with several devices. Two are one CPU twice: hooks, order and the run are real, the copies are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import library.training.tasks.image_lora as image_lora
import train_lora
from library.config import load_config
from library.config.run_schema import ParallelConfig
from library.errors import UserError
from library.models.flux.model import optimise_forward
from library.training.engine import all_finite
from library.training.parallel.parallelize import devices_to_fill, place_blocks
from tests.runs import arguments, lora, run, write_dataset
from tests.tiny import tiny_flux_transformer

TWICE = [torch.device("cpu"), torch.device("cpu")]


def test_a_dispatched_run_gives_the_same_lora(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = write_dataset(tmp_path / "images", text="batch_size = 2\nvalidation_split = 0.25\nvalidation_seed = 1")
    (tmp_path / "prompts.txt").write_text("a disc --w 64 --h 64 --s 2 --d 1\n")
    settings: dict[str, object] = {
        "max_train_steps": 3,
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.01,
        "fp8_scaled": True,
        "ema_decay": 0.5,
        "save_every_n_steps": 2,
        "save_state": True,
        "sample_prompts": tmp_path / "prompts.txt",
    }
    one = run(base, images, tmp_path / "one", **settings)
    monkeypatch.setattr(image_lora, "devices_to_fill", lambda parallel, _: TWICE if parallel.device_map else [])
    two = run(base, images, tmp_path / "two", **settings, device_map="balanced")
    blocks = [*two.task.transformer.transformer_blocks, *two.task.transformer.single_transformer_blocks]
    assert all(hasattr(block, "_hf_hook") for block in blocks)
    # what is outside of the blocks gets what the last of them gives, from another device
    assert all(hasattr(two.task.transformer.get_submodule(name), "_hf_hook") for name in ("norm_out", "proj_out"))
    assert two.val_loss == one.val_loss
    assert all(torch.equal(a, b) for a, b in zip(lora(tmp_path / "one").values(), lora(tmp_path / "two").values()))
    image = "samples/step000003_00.png"
    assert (tmp_path / "two" / image).read_bytes() == (tmp_path / "one" / image).read_bytes()
    state = tmp_path / "two/lora-step00000002-state"
    run(base, images, tmp_path / "back", **settings, resume=state)
    assert all(torch.equal(a, b) for a, b in zip(lora(tmp_path / "one").values(), lora(tmp_path / "back").values()))


def test_the_fullest_device_holds_as_little_as_can_be() -> None:
    transformer = optimise_forward(tiny_flux_transformer(double_blocks=2, single_blocks=4))
    blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]

    def size(modules: list[nn.Module]) -> int:
        return sum(t.numel() * 4 for m in modules for t in (*m.parameters(), *m.buffers()))

    rest = size([transformer]) - size(blocks)
    cuts = {n: max(rest + size(blocks[:n]), size(blocks[n:])) for n in range(1, 6)}
    best = min(cuts, key=lambda n: cuts[n])
    said = place_blocks(transformer, blocks, TWICE)
    assert said.startswith(f"device map: cpu {best} blocks, ")
    assert f"; cpu {6 - best} blocks, " in said
    assert transformer.hf_device_map["proj_out"] == "cpu"
    with pytest.raises(UserError, match="device_map: 3 GPUs for 2 blocks"):
        place_blocks(transformer, blocks[:2], [*TWICE, torch.device("cpu")])


def test_it_is_refused_without_gpus_and_with_processes(base: Path, dataset: Path, tmp_path: Path) -> None:
    flags = arguments(base, dataset, tmp_path / "out", device_map="balanced")
    with pytest.raises(UserError, match="device_map: needs two GPUs, this process sees 0"):
        train_lora.train(load_config(flags))

    class Two:
        num_processes = 2

    with pytest.raises(UserError, match="device_map: one process drives all GPUs; start with python"):
        devices_to_fill(ParallelConfig(device_map="balanced"), Two())  # type: ignore[arg-type]


def test_what_is_not_finite_is_found_among_tensors_of_several_kinds() -> None:
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.bfloat16)]
    assert all_finite(tensors)
    assert not all_finite([*tensors, torch.tensor([float("nan")])])
