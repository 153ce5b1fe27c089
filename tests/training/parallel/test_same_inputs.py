"""Processes of one run that were given different things: all end before the first step, and the difference is named."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from library.processes import join
from library.training.run_inputs import require_same
from tests import chat_runs, pretraining_runs
from tests.forked import Script
from tests.processes import free_ports
from tests.runs import ROOT, arguments, largest_difference, lora, run, train_flags, write_dataset
from tests.worker_group import Job, run_in_group

SAME_IN_FP32 = 2e-4  # as in test_launchers
LIMIT = 60


def by_rank(train: Callable[[list[str]], object], flags: list[list[str]]) -> None:
    """Train as a job of a worker group, each process as its own flags say."""
    train(flags[int(os.environ["RANK"])])


SETTINGS: dict[str, dict[str, object]] = {
    "seed": {"seed": 4},
    "mixed_precision": {"mixed_precision": "bf16"},
    "save_every_n_steps": {"save_every_n_steps": 1},
    "shard": {"shard": 2},
    "memory": {"memory": "auto"},
}


def caption(data: Path) -> None:
    (data / "images" / "0.txt").write_text("another")


def image(data: Path) -> None:
    Image.new("RGB", (64, 64), "pink").save(data / "images" / "0.png")


def image_more(data: Path) -> None:
    Image.new("RGB", (64, 64), "pink").save(data / "images" / "new.png")
    (data / "images" / "new.txt").write_text("pink")


def repeats(data: Path) -> None:
    write_dataset(data, text="batch_size = 2", num_repeats=2)


CHANGES: dict[Callable[[Path], None], str] = {
    caption: "1 caption changed (0.png)",
    image: "1 image changed (0.png)",
    image_more: "1 image added (new.png)",
    repeats: "num_repeats is 2 instead of 1",
}


def flip(file: Path) -> None:
    """Change a bit of a weight in place."""
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)


def write_key(file: Path, key: str, value: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))


# what a message calls a part of the base -> how it becomes another
PARTS: dict[str, Callable[[Path], None]] = {
    "ae": lambda base: flip(next((base / "vae").glob("*.safetensors"))),
    "clip_l": lambda base: flip(next((base / "text_encoder").glob("*.safetensors"))),
    "t5xxl": lambda base: write_key(base / "text_encoder_2" / "config.json", "layer_norm_epsilon", 1e-3),
    "clip_l_tokenizer": lambda base: write_key(base / "tokenizer" / "tokenizer_config.json", "mark", 1),
    "t5xxl_tokenizer": lambda base: write_key(base / "tokenizer_2" / "tokenizer_config.json", "mark", 1),
    "scheduler": lambda base: write_key(base / "scheduler" / "scheduler_config.json", "shift", 2.5),
    "transformer config": lambda base: write_key(base / "transformer" / "config.json", "axes_dims_rope", [12, 10, 10]),
    "model_index.json": lambda base: write_key(base / "model_index.json", "is_distilled", True),
}


def test_what_differs_on_a_process_is_named_on_all_and_own_paths_are_taken(base: Path, tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", text="batch_size = 2")
    common = arguments(base, data, tmp_path / "out")
    jobs: list[Job] = [
        (key, by_rank, (train_flags, [common, arguments(base, data, tmp_path / "out", **settings)]))
        for key, settings in SETTINGS.items()
    ]
    for change in CHANGES:
        other = shutil.copytree(tmp_path / "data", tmp_path / change.__name__)
        change(other)
        flags = [common, arguments(base, other / "dataset.toml", tmp_path / "out")]
        jobs.append((change.__name__, by_rank, (train_flags, flags)))
    own_base, own = shutil.copytree(base, tmp_path / "base"), tmp_path / "own"
    shutil.copytree(tmp_path / "data", own)
    mine = arguments(
        own_base, own / "dataset.toml", tmp_path / "out1", cache_directory=tmp_path / "cache", ae=own_base / "vae"
    )
    jobs.append(("own paths", by_rank, (train_flags, [common, mine])))
    said = run_in_group(jobs, tmp_path)
    for key in SETTINGS:
        assert said[key].startswith("process 1 differs from process 0: "), (key, said[key])
        assert f"{key} is " in said[key]
        assert "\n" not in said[key]
    for change, words in CHANGES.items():
        assert f"process 1 differs from process 0: {words}" in said[change.__name__].replace(
            "dataset 1, subset 1: ", ""
        )
    assert said["own paths"] == ""
    run(base, data, tmp_path / "alone", gradient_accumulation_steps=2)
    assert largest_difference(lora(tmp_path / "out"), lora(tmp_path / "alone")) < SAME_IN_FP32


def test_another_model_conversation_or_corpus_is_named(base: Path, tmp_path: Path) -> None:
    data, other = write_dataset(tmp_path / "data"), shutil.copytree(base, tmp_path / "other")
    flip(next((other / "transformer").glob("*.safetensors")))
    jobs: list[Job] = [
        ("base", by_rank, (train_flags, [arguments(each, data, tmp_path / "out") for each in (base, other)]))
    ]
    for part in ("t5xxl", "scheduler"):  # test_resume_changes has all
        PARTS[part](other := shutil.copytree(base, tmp_path / part))
        jobs.append((part, by_rank, (train_flags, [arguments(each, data, tmp_path / "out") for each in (base, other)])))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    places = [chat_runs.write_place(tmp_path / name) for name in ("one", "two")]
    records = (places[1] / "data.jsonl").read_text()
    (places[1] / "data.jsonl").write_text(records.replace("seven", "SEVEN"))
    chats = [chat_runs.flags(places[0], tmp_path / "chat", train_data=[place / "data.jsonl"]) for place in places]
    jobs.append(("chats", by_rank, (chat_runs.train_flags, chats)))
    for name in ("three", "four"):
        (tmp_path / name).mkdir()
    corpora = [pretraining_runs.write_corpus(tmp_path / name) for name in ("three", "four")]
    flags = [pretraining_runs.flags(corpus, tmp_path / "llm") for corpus in corpora]
    jobs.append(("same corpus", by_rank, (pretraining_runs.train_flags, flags)))
    rates = [[*each, "--weight_decay", decay] for each, decay in zip(flags, ("0.1", "0.2"), strict=True)]
    jobs.append(("weight_decay", by_rank, (pretraining_runs.train_flags, rates)))
    said = run_in_group(jobs, tmp_path)
    assert "pretrained_model_name_or_path's content is " in said["base"]
    assert all(f"base model's {part}'s content is " in said[part] for part in ("t5xxl", "scheduler")), said
    assert "1 conversation added; 1 conversation removed" in said["chats"]
    assert said["same corpus"] == ""
    assert "weight_decay is 0.2 instead of 0.1" in said["weight_decay"]


def in_own_folder(train: Callable[[list[str]], object], flags: list[str], folders: list[Path]) -> None:
    """Train where "out" is another folder for each process, as on machines with disks of their own."""
    os.chdir(folders[int(os.environ["RANK"])])
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    train(flags)


def test_processes_resume_the_same_state_or_say_which_differs(base: Path, tmp_path: Path) -> None:
    data, settings = write_dataset(tmp_path / "data", text="batch_size = 2"), {"save_state": True, "max_train_steps": 2}
    for name, more in {"one": {}, "longer": {"max_train_steps": 3}, "other": {"seed": 9}}.items():
        run(base, data, tmp_path / name / "out", **settings | more)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    flip(shutil.copytree(tmp_path / "one", tmp_path / "damaged") / "out" / "lora-state" / "weights.safetensors")
    (tmp_path / "none").mkdir()
    states = {name: tmp_path / name / "out" / "lora-state" for name in ("one", "copy", "longer", "other")}
    cases: list[tuple[object, object, str]] = [
        (None, "auto", "resume's state is auto instead of nothing"),
        ("auto", None, "resume's state is nothing instead of auto"),
        ("auto", states["one"], "resume's state is at step 2 (checksum "),
        (states["one"], None, "resume's state is nothing instead of at step 2 (checksum "),
        (states["one"], states["longer"], "resume's state is at step 3 (checksum "),
        (states["one"], states["other"], "resume's state is at step 2 (checksum "),
        (states["one"], states["copy"], ""),
    ]
    common, jobs = {**settings, "max_train_steps": 4, "overwrite": True}, list[Job]()
    for number, (*resumed, _) in enumerate(cases):
        given = [{"resume": each} if each else {} for each in resumed]
        flags = [arguments(base, data, tmp_path / f"out{number}", **common, **each) for each in given]
        jobs.append((f"{number}", by_rank, (train_flags, flags)))
    copies = {"longer": "out/lora-state is at step 3 (checksum ", "other": "out/lora-state is at step 2 (checksum "}
    copies |= {"none": "process 1: resume: out/lora-state is not a training state", "copy": ""}
    copies["damaged"] = "process 1: resume: out/lora-state/weights.safetensors is damaged"
    for name in copies:
        flags = arguments(base, data, Path("out"), **common, resume="auto")
        jobs.append((name, in_own_folder, (train_flags, flags, [tmp_path / "one", tmp_path / name])))
    said = run_in_group(jobs, tmp_path)
    for name, words in [*((f"{number}", words) for number, (*_, words) in enumerate(cases)), *copies.items()]:
        assert (words in said[name]) if words else (said[name] == ""), (name, said[name])
        assert "\n" not in said[name]


def compare(facts: list[dict[str, str]]) -> None:
    join(1.0)
    require_same(facts[int(os.environ["RANK"])])


def test_of_many_differences_the_first_are_named_and_of_another_model_this_alone(tmp_path: Path) -> None:
    first, other = ({f"option_{i:02d}": f"{value}" for i in range(30)} for value in (1, 2))
    jobs: list[Job] = [
        ("many", compare, ([first, other],)),
        ("model", compare, ([first | {"model_type": "flux"}, {"model_type": "llama", "more": "1"}],)),
    ]
    said = run_in_group(jobs, tmp_path)
    assert said["many"].count("is 2 instead of 1") == said["many"].count("instead of") == 6
    assert "option_05 is 2 instead of 1; 24 more settings; start all" in said["many"]
    assert "process 0: model_type is llama instead of flux; 31 more settings; start all" in said["model"]


@pytest.mark.parametrize("kind", ["rate", "count"])
def test_every_process_ends_with_exit_code_2_without_a_launcher(kind: str, base: Path, tmp_path: Path) -> None:
    data, worlds = write_dataset(tmp_path / "data"), ("2", "3" if kind == "count" else "2")
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()[0]), "LOCAL_WORLD_SIZE": "2"}
    begun, running = time.monotonic(), list[Script]()
    for rank, world in zip("01", worlds, strict=True):
        rate = 1e-3 if kind == "count" or rank == "0" else 2e-3
        flags = arguments(base, data, tmp_path / "out", learning_rate=rate)
        environment = group | {"WORLD_SIZE": world, "RANK": rank, "LOCAL_RANK": rank}
        running.append(Script(ROOT / "train_lora.py", flags, tmp_path, environment))
    ended = [process.wait(2 * LIMIT) for process in running]
    assert time.monotonic() - begun < LIMIT
    text = "".join(each.stderr for each in ended)
    assert [each.returncode for each in ended] == [2, 2], text
    assert "Traceback" not in text
    wanted = "learning_rate is 0.002 instead of 0.001" if kind == "rate" else "was started as one of "
    assert text.count(wanted) == (1 if kind == "rate" else 2), text
