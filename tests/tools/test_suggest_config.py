"""tools/suggest_config.py: what it cites and counts is so, what it writes trains, what it lacks it asks for."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import toml
import torch
from accelerate.state import AcceleratorState
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as some
from peft.tuners.lokr.layer import factorization
from PIL import Image

from library.config import load_config
from library.config.model_types import IMAGE_MODELS, MODEL_TYPES
from library.config.published_models import Fit, PublishedModel, published_models
from library.config.schema import DatasetArguments
from library.data.captions import plain_caption
from library.data.config import load_dataset_config
from library.data.samples import scan
from library.errors import UserError
from library.models.family_by_name import family_class
from library.models.registry import lora_targets
from library.training.memory.budget import GIB
from library.training.sampling.prompts import read_prompts
from library.training.suggestion import (
    Answers,
    choose_memory,
    find_model_type,
    presets,
    remarks,
    suggest,
    summarise_dataset,
)
from networks.files.readers import READERS, formats_for
from networks.options import parse_network_args
from tests.curves import without_curves
from tests.runs import ROOT, call, refusal, train_flags
from tests.tiny import save_single_files
from tests.tiny_flux2 import tiny_flux2_pipeline
from tools import suggest_config

TABLES = tomllib.loads((ROOT / "library/config/presets.toml").read_text())
IMAGES = "assets/demo_dataset/images"
STYLE = ["--kind", "style", "--model", "assets/tiny-flux", "--images", IMAGES, "--gpu_memory", "cpu"]
SUBJECT = ["--kind", "subject", *STYLE[2:], "--trigger_word", "zorbo", "--class_word", "creature"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def write(words: list[str], folder: Path) -> Path:
    """Run the tool in this process; return the folder that it wrote."""
    call(suggest_config, *words, "--save_to", folder)
    return folder


def trained(folder: Path) -> Path:
    """Train three steps as the configuration says, the pictures aside; return the LoRA's file."""
    AcceleratorState._reset_state(reset_partial_state=True)
    config = load_config(["--config_file", str(folder / "config.toml")])
    written = folder / "config.toml"
    written.write_text(re.sub(r"(?: --w \d+ --h \d+)? --d ", " --w 128 --h 128 --s 2 --d ", written.read_text()))
    with without_curves():
        train_flags(["--config_file", str(folder / "config.toml"), "--max_train_steps", "3",
                     "--output_dir", str(folder / "output"),
                     "--sample_every_n_steps", "2", "--max_data_loader_n_workers", "0"])  # fmt: skip
    assert (folder / "output" / "metrics.jsonl").read_text().count('"loss"') >= 3
    assert config.saving.output_dir == f"output/{folder.name}"  # where the page looks for runs
    return folder / "output" / f"{config.saving.output_name}.safetensors"


# ---- the tables


def rows() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for table in ("presets", "lokr"):
        for group, keys in TABLES[table].items():
            for key, row in keys.items():
                if isinstance(row, dict):
                    yield group, key, row


def numbers(text: str) -> set[float]:
    return {float(found) for found in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text)}


IN_OTHER_WORDS = {
    ("z_image", "network_alpha"): "equal to `rank`",
    ("ernie_image", "network_alpha"): "equal to rank",
    ("all", "bucket_no_upscale"): "never upscaled",
    ("all", "class_tokens"): "a photo of",
}


def test_every_value_stands_in_the_preset_that_it_cites(subtests: pytest.Subtests) -> None:
    """Trainer, file and the words there: the words hold the value. Ours are the sizes of references (configs/)."""
    for group, key, row in rows():
        with subtests.test(f"{group}: {key}"):
            if "source" not in row:
                if key in ("timestep_sampling", "save_format"):  # "auto" is the model's own; of LoKr: see below
                    continue
                assert key in ("control_resolution", "no_resize_control")
                path = re.search(r"configs/[\w/]+\.toml", TABLES["presets"][group]["control_resolution"]["note"])
                assert path is not None
                assert toml.load(ROOT / path[0])["datasets"][0][key] == row["value"]
                continue
            for trainer, file, says in (row["source"], *row.get("others", ())):
                assert trainer in TABLES["read"]
                assert re.search(r"\.(md|yaml|json|py|tsx?)$", file)
                assert says.strip()
            says, value = row["source"][2], row["value"]
            if words := IN_OTHER_WORDS.get((group, key)):
                assert words in says
            elif key == "sample_cfg" and "one less" in row.get("note", ""):
                assert {value - 1, value} & numbers(says)
            elif isinstance(value, str):
                assert value.lower() in says.lower()
            elif isinstance(value, bool):
                assert str(value).lower() in says.lower()
            elif key == "network_args":  # full_matrix is the trainers' lokr_full_rank, or has its name
                assert numbers(value[1]) <= numbers(says)
                assert re.search('full_(rank|matrix)"?: true', says)
            else:
                assert set(value if isinstance(value, list) else [value]) <= numbers(says)


def test_every_family_has_values_and_says_where_they_are_only_the_nearest_familys(subtests: pytest.Subtests) -> None:
    for model_type in IMAGE_MODELS:
        with subtests.test(model_type):
            values = presets(model_type)
            keys = "network_dim network_alpha learning_rate max_train_steps timestep_sampling discrete_flow_shift"
            assert set(keys.split()) <= values.keys()
            assert ("guidance_scale" in values) == MODEL_TYPES[model_type].takes_guidance
            assert values["network_alpha"][0] == values["network_dim"][0]
            borrowed = "no trainer publishes" in values["network_dim"][1]
            assert borrowed == (model_type in ("flux_fill", "flux3_klein", "flux3_klein_edit"))
            assert "no trainer" not in values["optimizer_type"][1]  # of all families
            folder = getattr(diffusers, MODEL_TYPES[model_type].pipeline).__module__.split(".")[2]
            assert f"/{folder}/" in values["sample_steps"][1]


def memory_rows(model_type: str) -> list[dict[str, Any]]:
    return [row for row in TABLES["memory"] if model_type in row["models"]]


def test_counted_memory_is_that_of_the_ready_configurations(subtests: pytest.Subtests) -> None:
    """Without flags the file's own head says it; the settings are the file's with the flags."""
    for row in TABLES["memory"]:
        with subtests.test(row["count"]):
            name, *flags = row["count"].split()
            text = (ROOT / name).read_text()
            config = load_config(["--config_file", str(ROOT / name), *flags])
            said = re.search(r"Takes ([\d.]+) GiB", text)
            assert said is not None
            if not flags:
                assert row["gib"] == float(said[1])
                assert config.model.model_type in row["models"]
            given = {**config.precision.model_dump(), **config.training.model_dump()}
            used = {key: given[key] for key in ("fp8_scaled", "fp8_text_encoder", "blocks_to_swap") if given[key]}
            assert row["settings"] == used
            assert given["gradient_checkpointing"]
            rank, alpha = (presets(row["models"][0])[key][0] for key in ("network_dim", "network_alpha"))
            assert (config.network.network_dim, config.network.network_alpha) == (rank, alpha)


def test_what_a_lokr_takes_beyond_a_lora_is_counted_from_the_published_layers(subtests: pytest.Subtests) -> None:
    """Weight, gradient and two moments in fp32 of w1 and w2, whose sides multiply to the layer's, and 0.6 GiB."""
    names = ["flux", "flux2_dev", "flux2_klein", "flux3_klein_edit", "qwen_image", "qwen_image_21", "z_image", "krea2"]
    for model_type, size in [*((name, "") for name in [*names, "ernie_image"] if name != "flux2_klein"),
                             ("flux2_klein", "4b"), ("flux2_klein", "9b")]:  # fmt: skip
        with subtests.test(f"{model_type} {size}"):
            family, targets = family_class(model_type), lora_targets()[model_type]
            arguments, _ = family.published_like(f"klein-base-{size}" if size else "")
            with torch.device("meta"):
                model = family.build(arguments)
            groups = [(targets.group_of(name), module) for name, module in model.named_modules()]
            layers = [m for group, m in groups if group and group.default and isinstance(m, torch.nn.Linear)]
            rank, factor = presets(model_type)["network_dim"][0], presets(f"lokr/{model_type}")["network_args"][0][1]
            parameters = 0
            for layer in layers:
                (a, b), (c, d) = (factorization(n, int(factor[7:])) for n in (layer.in_features, layer.out_features))
                small, large = min(a, b) * min(c, d), max(a, b) * max(c, d)
                parameters += small + large - rank * (layer.in_features + layer.out_features)
            key = f"{MODEL_TYPES[model_type].title} {size}".strip()
            assert TABLES["lokr_more"][key] == pytest.approx(parameters * 16 / GIB + 0.6, abs=0.06)


def test_a_larger_card_is_never_told_to_save_more(subtests: pytest.Subtests) -> None:
    for model_type in IMAGE_MODELS:
        with subtests.test(model_type):
            for size in ("4b", "9b"):
                of_size = [row["gib"] for row in memory_rows(model_type) if row.get("size", size) == size]
                assert of_size
                assert of_size == sorted(of_size, reverse=True)
            assert choose_memory(model_type, "m", {}, 200 * GIB).gib == memory_rows(model_type)[0]["gib"]


# ---- what is written


@pytest.mark.parametrize("model_type", IMAGE_MODELS)
def test_a_lokr_is_suggested_as_published(model_type: str, tmp_path: Path) -> None:
    """Full matrices, the LoKr's own rate (Krea 2's LoRA has three times that), a layout that ComfyUI reads."""
    conditioning = family_class(model_type).conditioning
    kind, controls = ("edit", tmp_path / "before") if conditioning == "references" else ("style", None)
    shutil.copytree(IMAGES, tmp_path / "before")
    given = Answers(kind, "m", model_type, {}, Path(IMAGES), controls, None, None, 48 * GIB, tmp_path, "lokr")
    for name, text in suggest(given, summarise_dataset(given), choose_memory(model_type, "m", {}, 48 * GIB)).items():
        (tmp_path / name).write_text(text)
    config = load_config(["--config_file", str(tmp_path / "config.toml")])
    targets = lora_targets()[model_type]
    options = parse_network_args(config.network, targets)
    assert (options.kind, options.full_matrix, options.factor) == ("lokr", True, 4 if "flux2" in model_type else
                                                                  4 if "flux3" in model_type else 8)  # fmt: skip
    unset = load_config(["--model_type", model_type, "--pretrained_model_name_or_path", "m", "--dataset_config", "d",
                         "--network_type", "lokr", "--save_format", "comfy"])  # fmt: skip
    assert config.optimizer.learning_rate == unset.optimizer.learning_rate == 1e-4
    names = options.trained_layers(targets, {"transformer"})
    comfy = next(reader for reader in READERS if reader.name == "ComfyUI")
    read = formats_for(comfy, names, targets, "lokr")
    assert config.saving.save_format in read or not read  # FLUX.3's none reads
    if conditioning == "none":
        assert "network_dim =" not in (tmp_path / "config.toml").read_text()


@pytest.mark.parametrize("model_type", IMAGE_MODELS)
@pytest.mark.parametrize("gib", [None, 48])
def test_what_is_written_for_every_family_passes_the_rules(model_type: str, gib: int | None, tmp_path: Path) -> None:
    conditioning = family_class(model_type).conditioning
    kind, controls = ("edit", tmp_path / "before") if conditioning == "references" else ("style", None)
    shutil.copytree(IMAGES, tmp_path / "before")
    memory = None if gib is None else gib * GIB
    given = Answers(kind, "m", model_type, {}, Path(IMAGES), controls, None, None, memory, tmp_path)
    files = suggest(given, summarise_dataset(given), choose_memory(model_type, "m", {}, memory))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    config = load_config(["--config_file", str(tmp_path / "config.toml")])
    values = presets(model_type)
    assert config.optimizer.learning_rate == values["learning_rate"][0]
    assert config.network.network_dim == values["network_dim"][0]
    assert config.flow.timestep_sampling == values["timestep_sampling"][0]
    assert config.training.gradient_checkpointing == (gib is not None)
    prompts = config.sampling.sample_prompts
    assert prompts is None if conditioning == "fill" else len(read_prompts(prompts, 0, 16)) == 3
    assert files.keys() == {"config.toml", "dataset.toml"}
    dataset = toml.loads(files["dataset.toml"])["datasets"][0]
    assert dataset["resolution"] == 512  # the least that ai-toolkit trains at; its images have 128
    assert len(summarise_dataset(given).samples) == 16


# of the distilled models' cards, by the beginning of the name on the hub; what they write of Z-Image-Turbo: "9, this
# actually results in 8 DiT forwards"
STEPS = {"FLUX.1-schnell": 4, "FLUX.2-klein-": 4, "Qwen-Image-2.1-Turbo": 8, "Z-Image-Turbo": 8, "Krea-2-Turbo": 8,
         "ERNIE-Image-Turbo": 8}  # fmt: skip
PUBLISHED = [(row, name) for row in published_models() for name in row.model_types]


@pytest.mark.parametrize(("row", "model_type"), PUBLISHED, ids=lambda one: getattr(one, "name", one))
def test_what_is_written_for_every_published_model_is_so(row: PublishedModel, model_type: str, tmp_path: Path) -> None:
    """Steps, guidance, size: as the model's own card says, and as its dataset has them."""
    conditioning = MODEL_TYPES[model_type].conditioning
    kind, controls = ("edit", tmp_path) if conditioning == "references" else ("style", None)
    given = Answers(kind, row.hub, model_type, {}, Path(IMAGES), controls, None, None, None, tmp_path)
    if row.has_own_layers:
        with pytest.raises(UserError, match=f"cannot be trained; train {row.train_on}"):
            remarks(given)
        return
    found = summarise_dataset(Answers("style", "m", "flux", {}, Path(IMAGES), None, None, None, None, tmp_path))
    files = suggest(given, found, Fit())
    config, dataset = (tomllib.loads(files[name]) for name in ("config.toml", "dataset.toml"))
    text = " ".join(files["config.toml"].replace("\n#", " ").split())
    of_card = [steps for name, steps in STEPS.items() if row.name.startswith(name) and "base" not in row.name]
    assert bool(of_card) == row.is_distilled or row.train_on
    if "sampling" in config:
        (steps,) = of_card or [presets(model_type)["sample_steps"][0]]
        values = {} if of_card else presets(model_type)
        guided = [values[key][0] for key in ("sample_guidance", "sample_cfg") if key in values]
        guidance = f"guidance {guided[0]}" if guided else "no guidance"
        assert f"Samples have 512 x 512 pixels, {steps} steps and {guidance}, unless" in text
        assert ("\n# sample_model = " in files["config.toml"]) == bool(row.sample_model or row.train_on)
    assert dataset["datasets"][0]["resolution"] == 512
    assert ("distilled" in text.partition("pretrained_model")[0]) == bool(row.train_on)


@pytest.mark.slow
def test_a_style_trains_as_it_is_written(tmp_path: Path) -> None:
    folder = write(STYLE, tmp_path / "my style")
    assert trained(folder).is_file()
    assert list((folder / "output").rglob("*.png"))  # pictures of the first step on


def test_a_subject_is_preserved_and_called_by_its_word(tmp_path: Path, capsys: Capture) -> None:
    folder = write(SUBJECT, tmp_path)
    # 16 prompts to train on and 8 to measure by; the steps of the family's table, by the guidance input in one pass
    steps = presets(toml.load(folder / "config.toml")["model"]["model_type"])["sample_steps"][0]
    work = f"24 images of 512 x 512, {24 * steps:,} passes of the model; once for this base"
    said = f"generating images from prompts: {work}"
    assert said in capsys.readouterr().out
    assert said in (folder / "config.toml").read_text()
    written = toml.load(folder / "config.toml")
    assert written["preservation"] == {"preserve": "prior", "preserve_class": "creature", "preserve_prompts": "general"}
    assert toml.load(folder / "dataset.toml")["datasets"][0]["subsets"][0]["trigger_word"] == "zorbo"
    assert written["sampling"]["sample_prompts"][0].startswith("a photo of zorbo creature --w 128 --h 128 --d 1")
    style = toml.load(write(STYLE, tmp_path / "style") / "config.toml")
    assert "preservation" not in style


@pytest.mark.slow
def test_edits_train_as_they_are_written_and_show_their_references(tmp_path: Path) -> None:
    model = tiny_flux2_pipeline(tmp_path / "model")
    for folder, shade in (("before", 60), ("after", 200)):
        (tmp_path / folder).mkdir()
        for i in range(20):
            Image.new("RGB", (64, 64), (shade, 10 * i, 0)).save(tmp_path / folder / f"{i}.png")
            (tmp_path / folder / f"{i}.txt").write_text("make it bright")
    words = ["--kind", "edit", "--model", str(model), "--images", str(tmp_path / "after"),
             "--control_directory", str(tmp_path / "before"), "--gpu_memory", "cpu"]  # fmt: skip
    folder = write(words, tmp_path / "my_edit")
    written = toml.load(folder / "config.toml")
    assert written["model"]["model_type"] == "flux2_klein_edit"
    assert toml.load(folder / "dataset.toml")["datasets"][0]["validation_split"] == "auto"  # 2 of 20
    assert f"--ci {tmp_path / 'before'}" in written["sampling"]["sample_prompts"][0]
    assert trained(folder).is_file()


def test_a_dataset_toml_is_kept(tmp_path: Path) -> None:
    dataset = "assets/demo_dataset/dataset.toml"
    words = ["--kind", "style", "--model", "assets/tiny-flux", "--images", dataset, "--gpu_memory", "8"]
    folder = write(words, tmp_path / "kept")
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml"]
    config = load_config(["--config_file", str(folder / "config.toml")])
    assert config.dataset.dataset_config == dataset
    assert config.validation.validate_every_n_steps == 250  # it holds images out
    assert config.precision.fp8_text_encoder
    assert not config.training.blocks_to_swap  # of a model with fewer blocks than that nothing is swapped


def test_missing_captions_are_made_of_the_words_or_by_a_command(tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(IMAGES, tmp_path / "images", ignore=shutil.ignore_patterns("*.txt"))
    swapped = [str(tmp_path / "images") if word == IMAGES else word for word in SUBJECT]
    folder = write(swapped, tmp_path / "subject")
    subset = toml.load(folder / "dataset.toml")["datasets"][0]["subsets"][0]
    assert subset["class_tokens"] == "a photo of zorbo creature"
    swapped = [str(tmp_path / "images") if word == IMAGES else word for word in STYLE]
    folder = write(swapped, tmp_path / "style")
    assert toml.load(folder / "dataset.toml")["datasets"][0]["subsets"][0]["class_tokens"] == ""  # trained without
    assert '\n# caption_command = "my_captioner {image}"\n' in (folder / "config.toml").read_text()
    command = f"python tools/caption_images.py {tmp_path / 'images'} --model Qwen/Qwen3-VL-2B-Instruct"
    assert f"\n#     {command}\n" in (folder / "config.toml").read_text()
    assert f"16 without a caption; write them, or run: {command}\n" in capsys.readouterr().out


ENDINGS = (".txt", ".caption", ".cap", ".CAPTION", None)


@for_all(some.lists(some.sampled_from(ENDINGS), min_size=1, max_size=7), some.integers(0, 3), some.booleans())
@settings(max_examples=25, deadline=None)
def test_no_caption_is_taken_for_missing_and_what_is_left_out_is_named(
    tmp_path_factory: pytest.TempPathFactory, endings: list[str | None], inside: int, is_subject: bool
) -> None:
    """The captions written are those that the dataset reads, or the tool names the files; none is replaced."""
    folder, words = tmp_path_factory.mktemp("any"), ("zorbo", "man") if is_subject else (None, None)
    (folder / "sub").mkdir()
    for number, ending in enumerate(endings):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(folder / f"{number}.png")
        if ending:
            (folder / f"{number}{ending}").write_text(f"caption {number}")
    for number in range(inside):
        Image.new("RGB", (64, 64)).save(folder / "sub" / f"in{number}.png")
    (folder / "v.mp4").write_bytes(b"x")
    kind: Any = "subject" if is_subject else "style"
    given = Answers(kind, "m", "flux", {}, folder, None, *words, None, folder / "out")
    found = summarise_dataset(given)
    said, written = "\n".join(found.notes), suggest(given, found, Fit())["dataset.toml"]
    (folder / "dataset.toml").write_text(written)
    config = load_dataset_config(folder / "dataset.toml", DatasetArguments(dataset_config="d"))
    assert scan(config, 0, 16).warnings  # the same that the tool says, from the same place
    trained = {sample.caption for sample in scan(config, 0, 16).listed}
    captioned = [number for number, ending in enumerate(endings) if ending]
    unread = [number for number in captioned if f"caption {number}" not in trained]
    assert len(unread) == found.other_captions
    assert f"{len(unread) + 1} file" in said
    assert "v.mp4" in said
    has_none = not any(endings)  # which training refuses unless it is told so
    assert ("class_tokens" in written) == (has_none or (is_subject and not unread and None in endings))
    assert found.without_caption == endings.count(None)
    assert (f"{inside} image" in said) == bool(inside)
    assert "dataset.toml" not in said


@pytest.mark.parametrize("form", ["folder", "toml"])
@pytest.mark.parametrize("words", [SUBJECT, [*STYLE, "--trigger_word", "zorbo"]])
def test_marks_for_the_trigger_word_are_taken_with_the_word(
    words: list[str], form: str, tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(IMAGES, tmp_path / "images")
    for path in (tmp_path / "images").glob("*.txt"):
        path.write_text("[trigger] in a garden")
    table = "[[datasets]]\nresolution = 128\n[[datasets.subsets]]\nimage_dir = 'images'\ncaption_extension = '.txt'\n"
    (tmp_path / "x.toml").write_text(table)
    images = tmp_path / ("images" if form == "folder" else "x.toml")
    folder = write([str(images) if word == IMAGES else word for word in words], tmp_path / "out")
    assert "trigger word 'zorbo' in every caption" in capsys.readouterr().out
    dataset = load_config(["--config_file", str(folder / "config.toml")]).dataset
    assert dataset.dataset_config is not None
    listed = scan(load_dataset_config(dataset.dataset_config, dataset), 0, 16).listed
    assert {plain_caption(sample.caption, sample.settings) for sample in listed} == {"zorbo in a garden"}


# ---- the model and the card


@pytest.mark.parametrize(
    ("model", "kind", "model_type"),
    [
        ("black-forest-labs/FLUX.1-dev", "style", "flux"),
        ("black-forest-labs/FLUX.2-klein-base-9B", "edit", "flux2_klein_edit"),
        ("Qwen/Qwen-Image-Edit-2511", "edit", "qwen_image_edit_plus"),
        ("assets/tiny-flux", "subject", "flux"),
        ("assets/tiny-flux", "edit", "flux_kontext"),
        ("assets/tiny-flux-fill", "style", "flux_fill"),
    ],
)
def test_the_family_is_told_by_the_model_and_the_kind(model: str, kind: Any, model_type: str) -> None:
    assert find_model_type(model, kind)[0] == model_type


MODELS = [*(row.hub for row in published_models()), "assets/tiny-flux", "assets/tiny-flux-fill"]


@pytest.mark.parametrize("kind", ["subject", "edit"])
@pytest.mark.parametrize("given", [None, *IMAGE_MODELS])
def test_a_remedy_that_is_followed_is_not_refused(given: str | None, kind: Any) -> None:
    """Whatever model and words: each option that the message names has another value than was given, and it helps."""
    for model in MODELS:
        remedy = ""
        try:
            find_model_type(model, kind, given)
        except UserError as error:
            remedy = str(error).partition("; ")[2]
        kinds = re.findall(r"--kind (\w+)", remedy) or [kind]
        types = [None] * ("leave" in remedy) + re.findall(r"set --model_type (\w+)", remedy)
        assert not remedy or kinds != [kind] or types
        assert given is None or given not in types
        for one in types or [given]:
            find_model_type(model, kinds[0], one)


def test_a_size_is_told_by_the_name_or_by_the_width_of_its_texts() -> None:
    """Klein 9B does not fit where 4B does."""
    nine = {"joint_attention_dim": 12288}  # as published: https://huggingface.co/black-forest-labs/FLUX.2-klein-9B
    assert "9b" in choose_memory("flux2_klein", "klein-9B.safetensors", {}, 10 * GIB).count
    assert "9b" in choose_memory("flux2_klein", "mine.safetensors", nine, 10 * GIB).count
    assert "4b" in choose_memory("flux2_klein", "mine.safetensors", {}, 10 * GIB).count


def test_a_card_that_is_too_small_is_told_what_would_do() -> None:
    least = min(row["gib"] for row in memory_rows("flux2_klein"))
    with pytest.raises(UserError, match=rf"--gpu_memory 4: flux takes at least 6.5 GiB .*flux2_klein takes {least}"):
        choose_memory("flux", "m", {}, 4 * GIB)


def test_a_single_file_wants_its_parts(tmp_path: Path) -> None:
    files = save_single_files(ROOT / "assets/tiny-flux", tmp_path / "single")
    words = ["--kind", "style", "--model", str(files.transformer), *STYLE[4:], "--save_to", str(tmp_path / "out")]
    assert refusal(suggest_config, *words).startswith("error: --ae is missing")
    parts = ["--ae", str(files.ae), "--clip_l", str(files.clip_l), "--t5xxl", str(files.t5xxl)]
    folder = write([*words[:-2], *parts], tmp_path / "out")
    assert load_config(["--config_file", str(folder / "config.toml")]).model.t5xxl == str(files.t5xxl)


# ---- asking, and what is refused


def test_what_no_flag_says_is_asked_until_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter(["a dog", "style", "assets/tiny-flux", IMAGES, "much", "cpu"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: next(said))
    folder = write([], tmp_path / "asked")
    assert list(said) == []
    assert (folder / "config.toml").read_text() == (
        write(STYLE, tmp_path / "flags" / "asked") / "config.toml"
    ).read_text().replace(str(tmp_path / "flags"), str(tmp_path))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*STYLE[2:]], "--kind is missing"),
        ([*SUBJECT[:-2]], "--class_word is missing"),
        ([*STYLE, "--images", "no_such_folder"], "--images no_such_folder: does not exist"),
        ([*STYLE, "--images", "docs"], "; name one of them, or set recursive = true"),
        ([*STYLE, "--images", "README.md"], "--images README.md: is neither a folder nor a dataset TOML"),
        ([*SUBJECT, "--class_word", "Zorbo"], "--class_word Zorbo: holds the trigger word 'zorbo'"),
        (["--kind", "edit", *STYLE[2:], "--control_directory", "docs", "--model", "Qwen/Qwen-Image-Edit-2509"],
         "--images assets/demo_dataset/images: no control image in control_directory"),
        ([*STYLE, "--model", "assets/tiny-fluxx"], "assets/tiny-fluxx' does not exist; did you mean"),
        ([*STYLE, "--model", "somebody/FLUX"], "somebody/FLUX does not exist here"),
        ([*STYLE, "--model_type", "z_image"], "is flux or flux_kontext, not z_image; set --model_type flux"),
        ([*STYLE, "--class_word", "dog"], "--class_word: has no meaning for --kind style"),
        ([*STYLE, "--vae", "v"], "--vae: assets/tiny-flux takes none"),
        (["--kind", "edit", "--model", "krea/Krea-2-Raw"], "Krea-2-Raw is krea2, which is not for it; take --kind"),
        (["--kind", "edit", *STYLE[2:]], "--control_directory is missing"),
        (["--kind", "edit", *STYLE[2:], "--control_directory", "before"], "--control_directory before: does not exist"),
    ],
)  # fmt: skip
def test_what_is_missing_or_does_not_fit_is_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    assert said in refusal(suggest_config, *words, "--save_to", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_all_damaged_images_are_named_at_once(tmp_path: Path) -> None:
    for i in range(4):
        Image.effect_noise((64, 64), 50 + i).save(tmp_path / f"{i}.png")
    for i in (1, 3):
        (tmp_path / f"{i}.png").write_bytes((tmp_path / f"{i}.png").read_bytes()[: 2000 * (i - 1)])
    answers = Answers("style", str(ROOT / "assets/tiny-flux"), "flux", {}, tmp_path, None, None, None, None, tmp_path)
    with pytest.raises(UserError) as caught:
        summarise_dataset(answers)
    assert [line.partition(": ")[0] for line in str(caught.value).split("\n")] == [
        str(tmp_path / "1.png"),
        str(tmp_path / "3.png"),
    ]


def test_what_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    write(STYLE, tmp_path)
    (tmp_path / "config.toml").write_text("mine")
    assert f"{tmp_path / 'config.toml'}: exists" in refusal(suggest_config, *STYLE, "--save_to", tmp_path)
    assert (tmp_path / "config.toml").read_text() == "mine"
    write([*STYLE, "--overwrite"], tmp_path)
    assert (tmp_path / "config.toml").read_text() != "mine"


def test_of_a_distilled_model_the_base_is_named(tmp_path: Path, capsys: Capture) -> None:
    words = ["--kind", "style", "--model", "black-forest-labs/FLUX.2-klein-9B", "--images", IMAGES]
    write([*words, "--gpu_memory", "16"], tmp_path / "out")
    said = capsys.readouterr().out
    assert "distilled; train black-forest-labs/FLUX.2-klein-base-9B and use the LoRA on FLUX.2-klein-9B" in said
    assert "9b" in (tmp_path / "out/config.toml").read_text()
