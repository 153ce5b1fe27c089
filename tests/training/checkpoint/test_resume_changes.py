"""A resumed run names every setting and sample that has changed, and the next step has the new schedule's rate."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from PIL import Image
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from library.checksums import write_manifest
from library.config.load import load_for
from library.config.markers import EffectOnly, resume_keys
from library.config.scripts import LANGUAGE_LORA, LLM, LORA, Script, fields
from library.data.config import load_dataset_config
from library.data.samples import idle_parts
from library.errors import UserError
from library.files import discard
from library.training import run_inputs
from library.training.checkpoint.state import Position, read_inputs, read_position, save_training_state
from library.training.run_inputs import (
    ASPECTS,
    RunInputs,
    changes_since,
    dataset_settings,
    idle_options,
    sample_changes,
    settings_of,
)
from tests import chat_runs, pretraining_runs
from tests.runs import ROOT, lora, metrics, run, same, write_dataset
from tests.training.parallel.test_same_inputs import PARTS
from tools.prepare_text import parser, prepare

MODEL = ["--pretrained_model_name_or_path", "m"]
SCRIPTS: dict[str, tuple[Script[Any], list[str]]] = {
    "images": (LORA, [*MODEL, "--dataset_config", "d"]),
    "chats": (LANGUAGE_LORA, [*MODEL, "--model_type", "llama", "--train_data", "d.jsonl"]),
    "pretraining": (LLM, ["--data_dir", "d", "--preset", "llama-tiny"]),
}
# values of many types, of which a field takes those that fit
CANDIDATES: tuple[Any, ...] = (
    *(True, False, None, 0, 1, 2, 7, 0.25, 0.5, 3.5, "/one/place", "/other/place", "place", "words=1", "general"),
    *([], ["a=1"], ["/one/a", "/two/a"], ["b=2", "a=1"], [0.1], [1e-5, 2e-5], [0.0, 1e-5]),
)


def words_in(annotation: Any) -> list[str]:
    parts = get_args(annotation)
    return [part for part in parts if isinstance(part, str)] + [w for p in parts for w in words_in(p)]


def values_of(field: FieldInfo) -> list[Any]:
    """Return several values that the field takes."""
    words = words_in(field.annotation)
    taken, adapter = list[Any](), TypeAdapter[Any](field.annotation)  # type: ignore[arg-type]
    for value in [*words, *([word] for word in words), *CANDIDATES]:
        try:
            adapted = adapter.validate_python(value, strict=not isinstance(value, int))
        except ValidationError:
            continue
        taken += [adapted] if adapted not in taken else []
    return taken


@pytest.mark.parametrize("name", SCRIPTS)
def test_of_any_two_runs_that_differ_in_one_setting_the_resume_names_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_inputs, "version", lambda package: "1")
    script, flags = SCRIPTS[name]
    config, draw = load_for(script, flags), random.Random(0)
    for key, (section, field) in fields(script).items():
        values = values_of(field)
        assert len(values) > 1, f"{key}: no two values to try"
        for _ in range(3):
            before, after = draw.sample(values, 2)
            part = getattr(config, section)
            one, other = (
                config.model_copy(update={section: part.model_copy(update={key: value})}) for value in (before, after)
            )
            if resume_keys(one) != resume_keys(other):
                save_training_state(tmp_path / key, {"a": torch.ones(1)}, {}, Position(), "", resume_keys(one))
                with pytest.raises(UserError, match=f" {key} = .*, now it is"):
                    read_position(tmp_path / key, resume_keys(other))
                break
            saved = asdict(RunInputs(settings_of(one)))
            lines = changes_since(saved, RunInputs(settings_of(other)), other)
            if key == "resume":
                continue
            assert len(lines) == 1, (key, before, after, lines)
            assert re.fullmatch(rf"{key} .* -> .*", lines[0])
            if key != "sample_prompts":  # whose list may hold anything
                assert "/one" not in json.dumps(saved["settings"]), "a state shows nobody's folders"


def test_any_change_of_samples_is_counted() -> None:
    draw = random.Random(0)
    for _ in range(50):
        rows = {f"{i}.png": [draw.randrange(3) for _ in ASPECTS] for i in range(draw.randrange(1, 30))}
        now = {name: [v if draw.random() < 0.8 else v + 3 for v in row] for name, row in rows.items()}
        for name in [name for name in rows if draw.random() < 0.2]:
            del now[name]
        now |= {f"new{i}.png": [0] * len(ASPECTS) for i in range(draw.randrange(1, 4))}
        now |= {f"moved{name}": row for name, row in rows.items() if draw.random() < 0.2}
        now = dict(draw.sample([*now.items()], len(now))) if draw.random() < 0.5 else now
        before, after = RunInputs({}), RunInputs({})
        for inputs, samples in ((before, rows), (after, now)):
            for name, row in samples.items():
                inputs.add(name, row, name)
        lines = sample_changes(before.samples, after.samples, after.names)
        found = " ".join(re.sub(r"\(.*?\)", "", line) for line in lines)
        for column, word in enumerate(ASPECTS):
            count = sum(rows[name][column] != row[column] for name, row in now.items() if name in rows)
            assert re.findall(rf"(\d+) {word}s? changed", found) == ([str(count)] if count else [])
        kept = [[name for name in one if name in other] for one, other in ((rows, now), (now, rows))]
        moved = sum(one != other for one, other in zip(*kept, strict=True))
        assert re.findall(r"(\d+) images? in another order", found) == ([str(moved)] if moved else [])
        gone, new = ([one[name] for name in one if name not in other] for one, other in ((rows, now), (now, rows)))
        same = (Counter(map(tuple, gone)) & Counter(map(tuple, new))).total()
        for word, count in (("by another path", same), ("added", len(new) - same), ("removed", len(gone) - same)):
            assert re.findall(rf"(\d+) images? {word}", found) == ([str(count)] if count else [])


def test_packages_and_tables_that_only_one_of_the_two_runs_has_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, config = random.Random(0), load_for(LORA, SCRIPTS["images"][1])
    packages = [key for key in settings_of(config) if key.startswith("version of ") and not key.endswith(" tandem")]
    for _ in range(20):
        runs: list[tuple[RunInputs, set[str]]] = []
        for _ in range(2):
            has = {name for name in packages if draw.random() < 0.8}

            def version(package: str, has: set[str] = has) -> str:
                if f"version of {package}" not in has:
                    raise PackageNotFoundError(package)
                return "1.0"

            monkeypatch.setattr("library.training.run_inputs.version", version)
            counts, subset = [draw.randrange(1, 4) for _ in range(draw.randrange(1, 4))], "[[datasets.subsets]]\n"
            text = "".join("[[datasets]]\nresolution = 64\n" + f'{subset}image_dir = "."\n' * count for count in counts)
            (tmp_path / "d.toml").write_text(text)
            tables = dataset_settings(load_dataset_config(tmp_path / "d.toml", config.dataset))
            has |= {f"dataset {i}" for i in range(1, len(counts) + 1)}
            has |= {f"dataset {i}, subset {j}" for i, count in enumerate(counts, 1) for j in range(1, count + 1)}
            runs.append((RunInputs(settings_of(config) | tables), has))
        (before, had), (now, has) = runs
        came, went = '"not installed" -> "1.0"', '"1.0" -> "not installed"'
        wanted = {f"{each} {came if each in has else went}" for each in (has ^ had) & {*packages}}
        of_it = {each for each in (has ^ had) - {*packages} if each.partition(",")[0] in {each, *(has & had)}}
        wanted |= {f"{each} {'added' if each in has else 'removed'}" for each in of_it}
        assert sorted(changes_since(asdict(before), now, config)) == sorted(wanted)
        lacking = {key: value for key, value in before.settings.items() if "version of" not in key or "torch" in key}
        said = changes_since(asdict(before) | {"settings": lacking}, now, config)
        assert not any("version of" in line and "torch" not in line for line in said), "of an earlier version's state"


@pytest.mark.parametrize("at", [2, 4])
def test_conversations_in_another_order_are_told(at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = chat_runs.write_place(tmp_path)
    settings: dict[str, Any] = {"save_state": True, "gradient_accumulation_steps": 1}
    chat_runs.run(place, tmp_path / "out", **settings, max_train_steps=at)
    records = (place / "data.jsonl").read_text().splitlines()
    (place / "data.jsonl").write_text("\n".join(reversed(records)) + "\n")
    capsys.readouterr()
    chat_runs.run(place, tmp_path / "out", **settings, max_train_steps=6, resume="auto")
    said = capsys.readouterr().out
    assert "resume: dataset: 8 conversations in another order" in said
    line = "note: the samples of this epoch, or their order, have changed; the run goes on after 2 of its 4 batches"
    assert (line in said) == (at == 2), "within an epoch, not between two"


def add_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{m['role']}}: {{m['content']}}\n{% endfor %}")


def exchange_numbers(model: Path) -> None:
    """Two tokens of several letters take each other's number."""
    told = json.loads((model / "tokenizer.json").read_text())
    numbers = told["model"]["vocab"]
    one, other = sorted(numbers, key=numbers.__getitem__)[-2:]
    numbers[one], numbers[other] = numbers[other], numbers[one]
    (model / "tokenizer.json").write_text(json.dumps(told))


def drop_a_merge(model: Path) -> None:
    told = json.loads((model / "tokenizer.json").read_text())
    told["model"]["merges"].pop()
    (model / "tokenizer.json").write_text(json.dumps(told))


def write_otherwise(model: Path) -> None:
    told = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(told, sort_keys=True, indent=1))


@pytest.mark.parametrize(
    ("change", "part"),
    [(add_template, "chat template"), (exchange_numbers, "tokenizer"), (drop_a_merge, "tokenizer"),
     (write_otherwise, "")],
)  # fmt: skip
def test_another_template_or_tokenizer_is_told_as_such_and_not_as_other_conversations(
    change: Callable[[Path], None], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = chat_runs.write_place(tmp_path)
    chat_runs.run(place, tmp_path / "out", save_state=True, max_train_steps=2)
    change(place / "llama")
    capsys.readouterr()
    chat_runs.run(place, tmp_path / "out", save_state=True, max_train_steps=3, resume="auto")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("resume: ", "note: "))]
    wanted = [f"resume: base model's {part}: its files hold something else"] if part else []
    assert [line for line in said if "going on" not in line and "max_train_steps" not in line] == wanted


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_corpus_of_another_tokenizer_is_refused(
    own: bool, in_place: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other texts are trained on; but to the saved embeddings another tokenizer's numbers are other words."""
    (tmp_path / "texts").mkdir()
    corpus, other = pretraining_runs.write_corpus(tmp_path / "texts"), tmp_path / "other"
    settings: dict[str, Any] = {"save_state": True, "max_train_steps": 3}
    pretraining_runs.run(corpus, tmp_path / "out", **settings)
    texts = (tmp_path / "texts" / "texts.jsonl").read_text().splitlines()
    backwards = [json.dumps({"text": " ".join(reversed(json.loads(text)["text"].split()))}) for text in texts]
    (tmp_path / "texts" / "texts.jsonl").write_text("\n".join(backwards))
    tokenizer = ["--train_tokenizer", "300"] if own else ["--tokenizer", str(tmp_path / "out" / "model")]
    words = ["--validation_share", "0.1", "--save_to", str(other)]
    prepare(parser().parse_args([str(tmp_path / "texts"), *tokenizer, *words]))
    sizes = [json.loads((each / "index.json").read_text())["content"]["vocab_size"] for each in (corpus, other)]
    assert sizes[0] == sizes[1]
    if in_place:
        shutil.rmtree(corpus)
        other = other.rename(corpus)
    capsys.readouterr()
    with pytest.raises(UserError, match="with another tokenizer than that of data_dir") if own else nullcontext():
        pretraining_runs.run(other, tmp_path / "out", **settings | {"max_train_steps": 4}, resume="auto")
    assert own or "resume: data_dir" in capsys.readouterr().out


def rates(folder: Path, prefix: str = "lr/") -> dict[int, list[float]]:
    lines = [line for line in metrics(folder) if "loss" in line]
    return {line["step"]: [value for key, value in line.items() if key.startswith(prefix)] for line in lines}


COSINE = {"lr_scheduler": "cosine"}
PRODIGY = {"optimizer_type": "Prodigy", "learning_rate": 1.0}
PLUS = "loraplus_lr_ratio="


def half_cosine(step: int, of: int) -> float:
    return (1 + math.cos(math.pi * step / of)) / 2


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ({}, {"learning_rate": 5e-4}, [5e-4]),
        (COSINE, {}, [1e-3]),
        ({}, COSINE | {"max_train_steps": 8}, [1e-3 * half_cosine(4, 8)]),
        (COSINE, COSINE | {"max_train_steps": 8}, [1e-3 * half_cosine(4, 8)]),  # the first run's ended at 0
        (COSINE, COSINE | {"max_train_steps": 12, "lr_warmup_steps": 10}, [1e-3 * 5 / 10]),
        ({"text_encoder_lr": [1e-4]}, {"text_encoder_lr": [3e-4]}, [1e-3, 3e-4]),
        ({"network_args": [f"{PLUS}2"]}, {"network_args": [f"{PLUS}8"]}, [1e-3, 8e-3]),
        (PRODIGY, PRODIGY | {"learning_rate": 0.5}, [0.5]),
    ],
)  # fmt: skip
def test_the_first_step_after_a_resume_has_the_rate_of_the_new_schedule(
    before: dict[str, Any], after: dict[str, Any], wanted: list[float], base: Path, dataset: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run(base, dataset, tmp_path, **before, save_state=True)
    capsys.readouterr()
    run(base, dataset, tmp_path, **{"max_train_steps": 6} | after, save_state=True, resume=tmp_path / "lora-state")
    said = capsys.readouterr().out
    assert rates(tmp_path)[5] == pytest.approx(wanted, rel=1e-12)
    for key in before.keys() | after.keys():
        if before.get(key) != after.get(key):
            assert len(re.findall(rf"^resume: {key} .* -> .*$", said, re.MULTILINE)) == 1, said


def test_new_rates_keep_the_moments(base: Path, dataset: Path, tmp_path: Path) -> None:
    """A run that goes on at twice the rate moves the weights, at its first step, exactly twice as far."""
    run(base, dataset, tmp_path, save_state=True)
    start, moved = lora(tmp_path), []
    for rate in (1e-3, 2e-3):
        out = tmp_path / str(rate)
        run(base, dataset, out, resume=tmp_path / "lora-state", learning_rate=rate, max_train_steps=5,
            optimizer_args=[])  # fmt: skip
        moved.append({name: weight - start[name] for name, weight in lora(out).items()})
    for name, once in moved[0].items():
        if "lora_B" in name:  # AdamW's decay, which is small beside B's step, grows with the rate too
            torch.testing.assert_close(moved[1][name], 2 * once, rtol=1e-3, atol=1e-7)


def test_what_has_changed_of_a_dataset_is_counted_and_named(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_dataset(tmp_path / "data", images=6, text="batch_size = 2")
    run(base, data, tmp_path / "out", save_state=True)
    state, pictures = tmp_path / "out" / "lora-state", tmp_path / "data" / "images"
    (pictures / "0.txt").write_text("another caption")
    (pictures / "1.txt").write_text("another one")
    Image.new("RGB", (64, 64), "pink").save(pictures / "2.png")
    discard(pictures / "3.png")
    discard(pictures / "3.txt")
    Image.new("RGB", (64, 64), "grey").save(pictures / "9.png")
    (pictures / "9.txt").write_text("grey")
    capsys.readouterr()
    run(base, data, tmp_path / "more", resume=state, max_train_steps=5)
    assert (
        "resume: dataset: 1 image changed (2.png), 2 captions changed (0.png, 1.png), 1 image added (9.png), 1 image "
        "removed"
    ) in capsys.readouterr().out
    write_dataset(tmp_path / "data", images=6, text="batch_size = 1", num_repeats=3)
    run(base, data, tmp_path / "most", resume=state, max_train_steps=5, seed=3)
    said = capsys.readouterr().out
    assert "resume: dataset 1: batch_size 2 -> 1" in said
    assert "resume: dataset 1, subset 1: num_repeats 1 -> 3" in said
    assert "6 repeat counts changed" in said


def test_nothing_is_said_of_a_run_that_goes_on_as_it_was_and_an_old_state_still_does(
    base: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(base, dataset, tmp_path, save_every_n_steps=2, save_state=True)
    whole, state, said = lora(tmp_path), tmp_path / "lora-step00000002-state", list[list[str]]()
    for is_old in (False, True):
        if is_old:  # as a state of an earlier version, which had no such files
            for name in ("inputs.json", "checksums.json"):
                (state / name).unlink()
            write_manifest(state)
        capsys.readouterr()
        run(base, dataset, tmp_path, save_every_n_steps=2, save_state=True, resume=state)
        said.append(re.findall("^resume: .*$", capsys.readouterr().out, re.MULTILINE))
        assert same(lora(tmp_path), whole)
        if not is_old:
            saved = tmp_path / "kept"
            state = state.rename(saved)
    assert said[0] == []
    assert [line.endswith("what has changed since is not known") for line in said[1]] == [True]


def test_language_models_say_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = chat_runs.write_place(tmp_path)
    chat_runs.run(place, tmp_path / "chat", save_state=True)
    records = (place / "data.jsonl").read_text().splitlines()
    (place / "data.jsonl").write_text("\n".join([records[0].replace("one", "two"), *records[1:-1]]) + "\n")
    capsys.readouterr()
    chat_runs.run(place, tmp_path / "chat", max_train_steps=8, learning_rate=5e-3, resume=tmp_path / "chat/lora-state")
    said = capsys.readouterr().out
    assert "resume: learning_rate 0.01 -> 0.005" in said
    assert "resume: dataset: 1 conversation added, 2 conversations removed" in said
    assert rates(tmp_path / "chat")[7] == [5e-3]
    (texts := tmp_path / "texts").mkdir()
    corpus = pretraining_runs.write_corpus(texts)
    pretraining_runs.run(corpus, tmp_path / "llm", save_state=True, lr_scheduler="cosine")
    pretraining_runs.run(corpus, tmp_path / "llm", max_train_steps=12, resume=tmp_path / "llm/model-state",
                         lr_scheduler="linear", lr_scheduler_min_lr_ratio=0.0)  # fmt: skip
    assert rates(tmp_path / "llm")[7] == pytest.approx([3e-3 * (1 - 4 / 10)] * 2)
    assert 'resume: lr_scheduler "cosine" -> "linear"' in capsys.readouterr().out


def test_parts_of_the_base_that_have_changed_are_named_and_another_place_is(
    base: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(base, dataset, tmp_path, save_state=True)
    moved, state = shutil.copytree(base, tmp_path / "moved"), tmp_path / "lora-state"

    def said() -> list[str]:
        capsys.readouterr()
        run(moved, dataset, tmp_path / "more", max_train_steps=5, resume=state)
        lines = re.findall("^resume: (.*)$", capsys.readouterr().out, re.MULTILINE)
        return [line for line in lines if "max_train_steps" not in line and "output_dir" not in line]

    place = f'pretrained_model_name_or_path "{base.name}" -> "moved"'
    assert [line for line in said() if "save_state" not in line] == [place]
    for change in PARTS.values():
        change(moved)
    lines = said()
    assert place in lines
    for part in PARTS:
        assert f"base model's {part}: its files hold something else" in lines
    saved = read_inputs(state)
    assert saved is not None
    old = {key: value for key, value in saved["contents"].items() if not key.startswith("base model")}
    assert len(old) < len(saved["contents"])
    now = RunInputs(saved["settings"], saved["contents"], saved["samples"])
    config = load_for(LORA, SCRIPTS["images"][1])
    assert changes_since(saved | {"contents": old}, now, config) == [], "a state of a version that knew no parts"


PRIOR = ["--preserve", "prior"]
SHUFFLED = "shuffle_caption = true"
BUCKETS = "enable_bucket = true"


@pytest.mark.parametrize(
    ("beside", "key", "acts"),
    [
        *(("", key, False) for key in ("keep_tokens = 1", "validation_seed = 5", "caption_separator = ';'")),
        *((SHUFFLED, key, True) for key in ("keep_tokens = 1", "caption_separator = ';'")),
        ("validation_split = 0.5", "validation_seed = 5", True),
        ("trigger_word = 'zorbo'", "caption_separator = ';'", True),
        *(("", key, False) for key in ("bucket_no_upscale = true", "bucket_reso_steps = 64", "min_bucket_reso = 64")),
        *(
            (BUCKETS, key, True)
            for key in ("bucket_no_upscale = true", "bucket_reso_steps = 64", "max_bucket_reso = 64")
        ),
        (f"{BUCKETS}\nbucket_no_upscale = true", "max_bucket_reso = 64", False),
        ("", "secondary_separator = ';'", True),
    ],
)
def test_a_start_names_the_keys_of_a_dataset_that_have_no_effect(
    beside: str, key: str, acts: bool, tmp_path: Path
) -> None:
    data = write_dataset(tmp_path)
    data.write_text(data.read_text().replace("[general]\n", f"[general]\n{beside}\n{key}\n"))
    config = load_for(LORA, [*MODEL, "--dataset_config", str(data)])
    idle = idle_parts(load_dataset_config(data, config.dataset))
    assert any(key.partition(" ")[0] in line for line in idle) != acts


ACTING = {"caption_tag_dropout_rate": "0.1"}  # others: true
WHERE = [
    (key, value, need)
    for key, (_, field) in fields(LORA).items()
    for mark in field.metadata
    if isinstance(mark, EffectOnly) and mark.where
    for value in [v for v in values_of(field) if v and v != field.get_default()][:1]
    for need in ("", *mark.where)
]


@pytest.mark.parametrize(("key", "value", "need"), WHERE)
def test_a_run_says_of_each_option_that_nothing_uses_it(key: str, value: Any, need: str, tmp_path: Path) -> None:
    flags, text = (PRIOR, "") if need == "preserve" else ([], need and f"{need} = {ACTING.get(need, 'true')}")
    data = write_dataset(tmp_path)
    data.write_text(f"{data.read_text()}{text}\n")
    config = load_for(LORA, [*MODEL, "--dataset_config", str(data), f"--{key}", str(value), *flags])
    lines = idle_options(config, load_dataset_config(data, config.dataset))
    assert [line.startswith(f"{key} = {value}: no effect without ") for line in lines] == [True] * (not need)


def test_versions_of_all_that_computes_are_kept() -> None:
    required = set(re.findall(r"^([\w-]+)==", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    apart = {"toml", "PyYAML", "pydantic", "rich", "psutil", "filelock", "matplotlib", "protobuf", "tensorboard"}
    apart |= {"peft", "safetensors"}  # read and write files, or are tests' reference
    settings = settings_of(load_for(LORA, SCRIPTS["images"][1]))
    assert {f"version of {name}" for name in required - apart} <= settings.keys()
