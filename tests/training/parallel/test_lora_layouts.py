"""LoRAs under each layout of two processes, against the same run on one process."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from library.accelerator import require_deepspeed
from library.config import load_config
from library.config.run_schema import ParallelConfig
from library.errors import UserError
from tests.chat_runs import adapter
from tests.chat_runs import flags as chat_flags
from tests.chat_runs import run as chat_run
from tests.chat_runs import train_flags as train_chat
from tests.runs import (
    arguments,
    assert_same_metrics,
    largest_difference,
    lora,
    metrics,
    run,
    train_flags,
    write_dataset,
)
from tests.tiny_ernie_image import tiny_ernie_pipeline
from tests.tiny_flux2 import tiny_flux2_pipeline
from tests.tiny_krea2 import tiny_krea2_pipeline
from tests.tiny_qwen import tiny_qwen_pipeline
from tests.tiny_qwen_21 import tiny_21_pipeline
from tests.training.test_nonfinite import BAD, clean, finite, spoilt  # noqa: F401  # the fixture
from tests.worker_group import Job, run_in_group
from train_lora import train

Settings = dict[str, object]

DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
NEEDS_DEEPSPEED = [
    pytest.mark.slow,
    pytest.mark.skipif(not DEEPSPEED, reason="DeepSpeed is not installed (make test-zero)"),
    pytest.mark.timeout(900),
]
STAGES = (1, 2, 3)  # of ZeRO
# Gradients of halves are averaged, or sums over parts of a layer and microbatches added, in another order than on one
# process. AdamW divides them by their own size: 2.5e-5 of the largest weight was measured after three steps.
SAME_IN_FP32 = {"pp": 1e-4, "tp": 1e-4}
OTHER_LAYOUTS = 2e-4


@dataclass(frozen=True)
class Case:
    """A run with ``settings`` on one process, and with those of ``two`` besides on two processes.

    Attributes:
        data: the dataset; see the fixture ``runs``.
        model: ``base``, one of ``MODELS``, or a language model.
        refused: part of the error of the run on two processes; there is none on one then.
    """

    settings: Settings
    two: Settings
    data: str = "images"
    model: str = "base"
    refused: str = ""


def halves(settings: Settings, batches: int = 2, data: str = "images", model: str = "base", **layout: object) -> Case:
    """Return a case in which each of two processes has half of a step's batches."""
    one = settings | {"gradient_accumulation_steps": batches}
    return Case(one, layout | {"gradient_accumulation_steps": batches // 2}, data, model)


MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen_image": lambda folder: tiny_qwen_pipeline(folder, blocks=3),
    "qwen_image_21": lambda folder: tiny_21_pipeline(folder, blocks=3),
    "flux2_klein": lambda folder: tiny_flux2_pipeline(folder, double_blocks=2, single_blocks=3),
    "krea2": lambda folder: tiny_krea2_pipeline(folder, layers=3),
    "ernie_image": lambda folder: tiny_ernie_pipeline(folder, layers=3),
}
# clips, saves a state in the middle and samples there
WHOLE: Settings = {
    "max_train_steps": 3,
    "gradient_checkpointing": True,
    "max_grad_norm": 0.01,
    "save_every_n_steps": 2,
    "save_state": True,
    "sample_every_n_steps": 2,
}
EPS: Settings = {"optimizer_args": ["eps=1e-6"]}  # AdamW's own 1e-8 is as small as rounding of clipped gradients
TWO_BATCHES: Settings = WHOLE | EPS | {"gradient_accumulation_steps": 2}
TWO_STAGES: Settings = {"pp": 2, "microbatches": 2}
FP8: Settings = {"max_train_steps": 2, "fp8_scaled": True, "optimizer_type": "Adafactor"}
PRODIGY: Settings = FP8 | {"optimizer_type": "Prodigy", "learning_rate": 1.0, "ema_decay": 0.5}
DROPOUT: Settings = {"max_train_steps": 4, "network_dropout": 0.2}
DROPOUT |= {"network_args": ["rank_dropout=0.2", "module_dropout=0.2"]}
SKIP: Settings = {"max_train_steps": 5, "on_nan": "skip", "log_every_n_steps": 3}
CHAT: Settings = {
    "max_train_steps": 3,
    "network_dropout": 0.0,
    "train_batch_size": 1,
    "packing": True,
    "max_length": 20,
    "sample_prompts": ["say 1"],
    "sample_tokens": 6,
}


def family(model_type: str, sampling: str, *network_args: str) -> Case:
    """Return a short run of another family as a pipeline, with padded captions."""
    settings = EPS | {"max_train_steps": 2, "model_type": model_type, "timestep_sampling": sampling}
    more = {"network_args": list(network_args)} if network_args else {}
    return Case(settings | more, {"pp": 2}, "captions", model_type)


CASES: dict[str, dict[str, Case]] = {
    "shard": {
        "whole": halves(WHOLE, 4, shard=2),
        # Adafactor keeps sums over rows and columns, which a split weight does not have: LoRA weights are not split
        "fp8": halves(FP8, shard=2),
        "chat": halves(CHAT, model="llama", shard=2),
    },
    "tp": {
        "whole": Case(TWO_BATCHES | {"network_args": ["img_mod_dim=2", "single_mod_dim=2"]}, {"tp": 2}),
        # processes with the same batch draw the same dropout
        "fp8": Case(FP8 | DROPOUT, {"tp": 2}, "sizes"),
        "chat": Case(CHAT | {"optimizer_args": ["eps=1e-4"]}, {"tp": 2}, model="gpt2"),
    },
    "pp": {
        # all stages compute the conditioning
        "whole": Case(TWO_BATCHES | {"network_args": ["img_mod_dim=2", "in_dims=[2,2,2,2,2]"]}, {"pp": 2}, "sizes"),
        # what one block has trains none in the first stage; Prodigy's step size follows from the whole LoRA
        "fp8": Case(PRODIGY | {"network_args": ["train_double_block_indices=none"]}, TWO_STAGES, "captions"),
        "qwen_image": family("qwen_image", "qwen_shift"),
        "krea2": family("krea2", "krea2_shift"),
        "chat": Case(CHAT | {"train_batch_size": 4}, TWO_STAGES, model="gpt2"),
        "nan": Case(SKIP | EPS, {"pp": 2}, "spoilt"),
        "overflow": Case({"max_train_steps": 5}, {"pp": 2}, "large", refused=BAD),
        "many": Case({}, {"pp": 2, "microbatches": 3}, "sizes", refused="the dataset's batches have at most 2 images"),
    },
}
FURTHER = {  # families, of whose blocks some have two streams and some one, as those above
    "qwen_image_21": family("qwen_image_21", "qwen_shift", "mod_dim=2"),
    "flux2_klein": family("flux2_klein", "flux2_shift", "single_mod_dim=2"),
    "ernie_image": family("ernie_image", "shift", "final_dim=2"),
}
# a rank smaller than every matrix of the base, so that stage 3 splits them all
SHORT: Settings = {"network_dim": 1, "max_train_steps": 2}
for stage in STAGES:
    CASES[f"zero{stage}"] = {
        "whole": halves(WHOLE | {"network_dim": 1, "ema_decay": 0.9}, 4, zero=stage),
        "nan": halves(SKIP | {"network_dim": 1}, data="spoilt", zero=stage),
    }
CASES["zero1"] |= {
    "bf16": halves(SHORT | {"mixed_precision": "bf16"}, data="sizes", zero=1),
    "chat": halves(CHAT, model="llama", zero=1),
}
CASES["zero2"] |= {"fp8": halves(SHORT | {"fp8_scaled": True}, data="sizes", zero=2)}
CASES["zero3"] |= {
    "dora": halves(SHORT | {"network_type": "dora", "gradient_checkpointing": True}, data="sizes", zero=3),
    "qwen_image": halves(SHORT | CASES["pp"]["qwen_image"].settings, data="sizes", model="qwen_image", zero=3),
    "groups": halves(SHORT | {"network_args": ["loraplus_lr_ratio=4"]}, data="sizes", zero=3),
    "chat": halves(CHAT, model="llama", zero=3),
}


class Runs(NamedTuple):
    """The runs of a layout: in ``folder / case`` on two processes, in ``folder / f"{case}_one"`` on one."""

    layout: str
    folder: Path
    within: float

    def pair(self, case: str) -> tuple[Path, Path]:
        return self.folder / f"{case}_one", self.folder / case


def write_sizes(folder: Path, wide: tuple[int, ...] = (1, 4, 6), held_out: float = 0.25) -> Path:
    """Write a dataset of two sizes; batches of two and, where a size has an odd number of images, of one."""
    text = "batch_size = 2\nenable_bucket = true\nmin_bucket_reso = 32\nbucket_reso_steps = 16\n"
    dataset = write_dataset(folder, text=text + f"validation_split = {held_out}\nvalidation_seed = 1")
    for i in wide:
        with Image.open(folder / f"images/{i}.png") as image:
            image.resize((96, 48)).save(folder / f"images/{i}.png")
    return dataset


def write_captions(folder: Path) -> Path:
    """Write a dataset whose batches are padded."""
    dataset = write_dataset(folder, 4, text="batch_size = 2")
    (folder / "images/2.txt").write_text("a disc" + ", plain" * 9)
    return dataset


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=NEEDS_DEEPSPEED if name.startswith("zero") else ()) for name in CASES],
)
def runs(
    request: pytest.FixtureRequest,
    base: Path,
    place: Path,
    clean: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    """Every case of a layout; and ``there`` and ``back``, which change between the layouts at step 2."""
    layout, folder = request.param, tmp_path_factory.mktemp(request.param)
    held_out = "batch_size = 1\nvalidation_split = 0.25\nvalidation_seed = 1"
    write_data: dict[str, Callable[[Path], Path]] = {
        "images": lambda path: write_dataset(path, text=held_out),
        "sizes": write_sizes,
        "captions": write_captions,
        "spoilt": lambda path: spoilt(clean, path, math.nan),
        "large": lambda path: spoilt(clean, path, 1e30),
    }
    cases = CASES[layout]
    datasets = {name: write_data[name](folder / "data" / name) for name in {case.data for case in cases.values()}}
    models = {"base": base}
    for name in {case.model for case in cases.values()} & MODELS.keys():
        models[name] = MODELS[name](folder / "models" / name)
    prompts = folder / "prompts.txt"
    prompts.write_text("a red disc --w 64 --h 64 --s 2 --d 1\n")
    jobs: list[Job] = []
    for name, case in cases.items():
        if case.model not in models:
            chat_run(place, folder / f"{name}_one", case.model, **case.settings)
            flags = chat_flags(place, folder / name, case.model, **case.settings | case.two)
            jobs.append((name, train_chat, (flags,)))
            continue
        model, data = models[case.model], datasets[case.data]
        settings = case.settings | ({"sample_prompts": prompts} if name == "whole" else {})
        if not case.refused:
            run(model, data, folder / f"{name}_one", **settings)
        jobs.append((name, train_flags, (arguments(model, data, folder / name, **settings | case.two),)))
    whole, state = cases["whole"], "lora-step00000002-state"
    settings = whole.settings | {"sample_prompts": prompts}
    resumed = settings | whole.two | {"resume": folder / "whole_one" / state}
    jobs.append(("there", train_flags, (arguments(base, datasets[whole.data], folder / "there", **resumed),)))
    messages = run_in_group(jobs, folder)
    for name, message in messages.items():
        expected = cases[name].refused if name in cases else ""
        assert expected in message if expected else message == "", name
    run(base, datasets[whole.data], folder / "back", **settings, resume=folder / "whole" / state)
    return Runs(layout, folder, SAME_IN_FP32.get(layout, OTHER_LAYOUTS))


def test_two_processes_equal_one(runs: Runs) -> None:
    one, two = runs.pair("whole")
    expected = metrics(one)
    levels = sorted({key for line in expected for key in line if "/sigma_" in key})
    assert len(levels) > 3
    rel = 1e-5 if runs.layout in SAME_IN_FP32 else 1e-4
    assert_same_metrics(expected, metrics(two), ("loss", "val_loss", "grad_norm", "sigma_mean", *levels), rel=rel)
    assert largest_difference(lora(two), lora(one)) < runs.within
    samples = [sorted(path.name for path in (folder / "samples").iterdir()) for folder in (one, two)]
    assert samples[0] == samples[1]
    for name in (name for name in samples[0] if name.startswith("step")):
        pictures = [np.asarray(Image.open(folder / "samples" / name), dtype=int) for folder in (one, two)]
        assert np.abs(pictures[0] - pictures[1]).max() <= 1  # rounding to eight bits
    if runs.layout == "shard":
        assert_speed_and_memory_of_each_process(runs)


def test_a_run_goes_on_under_another_layout(runs: Runs) -> None:
    expected = lora(runs.folder / "whole_one")
    for name in ("there", "back"):
        assert largest_difference(lora(runs.folder / name), expected) < runs.within, name
    assert largest_difference(lora(runs.folder / "whole_one", "lora-step00000002"), expected) > 10 * runs.within


def test_other_bases_optimizers_and_families_equal_one_process_too(runs: Runs) -> None:
    for name, case in CASES[runs.layout].items():
        if name in ("whole", "chat") or case.refused:
            continue
        one, two = runs.pair(name)
        assert largest_difference(lora(two), lora(one)) < runs.within, name
        assert_same_metrics(metrics(one), metrics(two), ("loss", "updates_dropped"), rel=1e-4)
        if name == "nan":
            assert any(line.get("updates_dropped") for line in metrics(two))
            assert finite(lora(two))
    if "chat" in CASES[runs.layout]:
        one, two = runs.pair("chat")
        assert largest_difference(adapter(two / "lora"), adapter(one / "lora")) < runs.within
        answer = "samples/step000003.txt"
        assert (two / answer).read_text() == (one / answer).read_text()
        assert_same_metrics(metrics(one), metrics(two), ("loss", "loss_tokens"), rel=1e-5)
        if runs.layout == "tp":
            assert_same_metrics(metrics(one), metrics(two), ("grad_norm",), rel=1e-6)


@pytest.mark.slow
def test_further_families_as_pipelines_equal_one_process(tmp_path: Path) -> None:
    data, jobs = write_captions(tmp_path / "data"), list[Job]()
    for name, case in FURTHER.items():
        model = MODELS[name](tmp_path / "models" / name)
        run(model, data, tmp_path / f"{name}_one", **case.settings)
        jobs.append((name, train_flags, (arguments(model, data, tmp_path / name, **case.settings | case.two),)))
    assert run_in_group(jobs, tmp_path) == dict.fromkeys(FURTHER, "")
    for name in FURTHER:
        assert largest_difference(lora(tmp_path / name), lora(tmp_path / f"{name}_one")) < SAME_IN_FP32["pp"], name
        assert_same_metrics(metrics(tmp_path / f"{name}_one"), metrics(tmp_path / name), ("loss",), rel=1e-4)


def assert_speed_and_memory_of_each_process(runs: Runs) -> None:
    kinds = ("samples_per_s", "s_per_it", "data_wait_s", "peak_mem_bytes")
    for folder, ranks in zip(runs.pair("whole"), ([], ["0", "1"]), strict=True):
        trained = [line for line in metrics(folder) if "loss" in line]
        for line in trained:
            assert [key for key in line if "/" in key and key.split("/")[0] in kinds] == [
                f"{kind}/{rank}" for kind in kinds for rank in ranks
            ]
    # four batches of one image a step, of which each process has two; they wait for each other in every step
    line = trained[-1]
    assert line["samples_per_s"] * line["s_per_it"] == pytest.approx(4)
    assert all(line[f"samples_per_s/{r}"] * line[f"s_per_it/{r}"] == pytest.approx(2) for r in ranks)
    assert line["s_per_it/0"] == line["s_per_it"]
    assert line["s_per_it/1"] == pytest.approx(line["s_per_it/0"], rel=0.5)
    assert line["peak_mem_bytes/1"] > 2**20


ONE_STEP: Settings = {  # from B = 0 a plain step of length one leaves the gradient in the file as B, but for its sign
    "max_train_steps": 1,
    "optimizer_type": "SGD",
    "learning_rate": 1.0,
    "max_grad_norm": 0.0,
    "train_batch_size": 1,
}
KINDS: dict[str, Settings] = {"plain": {}, "joined": {"network_args": ["split_qkv=False"], "save_format": "kohya"}}
SPLIT: dict[str, Settings] = {"ddp": {}, "shard": {"shard": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}}
SPLIT |= {f"zero{stage}": {"zero": stage} for stage in STAGES if DEEPSPEED}
ALONE: dict[str, Settings] = {
    "checkpointing": {"gradient_checkpointing": True},
    "compiled": {"torch_compile": True, "dynamo_backend": "eager"},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_has_the_gradients_of_one_process(base: Path, tmp_path: Path, kind: str) -> None:
    """Of a LoRA for each layer, and of one LoRA for the joined layers of q, k and v."""
    images, settings = write_dataset(tmp_path / "images"), ONE_STEP | KINDS[kind]
    for name, options in {"one": {}, **ALONE}.items():
        run(base, images, tmp_path / name, **settings, **options, gradient_accumulation_steps=2)
    jobs: list[Job] = []
    for name, options in SPLIT.items():
        steps = 2 if {"tp", "pp"} & options.keys() else 1
        flags = arguments(base, images, tmp_path / name, **settings, **options, gradient_accumulation_steps=steps)
        jobs.append((name, train_flags, (flags,)))
    assert run_in_group(jobs, tmp_path) == dict.fromkeys(SPLIT, "")
    one = {key: tensor for key, tensor in lora(tmp_path / "one").items() if "lora_up" in key or "lora_B" in key}
    assert max(float(tensor.abs().max()) for tensor in one.values()) > 0
    for name in (*SPLIT, *ALONE):
        found = lora(tmp_path / name)
        for key, gradient in one.items():  # 1e-6 of the norm was measured
            assert (found[key] - gradient).norm() <= 1e-5 * gradient.norm(), (name, key)


@pytest.mark.slow
def test_replicas_of_a_split_model_equal_one_process(base: Path, place: Path, tmp_path: Path) -> None:
    """Four processes: two pipelines, or two pairs that share the layers."""
    (tmp_path / "prompts.txt").write_text("a red disc --w 64 --h 64 --s 2 --d 1\n")
    # an even number of batches, two to a step
    data = {"pp": write_sizes(tmp_path / "sizes", (1, 3, 4, 6), 0.0)}
    data["tp"] = write_dataset(tmp_path / "images", text="batch_size = 1")
    chat = CASES["tp"]["chat"].settings
    chat_run(place, tmp_path / "chat_one", **chat)
    jobs: list[Job] = []
    for name, more in (("pp", {"dp": 2}), ("tp", {"fp8_scaled": True, "max_train_steps": 2})):
        case = CASES[name]["whole"]
        settings = case.settings | {"sample_prompts": tmp_path / "prompts.txt"} | more
        run(base, data[name], tmp_path / f"{name}_one", **settings | {"dp": None})
        four = settings | case.two | {"gradient_accumulation_steps": 1}
        jobs.append((name, train_flags, (arguments(base, data[name], tmp_path / name, **four),)))
    four = chat | {"tp": 2, "gradient_accumulation_steps": 1}
    jobs.append(("chat", train_chat, (chat_flags(place, tmp_path / "chat", **four),)))
    assert run_in_group(jobs, tmp_path, processes=4) == dict.fromkeys(("pp", "tp", "chat"), "")
    for name in ("pp", "tp", "chat"):
        one, found = tmp_path / f"{name}_one", tmp_path / name
        assert_same_metrics(metrics(one), metrics(found), ("loss", "grad_norm"), rel=1e-5)
        pair = [adapter(folder / "lora") if name == "chat" else lora(folder) for folder in (found, one)]
        assert largest_difference(*pair) < SAME_IN_FP32["tp"], name
    answers = [(tmp_path / name / "samples/step000003.txt").read_text() for name in ("chat", "chat_one")]
    assert answers[0] == answers[1]


def test_gradients_of_split_runs_are_means_over_processes(tmp_path: Path) -> None:
    assert run_in_group([("shared", average, (tmp_path,))], tmp_path) == {"shared": ""}
    first, second = (torch.load(tmp_path / f"gradients{rank}.pt") for rank in range(2))
    assert torch.equal(first[0], torch.tensor([1.5, 3.0]))  # the mean of (1, 2) and of (2, 4)
    assert torch.equal(first[1], torch.tensor([[0.5]]))  # of 1 and none
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def average(folder: Path) -> None:
    from library.accelerator import build_accelerator
    from library.config.run_schema import AccelerateConfig, LoggingConfig, SavingConfig
    from library.config.schema import TrainingConfig
    from library.training.parallel.gradients import average_gradients

    saving, parallel = SavingConfig(output_dir=str(folder)), ParallelConfig(shard=2)
    accelerator = build_accelerator(
        AccelerateConfig(), TrainingConfig(mixed_precision="no"), saving, LoggingConfig(), parallel
    )
    rank = accelerator.process_index
    trained = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1, 1))]
    trained[0].grad = torch.tensor([1.0, 2.0]) * (rank + 1)
    trained[1].grad = torch.ones(1, 1) if rank == 0 else None
    average_gradients(accelerator, trained)
    torch.save([parameter.grad for parameter in trained], folder / f"gradients{rank}.pt")


def zero(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs DeepSpeed."""
    for mark in NEEDS_DEEPSPEED:
        test = mark(test)
    return test


def train_and_weigh(flags: list[str], file: Path) -> None:
    """Train, and write how many bytes of frozen weights and of the optimizer's tensors this process has."""
    done = train(load_config(flags)).task
    frozen = [p for p in done.transformer.parameters() if not p.requires_grad]
    weights = sum((p.numel() + getattr(p, "ds_tensor", torch.empty(0)).numel()) * p.element_size() for p in frozen)
    states = done.engine.optimizer.optimizer.state.values()
    tensors = [*done.engine.optimizer.shards, *(tensor for state in states for tensor in state.values())]
    file.write_text(json.dumps([weights, sum(tensor.numel() * 4 for tensor in tensors)]))


@zero
def test_each_process_of_zero_has_a_half(base: Path, dataset: Path, tmp_path: Path) -> None:
    """Of AdamW's moments and of the fp32 weights that it updates, and in stage 3 of the base."""
    jobs: list[Job] = []
    for stage in STAGES:
        settings: Settings = {"max_train_steps": 1, "mixed_precision": "bf16", "zero": stage}
        flags = arguments(base, dataset, tmp_path / f"zero{stage}", **settings)
        jobs.append((f"zero{stage}", train_and_weigh, (flags, tmp_path / f"{stage}.json")))
    assert run_in_group(jobs, tmp_path) == {name: "" for name, _, _ in jobs}
    one = run(base, dataset, tmp_path / "one", max_train_steps=1, mixed_precision="bf16").task
    whole = sum(p.nbytes for p in one.transformer.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in one.engine.parameters)
    for stage in STAGES:
        weights, optimizer = json.loads((tmp_path / f"{stage}.json").read_text())
        assert optimizer == pytest.approx(trained * 12 / 2, rel=2e-3)  # a step counter, and padding to even parts
        if stage < 3:
            assert weights == whole
        else:  # what is as small as a LoRA stays whole beside the part; most of this base's layers are not
            assert whole / 2 < weights < 0.75 * whole


@zero
def test_three_processes_of_zero_have_padded_parts(base: Path, tmp_path: Path) -> None:
    """Three divide few sizes: behind the last part there are zeros, which neither weights nor states may get."""
    images = write_dataset(tmp_path / "images", images=6, text="batch_size = 1")
    settings: Settings = {"network_dim": 1, "save_every_n_steps": 2, "save_state": True}
    settings |= {"network_args": ["loraplus_lr_ratio=4"]}
    one = settings | {"gradient_accumulation_steps": 3}
    run(base, images, tmp_path / "one", **one)
    states = {name: tmp_path / name / "lora-step00000002-state" for name in ("one", "zero1", "zero3")}
    jobs: list[Job] = []
    for name, stage, state in (("zero1", 1, None), ("zero3", 3, None), ("there", 3, "one"), ("across", 3, "zero1")):
        flags = arguments(base, images, tmp_path / name, **settings, zero=stage, resume=state and states[state])
        jobs.append((name, train_flags, (flags,)))
    assert run_in_group(jobs, tmp_path, 3) == {name: "" for name, _, _ in jobs}
    for stage in (1, 3):
        run(base, images, tmp_path / f"back{stage}", **one, resume=states[f"zero{stage}"])
    for name in ("zero1", "zero3", "there", "across", "back1", "back3"):
        assert largest_difference(lora(tmp_path / name), lora(tmp_path / "one")) < OTHER_LAYOUTS, name


@pytest.mark.skipif(DEEPSPEED, reason="DeepSpeed is installed")
def test_without_deepspeed_the_error_names_the_command_that_installs_it() -> None:
    with pytest.raises(UserError, match="pip install .* -r requirements/zero.txt") as caught:
        require_deepspeed()
    assert "\n" not in str(caught.value)


def test_zero_on_one_process_is_refused(base: Path, tmp_path: Path) -> None:
    images = write_dataset(tmp_path / "images", images=2)
    with pytest.raises(UserError, match="zero = 2 .* several processes; start with torchrun"):
        run(base, images, tmp_path / "out", zero=2)
    assert torch.distributed.is_initialized() is False
