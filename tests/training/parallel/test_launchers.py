"""Several processes, every way of starting them, and epochs whose batches are no multiple of the processes.

Each image is seen once. One process that accumulates over as many batches is what several are compared with; it is
compared in turn with one that has all samples of a step in one batch, where that can be.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from library.accelerator import dp_rank_and_size, model_parallel_rank_and_size
from library.llm.token_batches import TokenShards
from tests.chat_runs import adapter
from tests.chat_runs import flags as chat_flags
from tests.chat_runs import run as chat_run
from tests.chat_runs import train_flags as train_chat
from tests.pretraining_runs import flags as corpus_flags
from tests.pretraining_runs import run as corpus_run
from tests.pretraining_runs import train_flags as train_corpus
from tests.pretraining_runs import weights
from tests.processes import launcher
from tests.runs import (
    arguments,
    assert_same_metrics,
    largest_difference,
    launch,
    lora,
    metrics,
    run,
    start,
    train_flags,
    write_dataset,
)
from tests.two_nodes import run_on_nodes, two_nodes
from tests.worker_group import Job, run_in_group

# Gradients of two halves are averaged by all-reduce instead of one mean over the batch: fp32 rounding, as in the
# accumulation test.
SAME_IN_FP32 = 2e-4


def test_two_processes_equal_one(base: Path, tmp_path: Path) -> None:
    halves = write_dataset(
        tmp_path / "halves", text="batch_size = 2\nvalidation_split = 0.25\nvalidation_seed = 1", num_repeats=2
    )
    whole = write_dataset(
        tmp_path / "whole", text="batch_size = 4\nvalidation_split = 0.25\nvalidation_seed = 1", num_repeats=2
    )
    settings = {"max_train_steps": 3, "gradient_checkpointing": True, "ddp_static_graph": True}
    one = run(base, whole, tmp_path / "one", **settings)
    two = launch(launcher(), arguments(base, halves, tmp_path / "two", **settings), tmp_path)
    assert two.returncode == 0, two.stderr
    assert largest_difference(lora(tmp_path / "two"), lora(tmp_path / "one")) < SAME_IN_FP32
    lines = metrics(tmp_path / "two")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 3]  # written by one process, validation before and after
    assert lines[-1]["val_loss"] == pytest.approx(one.val_loss, rel=1e-5)
    assert two.stdout.count("validation loss") == 1


@pytest.mark.slow
def test_accelerate_launch_and_a_foreign_configuration_change_nothing(
    base: Path, dataset: Path, tmp_path: Path
) -> None:
    run(base, dataset, tmp_path / "plain", max_train_steps=2)
    home = tmp_path / "home" / "accelerate"
    home.mkdir(parents=True)
    (home / "default_config.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: bf16\nuse_cpu: true\n"
        "num_processes: 1\nnum_machines: 1\nmachine_rank: 0\n"
    )
    flags = arguments(base, dataset, tmp_path / "launched", max_train_steps=2)
    environment = {"HF_HOME": str(tmp_path / "home"), "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7"}
    launched = launch(["-m", "accelerate.commands.launch"], flags, tmp_path, environment)
    assert launched.returncode == 0, launched.stderr
    assert largest_difference(lora(tmp_path / "launched"), lora(tmp_path / "plain")) < SAME_IN_FP32


def test_an_engine_asked_for_outside_the_training_file_is_refused(base: Path, dataset: Path, tmp_path: Path) -> None:
    flags = arguments(base, dataset, tmp_path / "out")
    refused = start(flags, tmp_path, {"ACCELERATE_USE_FSDP": "true"})
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ACCELERATE_USE_FSDP: accelerate's configuration asks for an engine")
    assert len(refused.stderr.splitlines()) == 1


def test_a_user_error_is_one_line_and_exit_code_2(base: Path, dataset: Path, tmp_path: Path) -> None:
    flags = [flag.replace("network_dim", "netwrk_dim") for flag in arguments(base, dataset, tmp_path / "out")]
    refused = start(flags, tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == "error: command line: --netwrk_dim: unknown flag; did you mean 'network_dim'?\n"


ON_NODES: dict[str, object] = {"max_train_steps": 3, "gradient_checkpointing": True, "max_grad_norm": 0.01}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "layout"), [(1, {}), (2, {"dp": 2, "shard": 2})], ids=["DDP", "HSDP, split within a node"]
)
def test_two_nodes_equal_one_process(processes: int, layout: dict[str, object], base: Path, tmp_path: Path) -> None:
    images = write_dataset(tmp_path / "images", text="batch_size = 1")
    run(base, images, tmp_path / "one", **ON_NODES, gradient_accumulation_steps=2 * processes)
    flags = arguments(base, images, tmp_path / "two", **ON_NODES, **layout)
    with two_nodes(tmp_path) as nodes:
        first, second = run_on_nodes(nodes, "train_lora.py", flags, tmp_path, processes)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert largest_difference(lora(tmp_path / "two"), lora(tmp_path / "one")) < SAME_IN_FP32
    assert (first.stdout + second.stdout).count("LoRA on flux") == 1


@pytest.mark.slow
def test_both_nodes_end_when_a_process_of_one_is_killed(base: Path, tmp_path: Path) -> None:
    images = write_dataset(tmp_path / "images", text="batch_size = 1")
    flags = arguments(base, images, tmp_path / "out", max_train_steps=4)
    with two_nodes(tmp_path) as nodes:
        environment = {"DIES": "3:kill"}
        done = run_on_nodes(nodes, "tests/faults/dying_rank.py", flags, tmp_path, environment=environment)
    errors = "".join(node.stderr for node in done)
    assert (tmp_path / "died").exists(), errors
    assert time.time() - (tmp_path / "died").stat().st_mtime < 30
    assert all(node.returncode not in (0, 2) for node in done), errors
    assert "process 0: lost another process" in errors


SAME = 1e-5  # of the largest weight: fp32 sums in another order
EPOCHS: dict[str, object] = {
    "max_train_steps": None,
    "max_train_epochs": 2,
    "masked_loss": True,
    "prior_loss_weight": 0.7,
    "network_dropout": 0.1,
    "max_grad_norm": 0.01,
    "optimizer_type": "SGD",  # Adam divides a gradient that is rounding alone by its own size
    "learning_rate": 30.0,
    "lr_scheduler": "cosine",
    "validate_every_n_epochs": 1,
}
KEYS = ("step", "epoch", "loss", "loss_ema", "grad_norm", "val_loss", "lr/transformer", "sigma_mean")
LEVELS = [f"loss/sigma_{low:g}-{high:g}" for low, high in ((0, 0.2), (0.2, 0.4), (0.4, 0.6), (0.6, 0.8), (0.8, 1))]
LEVELS += [f"val_loss/sigma_{sigma}" for sigma in (0.1, 0.3, 0.5, 0.7, 0.9)]


def write_images(folder: Path) -> Path:
    """Write images of three sizes, with repeats, masks, regularisation images and some held out: 13 batches."""
    text = "batch_size = 2\nenable_bucket = true\nbucket_reso_steps = 32\nmin_bucket_reso = 32\n"
    toml = write_dataset(folder, images=7, text=text + "validation_split = 0.2\nvalidation_seed = 1", num_repeats=2)
    for name, size, count in (("wide", (96, 32), 3), ("regular", (32, 96), 2)):
        (folder / name).mkdir()
        for i in range(count):
            Image.linear_gradient("L").resize(size).rotate(90 * i).convert("RGB").save(folder / name / f"{i}.png")
            (folder / name / f"{i}.txt").write_text(f"{name} {i}")
    (folder / "masks").mkdir()
    for i in range(7):
        Image.linear_gradient("L").resize((64, 64)).rotate(90 * i).save(folder / "masks" / f"{i}.png")
    toml.write_text(
        toml.read_text()
        + 'conditioning_data_dir = "masks"\n[[datasets.subsets]]\nimage_dir = "wide"\n'
        + '[[datasets.subsets]]\nimage_dir = "regular"\nis_reg = true\n'
    )
    return toml


@pytest.fixture(scope="module")
def runs(base: Path, corpus: Path, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs on one process and on two."""
    folder = tmp_path_factory.mktemp("uneven")
    images, seven = write_images(folder / "images"), write_dataset(folder / "seven", images=7, text="batch_size = 2")
    four = write_dataset(folder / "four", images=7, text="batch_size = 4")
    plain = {key: EPOCHS[key] for key in ("max_train_steps", "max_train_epochs", "optimizer_type", "learning_rate")}
    chat = {"optimizer_type": "SGD", "learning_rate": 1.0, "max_train_epochs": 2, "train_batch_size": 1}
    chat |= {"validation_data": [place / "data.jsonl"], "validate_every_n_epochs": 1}
    text = {
        "optimizer_type": "SGD",
        "learning_rate": 0.1,
        "max_train_epochs": 1,
        "max_train_steps": None,
        "lr_warmup_steps": 3,
        "tokens_per_batch": 32 * 32,
    }
    saves = {"save_every_n_steps": 3, "save_state": True}  # amid the first epoch
    run(base, images, folder / "one", **EPOCHS, **saves, gradient_accumulation_steps=2)
    run(base, images, folder / "slow", **EPOCHS, gradient_accumulation_steps=6)
    run(base, four, folder / "batch", **plain)
    chat_run(place, folder / "chat_one", **chat, gradient_accumulation_steps=6)
    corpus_run(corpus, folder / "text_one", **text)

    def job(name: str, data: Path = images, **settings: object) -> Job:
        return name, train_flags, (arguments(base, data, folder / name, **settings),)

    jobs: list[Job] = [
        job("ddp_slow", **EPOCHS, gradient_accumulation_steps=3),
        job("fsdp", **EPOCHS, shard=2),
        job("resumed", **EPOCHS, resume=folder / "one/lora-step00000003-state"),
        job("two", seven, **plain),
        ("chat", train_chat, (chat_flags(place, folder / "chat", **chat, gradient_accumulation_steps=3),)),
        ("text", train_corpus, (corpus_flags(corpus, folder / "text", **text),)),
    ]
    assert run_in_group(jobs, folder) == {name: "" for name, _, _ in jobs}
    return folder


@pytest.mark.parametrize(
    ("several", "one"), [("ddp_slow", "slow"), ("fsdp", "one"), ("resumed", "one"), ("two", "batch")]
)
def test_two_processes_train_as_one(runs: Path, several: str, one: str) -> None:
    assert largest_difference(lora(runs / several), lora(runs / one)) < SAME
    expected, found = metrics(runs / one), metrics(runs / several)
    if several == "resumed":
        expected = [line for line in expected if line["step"] > 3]
        found = [line for line in found if line["step"] > 3]
    assert_same_metrics(expected, found, (*KEYS, *LEVELS), rel=1e-4)
    assert len({key for line in found for key in line if "/sigma_" in key}) >= 4


def test_the_last_step_of_an_epoch_has_the_batches_that_are_left(runs: Path) -> None:
    for name, steps in (("fsdp", 7), ("ddp_slow", 3)):  # 13 batches, 2 or 6 a step
        epochs = [line["epoch"] for line in metrics(runs / name) if "loss" in line]
        assert epochs == [0] * steps + [1] * steps


def test_a_conversation_and_a_window_come_once_too(runs: Path, corpus: Path) -> None:
    assert largest_difference(adapter(runs / "chat/lora"), adapter(runs / "chat_one/lora")) < SAME
    assert [line["epoch"] for line in metrics(runs / "chat") if "loss" in line] == [0] * 2 + [
        1
    ] * 2  # 8 chats, 6 a step
    assert_same_metrics(metrics(runs / "chat_one"), metrics(runs / "chat"), ("loss", "val_loss"), rel=1e-4)
    assert largest_difference(weights(runs / "text"), weights(runs / "text_one")) < SAME
    (last,) = [line for line in metrics(runs / "text") if "loss" in line][-1:]
    windows = (TokenShards(corpus, "train").tokens - 1) // 32 - 1
    assert last["tokens"] == windows * 32
    assert windows % 32


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_layout_takes_the_smaller_step(base: Path, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")  # 13 batches, 4 a step: of the last one only one process has any
    settings = {**EPOCHS, "network_dropout": 0.0, "max_train_epochs": 1}  # the stages of a pipeline draw their own
    run(base, images, tmp_path / "one", **settings, gradient_accumulation_steps=4)
    layouts: dict[str, tuple[int, dict[str, object]]] = {
        "ddp": (4, {}),
        "hsdp": (4, {"shard": 2, "dp": 2}),
        "tp": (4, {"tp": 2, "gradient_accumulation_steps": 2}),
        "pp": (4, {"pp": 2, "dp": 2, "gradient_accumulation_steps": 2}),
    }
    if importlib.util.find_spec("deepspeed") is not None:
        layouts |= {f"zero{n}": (2, {"zero": n, "gradient_accumulation_steps": 2}) for n in (1, 2, 3)}
    for processes in (4, 2):
        jobs: list[Job] = [
            (name, train_flags, (arguments(base, images, tmp_path / name, **settings | layout),))
            for name, (count, layout) in layouts.items()
            if count == processes
        ]
        if jobs:
            assert run_in_group(jobs, tmp_path, processes) == {name: "" for name, _, _ in jobs}
    for name in layouts:
        assert largest_difference(lora(tmp_path / name), lora(tmp_path / "one")) < SAME, name
        assert_same_metrics(metrics(tmp_path / "one"), metrics(tmp_path / name), KEYS, rel=1e-4)


@pytest.mark.parametrize("sizes", [{"dp": 3}, {"dp": 2, "shard": 2}, {"dp": 3, "tp": 2}, {"pp": 2, "dp": 3}])
def test_processes_that_compute_one_batch_together_have_one_dp_rank(sizes: dict[str, int]) -> None:
    mesh = torch.arange(torch.Size(sizes.values()).numel()).reshape(*sizes.values())  # what torch's meshes are made of
    for process in mesh.flatten().tolist():
        place = dict(zip(sizes, (mesh == process).nonzero()[0].tolist(), strict=True))
        dp, shard, pp, tp = (place.get(key, 0) for key in ("dp", "shard", "pp", "tp"))
        shards, tps = sizes.get("shard", 1), sizes.get("tp", 1)
        one = cast(Accelerator, SimpleNamespace(mesh_sizes=sizes, process_index=process, num_processes=mesh.numel()))
        assert dp_rank_and_size(one) == (dp * shards + shard, sizes["dp"] * shards)
        assert model_parallel_rank_and_size(one) == (pp * tps + tp, sizes.get("pp", 1) * tps)
