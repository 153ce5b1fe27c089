"""``preserve = "prior"``: a step beside other trainers' definitions; whole runs: what stays, is painted, measured."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from library.config.schema import FlowConfig, ModelConfig, NetworkConfig
from library.data.batches import Batch
from library.data.file_index import FileIndex, list_folder
from library.data.sources import is_image
from library.errors import UserError
from library.models.family import Family
from library.models.family_by_name import model_family
from library.training.flow import noise_for, sample_sigmas
from library.training.tasks.image_step import FlowStep
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.parity.peft_lora import fill_up
from tests.runs import (
    arguments,
    assert_same_metrics,
    largest_difference,
    lora,
    metrics,
    pipeline_forward,
    run,
    train_flags,
    write_dataset,
)
from tests.targets import FLUX_TARGETS
from tests.tiny import tiny_flux_inputs
from tests.worker_group import run_in_group

PAINTED = "a ring, grey --s 2\na line, white --w 64 --h 32 --s 2 --d 7\n"
GENERAL = "a bow, brown --s 2\na cloud, grey --s 2\n"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """A dataset with a trigger word and prompt files, as settings of a run."""
    text = 'batch_size = 2\nvalidation_split = 0.25\nvalidation_seed = 1\ntrigger_word = "disc"'
    dataset = write_dataset(tmp_path / "data", text=text)
    for name, prompts in (("kept", PAINTED), ("general", GENERAL)):
        (tmp_path / f"{name}.txt").write_text(prompts)
    return {
        "dataset_config": dataset,
        "preserve": "prior",
        "preserve_prompts": tmp_path / "kept.txt",
        "general_prompts": tmp_path / "general.txt",
        "cache_directory": tmp_path / "cache",
        "sample_at_end": False,
    }


def painted(cache: Path) -> list[Path]:
    return sorted(cache.glob("painted/*/*.png"))


def measured(output: Path) -> dict[int, tuple[float, float]]:
    """Return by step what was learnt and what was changed elsewhere."""
    found = [line for line in metrics(output) if "val_loss" in line]
    return {line["step"]: (line["val_loss"], line["val_prior_loss"]) for line in found}


def damage_some(folder: Path) -> list[str]:
    """Put damaged files of several formats among good ones; return their names."""
    image = Image.effect_noise((96, 96), 40).convert("RGB")
    for suffix in ("png", "jpg", "webp"):
        image.save(path := folder / f"cut.{suffix}")
        path = path.rename(folder / f"cut_{suffix}.{suffix}")
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    (folder / "empty.png").write_bytes(b"")
    names = ["cut_jpg.jpg", "cut_png.png", "cut_webp.webp", "empty.png"]
    for name in names:
        (folder / name).with_suffix(".txt").write_text("a disc")
    return names


@pytest.mark.parametrize("preserve", ["prior", "none"])
@pytest.mark.parametrize("is_known", [False, True])  # whether an earlier version has hashed the contents
def test_all_damaged_images_are_named_before_anything_is_painted_or_encoded(
    base: Path, files: dict[str, Any], tmp_path: Path, preserve: str, is_known: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    names, dataset = damage_some(tmp_path / "data/images"), files.pop("dataset_config")
    files["cache_directory"].mkdir()
    if is_known:
        for name in (names.pop(), names.pop()):  # no version knows a file whose header it cannot read
            (tmp_path / "data/images" / name).unlink()
        index = FileIndex(files["cache_directory"])
        for path in (tmp_path / "data/images").iterdir():
            os.utime(path, ns=(10**18, 10**18))
        for name, stats in list_folder(tmp_path / "data/images").items():
            known = [index.image(f"{tmp_path}/data/images/{name}", stats)] if is_image(name) else []
            index.measure(known)
            index.hash_contents(known)
        index.save()
    if preserve == "none":
        files |= {"preserve": "none", "preserve_prompts": None, "general_prompts": "none"}
    files["caption_command"] = f"{sys.executable} -c 'import sys; sys.exit(3)' {{image}}"  # and before it is run
    sorted((tmp_path / "data/images").glob("*.txt"))[0].unlink()
    with pytest.raises(UserError) as caught:
        run(base, dataset, tmp_path / "out", **files)
    said = str(caught.value).splitlines()
    assert sorted(Path(line.partition(": ")[0]).name for line in said) == sorted(names)
    assert all("replace or remove it" in line for line in said)
    assert not list(files["cache_directory"].rglob("*.safetensors")) + painted(files["cache_directory"])
    assert "generating images from prompts" not in capsys.readouterr().out


def test_an_image_that_was_decoded_once_is_not_decoded_at_the_next_start(
    base: Path, files: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = {"max_train_steps": 1, "preserve": "none", "preserve_prompts": None, "general_prompts": "none"}
    dataset, settings = files.pop("dataset_config"), files | once
    for path in (tmp_path / "data/images").iterdir():  # a file just written is not remembered
        os.utime(path, ns=(10**18, 10**18))
    run(base, dataset, tmp_path / "one", **settings)
    assert "checking images: 8 of 8" in capsys.readouterr().out
    run(base, dataset, tmp_path / "two", **settings)
    assert "checking images" not in capsys.readouterr().out


def said_and_done(out: str, cache: Path) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return step -> how many the list says, how many were counted, and how many files there are now."""
    listed, counted_to = out.partition("before the first step:")[2].partition("dataset 1:")[0], {}
    said = {name: int(number) for name, number in re.findall(r"^  ([a-z ]+): (\d+) ", listed, re.M)}
    for name, number in re.findall(r"^([a-z ]+): (\d+) of \2$", out, re.M):
        counted_to[name] = int(number)
    there = {
        "generating images from prompts": len(painted(cache)),
        "encoding images": len([*cache.glob("latents/*")]),
    }
    return said, counted_to, there | {"encoding captions": len([*cache.glob("text/*")])}


def test_the_list_of_what_is_done_before_the_first_step_is_what_is_done_then(
    base: Path, files: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, cache = files.pop("dataset_config"), files["cache_directory"]
    files |= {"max_train_steps": 1, "sample_at_first": True, "sample_prompts": tmp_path / "general.txt"}
    run(base, dataset, tmp_path / "one", **files)
    said, done, there = said_and_done(out := capsys.readouterr().out, cache)
    assert {**said, "sampling": 0} == {**there, "sampling": 0}
    assert all(done[name] == number for name, number in there.items())
    assert there["generating images from prompts"] == 4
    assert out.index("checking images: 8 of 8") < out.index("before the first step:") < out.index("prompts: 0 of 4")
    assert "preserve: 40% of the samples" in out
    painted(cache)[0].unlink()
    next(cache.glob("latents/*")).unlink()
    run(base, dataset, tmp_path / "two", **files)
    said, done, again = said_and_done(capsys.readouterr().out, cache)
    assert again == there
    assert said["generating images from prompts"] == done["generating images from prompts"] == 1
    run(base, dataset, tmp_path / "three", **files)
    said, done, again = said_and_done(out := capsys.readouterr().out, cache)
    assert (said["encoding images"], said["encoding captions"], again) == (0, 0, there)
    assert "encoding" not in "".join(done)
    assert "generating images from prompts" not in out
    assert not [*tmp_path.rglob(".preparing.json")]


def test_an_empty_caption_is_found_before_anything_is_painted(
    base: Path, files: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = sorted((tmp_path / "data").rglob("*.png"))[-1]
    image.with_suffix(".txt").write_text(" ")
    with pytest.raises(UserError, match=image.stem):
        run(base, files.pop("dataset_config"), tmp_path / "out", **files)
    assert painted(tmp_path / "cache") == []
    assert "generating images from prompts" not in capsys.readouterr().out


def test_small_shared_memory_is_told_and_nobody_waits_in_it(
    base: Path, files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """As in Docker, whose /dev/shm has 64 MB: the loader's workers wait for ever where it is full."""
    free, dataset = [10_000], files["dataset_config"]
    ask = shutil.disk_usage
    of_shared = lambda path: ask(path)._replace(free=free[0]) if str(path) == "/dev/shm" else ask(path)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", of_shared)
    settings = {"max_train_steps": 1, "max_data_loader_n_workers": 2, "sample_at_end": False}
    small = run(base, dataset, tmp_path / "small", **settings)
    said = capsys.readouterr().out
    assert "/dev/shm has 0 MiB free, and 2 workers need" in said
    assert "batches are loaded without workers (in Docker: --shm-size=2g)" in said
    free[0] = 2**40
    large = run(base, dataset, tmp_path / "large", **settings)
    assert "/dev/shm" not in capsys.readouterr().out
    assert [each.task.loader.loader.num_workers for each in (small, large)] == [0, 2]
    # where others fill it meanwhile
    fill = lambda number: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # noqa: E731
    monkeypatch.setattr("library.training.tasks.image_lora.ignore_signals", fill)
    with pytest.raises(UserError, match=r"does not fit into shared memory .*set max_data_loader_n_workers = 0"):
        run(base, dataset, tmp_path / "filled", **settings)


def test_the_velocity_on_prompts_without_the_trigger_stays_the_bases(
    base: Path, files: dict[str, Any], tmp_path: Path
) -> None:
    """Without the feature the answers elsewhere move about as far as with no preservation."""
    steps = {"max_train_steps": 20, "learning_rate": 6e-3, "validate_every_n_steps": 20}
    plain = files | {"preserve": "none", "preserve_prompts": None}
    run(base, output=tmp_path / "plain", dataset=plain.pop("dataset_config"), **plain, **steps)
    kept = files | {"preserve_class": "ring", "preserve_share": 0.6}
    run(base, output=tmp_path / "kept", dataset=kept.pop("dataset_config"), **kept, **steps)
    without, with_it = measured(tmp_path / "plain"), measured(tmp_path / "kept")
    assert without[0][1] == with_it[0][1] == 0.0
    assert with_it[20][1] < 0.5 * without[20][1]
    assert with_it[20][0] < with_it[0][0]  # and something was learnt


@pytest.mark.parametrize("sample", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_images_are_painted_once_and_what_is_missing_again_bit_by_bit(
    base: Path, files: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], sample: bool
) -> None:
    dataset, files["max_train_steps"] = files.pop("dataset_config"), 2
    run(base, dataset, tmp_path / "one", **files)
    images = painted(tmp_path / "cache")
    assert sorted(Image.open(path).size for path in images) == [(64, 32), (64, 64), (64, 64), (64, 64)]
    contents = {path: path.read_bytes() for path in images}
    assert all(
        Image.open(path).info["prompt"].startswith(path.with_suffix(".txt").read_text().strip()) for path in images
    )
    assert "generating" in capsys.readouterr().out
    captions = {path: path.with_suffix(".txt").read_text() for path in images}
    for name, damage in DAMAGES.items():
        if (name in SAMPLE) != sample:
            continue
        kept = {path: path.stat().st_mtime_ns for path in images if path != images[1]}
        damage(images[1], images[2])
        run(base, dataset, tmp_path / name, **files)
        assert {path: path.read_bytes() for path in painted(tmp_path / "cache")} == contents, name
        assert {path: path.with_suffix(".txt").read_text() for path in images} == captions
        assert {path: path.stat().st_mtime_ns for path in kept} == kept
        assert largest_difference(lora(tmp_path / "one"), lora(tmp_path / name)) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert (f"not as they were made, and made again: {images[1].stem}." in said) is (name != "gone")
        assert ("generating" in said) is (not name.startswith("caption"))


def put(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


SAMPLE = {"gone", "flipped at its end", "caption", "caption is a pipe", "record is a folder"}
DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "gone": lambda path, _: path.unlink(),  # as if the run had been killed while it was painted
    "flipped": lambda path, _: flip(path, path.stat().st_size // 2),
    "flipped at its end": lambda path, _: flip(path, -1),
    "cut off": lambda path, _: path.write_bytes(path.read_bytes()[:-40]),
    "empty": lambda path, _: path.write_bytes(b""),
    "another": lambda path, other: shutil.copy(other, path),
    "caption": lambda path, _: path.with_suffix(".txt").write_text("a disc\n"),
    "caption is a folder": lambda path, _: put(path.with_suffix(".txt"), os.mkdir),
    "caption is a pipe": lambda path, _: put(path.with_suffix(".txt"), os.mkfifo),
    "folder": lambda path, _: put(path, os.mkdir),
    "record is a folder": lambda path, _: put(path.with_name(f".{path.stem}.json"), os.mkdir),
}


class AllPainted(Exception):
    """Ends a run before it encodes anything."""


def painted_all(_: object) -> None:
    raise AllPainted


def test_pictures_are_painted_by_what_paints_them_now(
    base: Path, files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change of what pictures follow from is other pictures; another prompt is one more. Nothing is trained."""
    pipeline = shutil.copytree(base, tmp_path / "base")
    dataset = files.pop("dataset_config")
    samples, sizes = tmp_path / "samples.txt", Path(dataset)
    samples.write_text("a disc --s 2")
    sizes.write_text(sizes.read_text().replace("validation_split = 0.25\nvalidation_seed = 1\n", ""))
    files |= {"sample_prompts": samples, "preserve_directions": 0}
    monkeypatch.setattr("library.training.tasks.image_lora.ImageLora.cache", painted_all)
    shift = pipeline / "scheduler/scheduler_config.json"
    changes: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "sampler": lambda: shift.write_text(json.dumps(json.loads(shift.read_text()) | {"shift": 5.0})),
        "guidance": lambda: samples.write_text("a disc --s 2 --g 2"),
        "seed": lambda: files.update(seed=8),
        "precision": lambda: files.update(mixed_precision="bf16"),
        "base's dtype": lambda: files.update(base_dtype="bf16"),
        "size": lambda: sizes.write_text(sizes.read_text().replace("resolution = 64", "resolution = 96")),
        "prompt": lambda: Path(files["general_prompts"]).write_text(GENERAL + "a hat --s 2\n"),
    }
    found = list[int]()
    for name, change in changes.items():
        change()
        with pytest.raises(AllPainted):
            run(pipeline, dataset, tmp_path / name, **files)
        found.append(len(painted(tmp_path / "cache")))
    of_each = [found[0], *(after - before for before, after in itertools.pairwise(found))]
    own = {"seed": found[0] - 1, "size": found[0] - 1, "prompt": 1}  # a prompt of the four has its own of both
    assert dict(zip(changes, of_each, strict=True)) == dict.fromkeys(changes, 4) | own


def test_the_sheet_of_general_prompts_has_the_bases_image_beside_the_loras(
    base: Path, files: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = files.pop("dataset_config")
    run(base, dataset, tmp_path / "one", **files | {"sample_at_end": True}, learning_rate=0.05)
    before = [
        path
        for path in painted(tmp_path / "cache")
        if path.with_suffix(".txt").read_text() in GENERAL.replace(" --s 2", "")
    ]
    after = sorted((tmp_path / "one/samples/general").glob("step000004_*.png"))
    assert len(before) == len(after) == 2
    assert all(
        Image.open(one).tobytes() != Image.open(other).tobytes() for one, other in zip(before, after, strict=True)
    )
    sheet = Image.open(tmp_path / "one/samples/general/before_after.png")
    assert sheet.width > 2 * 256
    assert "general, before_after" in capsys.readouterr().out


def test_a_resumed_run_gives_the_same_lora(base: Path, files: dict[str, Any], tmp_path: Path) -> None:
    dataset = files.pop("dataset_config")
    often = {"save_every_n_steps": 2, "save_state": True, "max_train_steps": 4, "validate_every_n_steps": 2}
    kept = files | {"preserve_class": "ring", "preserve_blank": True}
    run(base, dataset, tmp_path / "one", **kept, **often)
    run(base, dataset, tmp_path / "two", **kept, **often, resume=tmp_path / "one/lora-step00000002-state")
    assert largest_difference(lora(tmp_path / "one"), lora(tmp_path / "two")) == 0
    assert measured(tmp_path / "one")[4] == measured(tmp_path / "two")[4]


def test_alone_preserve_paints_general_prompts_and_regularisation_images_need_none(
    base: Path, files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = tmp_path / "general.toml"
    short.write_text('preserve_prompts = ["a ring"]\ngeneral_prompts = ["a bow"]\n')
    monkeypatch.setattr("library.training.sampling.painting.GENERAL", short)
    dataset, cache = files["dataset_config"], tmp_path / "cache"
    alone = {"preserve": "prior", "cache_directory": cache, "sample_at_end": False, "max_train_steps": 1}
    events = run(base, dataset, tmp_path / "one", **alone)
    assert sorted(path.with_suffix(".txt").read_text() for path in painted(cache)) == ["a bow\n", "a ring\n"]
    assert {sample.caption for sample in events.task.data.train.samples if sample.settings.is_reg} == {"a ring"}
    events = run(base, dataset, tmp_path / "two", **alone, preserve_class="ring", general_prompts="none")
    assert not any(sample.settings.is_reg for sample in events.task.data.train.samples)
    assert events.task.data.general is None


def test_text_encoders_in_training_are_switched_off_too(base: Path, files: dict[str, Any], tmp_path: Path) -> None:
    dataset, files["general_prompts"] = files.pop("dataset_config"), "none"
    events = run(base, dataset, tmp_path / "one", **files, text_encoder_lr=[0.05], max_train_steps=3)
    task = events.task
    encoders = task.step.text_encoders.eval()
    plain = run(base, dataset, tmp_path / "two", **files, text_encoder_lr=[1e-9], max_train_steps=1)
    with torch.no_grad(), task.network.bypassed():
        bypassed = encoders(["a ring"])["pooled_prompt_embeds"]
    with torch.no_grad():
        trained, fresh = (
            each(["a ring"])["pooled_prompt_embeds"] for each in (encoders, plain.task.step.text_encoders.eval())
        )
    torch.testing.assert_close(bypassed, fresh, rtol=1e-5, atol=1e-5)
    assert (trained - fresh).abs().max() > 1e-3


LAYOUTS = [{}, {"shard": 2}, {"tp": 2, "gradient_accumulation_steps": 2}]
DEEPSPEED = pytest.mark.skipif(not find_spec("deepspeed"), reason="DeepSpeed is not installed (make test-zero)")


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUTS[0],
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS[1:]),
        *(pytest.param({"zero": stage, "network_dim": 1}, marks=(pytest.mark.slow, DEEPSPEED)) for stage in (2, 3)),
    ],
    ids=["ddp", "shard", "tp", "zero-2", "zero-3"],
)
def test_two_processes_equal_one(base: Path, files: dict[str, Any], tmp_path: Path, layout: dict[str, int]) -> None:
    """Where weights are gathered, a process without a sample that preserves must run the model with the others."""
    dataset = files.pop("dataset_config")
    dataset.write_text(dataset.read_text().replace("batch_size = 2", "batch_size = 1"))
    kept = files | {"preserve_class": "ring", "preserve_share": 0.4, "validate_every_n_steps": 2}
    steps = {"max_train_steps": 5, "learning_rate": 1e-3}
    if layout:  # takes no directions
        kept["preserve_directions"] = 0
    one = {key: value for key, value in layout.items() if key == "network_dim"}
    run(base, dataset, tmp_path / "one", **kept, **steps, **one | {"gradient_accumulation_steps": 2})
    job = ("two", train_flags, (arguments(base, dataset, tmp_path / "two", **kept, **steps, **layout),))
    assert run_in_group([job], tmp_path) == {"two": ""}
    keys = ("loss", "val_loss", "val_prior_loss", "grad_norm")
    # AdamW's first steps have the gradient's sign: entries near zero may go either way (tests/training/parallel)
    assert_same_metrics(metrics(tmp_path / "one"), metrics(tmp_path / "two"), keys, rel=2e-3)


def test_prompts_that_are_trained_on_are_no_measure(
    base: Path, files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="general_prompts: 'a line, white' is one of preserve_prompts too"):
        run(base, files.pop("dataset_config"), tmp_path / "out", **files | {"general_prompts": "kept.txt"})


FLOW = FlowConfig(timestep_sampling="flux_shift", guidance_scale=3.5)
SEED, STEP = 9, 11
# fp32 on both sides: rounding of sums in another order, relative to the largest value
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def family(base: Path) -> Family:
    return model_family(ModelConfig(pretrained_model_name_or_path=str(base)))


def with_lora(family: Family, **options: object) -> tuple[torch.nn.Module, AdapterNetwork]:
    transformer = family.load_transformer(torch.float32)
    parsed = parse_network_args(NetworkConfig(network_dim=4, network_alpha=3.0, **options), FLUX_TARGETS)
    return transformer.train(), fill_up(inject_adapter(transformer, parsed, FLUX_TARGETS, seed=0, dtype=torch.float32))


def batch_of(ids: list[int], prior: list[bool], masks: Tensor | None = None) -> Batch:
    """Samples of these ids; those of one id have the same latents, and those that preserve another caption."""
    inputs = tiny_flux_inputs(batch=3)
    rows = [ids.index(each) for each in ids]
    text = {k: inputs[k][rows].clone() for k in ("prompt_embeds", "pooled_prompt_embeds")}
    for tensor in text.values():
        tensor[torch.tensor(prior)] *= -0.5
    return Batch(inputs["latents"][rows], text, torch.ones(len(ids)), masks, ids, prior=prior)


class Written:
    """The quantities of a step by diffusers' own transformer and formulas; the LoRA is merged into a second one."""

    def __init__(self, base: Path, network: AdapterNetwork, batch: Batch) -> None:
        self.plain = FluxTransformer2DModel.from_pretrained(base, subfolder="transformer")
        trained = FluxTransformer2DModel.from_pretrained(base, subfolder="transformer")
        for name, weights in network.weights().items():
            layer = trained.get_submodule(name)
            layer.weight.data = weights.apply(layer.weight.data.float(), 1.0)
        noise = noise_for(batch.latents, batch.sample_ids, SEED, STEP)
        sigmas = sample_sigmas(FLOW, batch.sample_ids, 16, SEED, STEP)
        noisy = torch.lerp(batch.latents, noise, sigmas.view(-1, 1, 1, 1))
        with torch.no_grad():
            self.v = pipeline_forward(trained, noisy, sigmas, batch.text, guidance=3.5).double()
            self.v_0 = pipeline_forward(self.plain, noisy, sigmas, batch.text, guidance=3.5).double()
        self.target = (noise - batch.latents).double()


def test_marked_samples_learn_what_sd_scripts_and_onetrainer_put_in_the_targets_place(
    base: Path, family: Family
) -> None:
    transformer, network = with_lora(family)
    batch = batch_of([5, 6, 7], [False, True, False])
    loss, _ = FlowStep(family, FLOW, SEED, network=network).loss(transformer, batch, STEP)

    each = Written(base, network, batch)
    each.target[[1]] = each.v_0[[1]]  # diff_output_preservation of sd-scripts, PRIOR_PREDICTION of OneTrainer
    torch.testing.assert_close(loss.double(), (each.v - each.target).square().mean(), **CLOSE)


def test_a_class_caption_beside_each_sample_is_twice_ai_toolkits_loss(base: Path, family: Family) -> None:
    transformer, network = with_lora(family)
    batch = batch_of([5, 6, 7, 5, 6, 7], [False] * 3 + [True] * 3)  # the same noise and noise levels: by the ids
    loss, _ = FlowStep(family, FLOW, SEED, network=network).loss(transformer, batch, STEP)

    each = Written(base, network, batch)
    taught, kept = slice(0, 3), slice(3, 6)
    normal = (each.v[taught] - each.target[taught]).square().mean()
    preservation = (each.v[kept] - each.v_0[kept]).square().mean()
    torch.testing.assert_close(2 * loss.double(), normal + preservation, **CLOSE)


def test_outside_of_the_mask_the_loss_is_onetrainers_masked_prior_preservation(base: Path, family: Family) -> None:
    transformer, network = with_lora(family)
    mask = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    batch, flow = batch_of([5, 6, 7], [False] * 3, mask), FLOW.model_copy(update={"masked_loss": True})
    loss, _ = FlowStep(family, flow, SEED, network=network, outside_mask=0.4).loss(transformer, batch, STEP)

    each = Written(base, network, batch)
    losses = (each.v - each.target).square() * mask
    prior_losses = (each.v - each.v_0).square() * (1 - mask) * 0.4
    torch.testing.assert_close(loss.double(), (losses + prior_losses).mean(), **CLOSE)


def test_the_frozen_answer_is_a_constant_to_the_gradient(base: Path, family: Family) -> None:
    transformer, network = with_lora(family)
    batch = batch_of([5, 6, 7], [True] * 3)
    FlowStep(family, FLOW, SEED, network=network).loss(transformer, batch, STEP)[0].backward()
    ours = {
        name: parameter.grad.clone() for name, parameter in transformer.named_parameters() if parameter.requires_grad
    }

    transformer.zero_grad()
    noise = noise_for(batch.latents, batch.sample_ids, SEED, STEP)
    sigmas = sample_sigmas(FLOW, batch.sample_ids, 16, SEED, STEP)
    noisy = torch.lerp(batch.latents, noise, sigmas.view(-1, 1, 1, 1))
    constant = Written(base, network, batch).v_0.float()
    velocity = pipeline_forward(transformer, noisy, sigmas, batch.text, guidance=3.5)
    (velocity - constant).square().mean().backward()
    largest = max(gradient.abs().max() for gradient in ours.values())
    assert largest > 0
    for name, parameter in transformer.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-5 * float(largest))


KINDS = {
    "lora": {},
    "joined qkv": {"network_args": ["split_qkv=False"]},
    "pissa": {"init_lora_weights": "pissa"},
    "dropout": {"network_dropout": 0.5},
    "dora": {"network_type": "dora"},
    "lokr": {"network_type": "lokr"},
    "loha": {"network_type": "loha"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_bypassed_every_kind_of_adapter_is_the_untouched_model(family: Family, kind: str) -> None:
    transformer = family.load_transformer(torch.float32).train()
    parsed = parse_network_args(NetworkConfig(**({"network_dim": 4} | KINDS[kind])), FLUX_TARGETS)
    network = inject_adapter(transformer, parsed, FLUX_TARGETS, seed=0, dtype=torch.float32)
    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    inputs = tiny_flux_inputs(batch=3)
    arguments = inputs.pop("latents"), inputs.pop("sigmas"), inputs
    with torch.no_grad():
        plain = pipeline_forward(family.load_transformer(torch.float32), *arguments)
        with network.bypassed():
            bypassed = pipeline_forward(transformer, *arguments)
        changed = pipeline_forward(transformer, *arguments)
    torch.testing.assert_close(bypassed, plain, rtol=0, atol=1e-6 * float(plain.abs().max()))
    assert (changed - plain).abs().max() > 0.05 * plain.abs().max()


def test_the_change_elsewhere_is_the_growth_of_the_squared_error_on_what_the_model_paints(
    base: Path, family: Family
) -> None:
    transformer, network = with_lora(family)
    batch = batch_of([5, 6, 7], [False] * 3)
    step = FlowStep(family, FLOW, SEED, network=network)
    with torch.no_grad():
        found = step.prior_losses(transformer.eval(), batch, [0.2, 0.8])
    expected = []
    for sigma in (0.2, 0.8):
        noise = noise_for(batch.latents, batch.sample_ids, "validation", round(sigma * 1e6))
        noisy, sigmas = torch.lerp(batch.latents, noise, sigma), torch.full((3,), sigma)
        with torch.no_grad():
            v = pipeline_forward(transformer, noisy, sigmas, batch.text, guidance=3.5)
            plain = FluxTransformer2DModel.from_pretrained(base, subfolder="transformer")
            v_0 = pipeline_forward(plain, noisy, sigmas, batch.text, guidance=3.5)
        expected.append((v - v_0).double().square().mean(dim=(1, 2, 3)))
        # E|v - (v_0 + e)|^2 - E|e|^2 = |v - v_0|^2 for an error e of mean zero: the claim of the docstring, by numbers
        e = torch.randn(4000, *v.shape[1:], generator=torch.Generator().manual_seed(0)).double()
        e = e - e.mean(dim=0)
        growth = ((v - v_0)[0].double() - e).square().mean() - e.square().mean()
        torch.testing.assert_close(growth, expected[-1][0], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.double(), torch.cat(expected), **CLOSE)


def test_a_lora_learns_least_in_the_directions_that_general_images_use(
    base: Path, files: dict[str, Any], tmp_path: Path
) -> None:
    """Measured anew, in diffusers' model: what the file changes of general inputs, beside a run without directions."""
    dataset, shared = files.pop("dataset_config"), {**files, "max_train_steps": 8, "learning_rate": 1e-2}
    shares = {}
    for directions in (0, 32):
        out = tmp_path / str(directions)
        run(base, dataset, out, **shared, preserve_directions=directions)
        weights = load_file(out / "lora.safetensors")
        model, seen = FluxTransformer2DModel.from_pretrained(base / "transformer"), dict[str, Tensor]()

        def note(name: str, layer: object, args: tuple[Tensor], seen: dict[str, Tensor] = seen) -> None:
            rows = args[0].detach().flatten(0, -2)
            seen[name] = seen.get(name, torch.zeros(())) + rows.t() @ rows

        for name, layer in model.named_modules():
            if f"transformer.{name}.lora_A.weight" in weights:
                layer.register_forward_pre_hook(partial(note, name))
        for seed in range(4):
            inputs = tiny_flux_inputs(seed=seed)
            pipeline_forward(model, inputs.pop("latents"), inputs.pop("sigmas"), inputs)
        # |A x|^2 over |A|^2 |x|^2: what of A lies along the inputs
        read = []
        for name, moment in seen.items():
            down = weights[f"transformer.{name}.lora_A.weight"]
            read.append(float((down @ moment * down).sum() / (down.square().sum() * moment.trace())))
        shares[directions] = sum(read) / len(read)
    assert shares[32] < 0.5 * shares[0]


def test_what_preserves_weighs_two_and_keeps_directions_unless_it_is_said(
    base: Path, files: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, short = files.pop("dataset_config"), {"max_train_steps": 1, "preserve_share": 0.1}
    files["general_prompts"] = "none"
    cases: dict[str, tuple[dict[str, Any], tuple[float, int]]] = {
        "unset": ({}, (2.0, 32)),
        "set": ({"prior_loss_weight": 1.0, "preserve_directions": 7}, (1.0, 7)),
        "lokr": ({"network_type": "lokr", "save_format": "comfy"}, (2.0, 0)),
    }
    for name, (given, expected) in cases.items():
        config = run(base, dataset, tmp_path / name, **files, **short, **given).task.plan.config
        assert (config.training.prior_loss_weight, config.preservation.preserve_directions) == expected, name
        assert ("note: preserve_directions = 0: they are kept" in capsys.readouterr().out) == (name == "lokr")
    with pytest.raises(UserError, match="preserve_directions: they are kept out of A, which only lora and dora have"):
        run(
            base,
            dataset,
            tmp_path / "refused",
            **files,
            **short,
            network_type="lokr",
            save_format="comfy",
            preserve_directions=8,
        )


def test_a_state_without_directions_goes_on_with_new_ones_and_one_with_them_without(
    base: Path, files: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, often = files.pop("dataset_config"), {"max_train_steps": 2, "save_every_n_steps": 1, "save_state": True}
    none = {key: value for key, value in files.items() if key == "cache_directory"}
    run(base, dataset, tmp_path / "none", **none, **often)
    run(base, dataset, tmp_path / "prior", **files, **often)
    state = "lora-step00000001-state"
    capsys.readouterr()
    run(base, dataset, tmp_path / "on", **files, **often, resume=tmp_path / "none" / state)
    assert "measuring what general images use: 8 of 8" in capsys.readouterr().out
    run(base, dataset, tmp_path / "off", **none, **often, resume=tmp_path / "prior" / state)
    with pytest.raises(UserError, match="was trained with preserve_directions = 32, now it is 8"):
        run(
            base,
            dataset,
            tmp_path / "other",
            **files,
            **often,
            preserve_directions=8,
            resume=tmp_path / "prior" / state,
        )
