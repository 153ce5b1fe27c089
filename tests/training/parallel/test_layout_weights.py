"""What each of two processes holds under every layout, against the whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from library.config import load_config
from library.config.load import load_for
from library.config.scripts import LLM
from library.models.llm.model import TransformerLM
from library.training.memory.budget import tensor_bytes
from library.training.optim.factory import unwrapped
from library.training.parallel.gather import to_local
from library.training.tasks.pretraining import fresh_config
from tests.pretraining_runs import flags as corpus_flags
from tests.pretraining_runs import write_corpus
from tests.runs import arguments, write_base, write_dataset
from tests.worker_group import run_in_group
from train_llm import train as pretrain
from train_lora import train

TEXTS: dict[str, tuple[dict[str, object], dict[str, int]]] = {
    "llama tp": ({"preset": "llama-tiny"}, {"tp": 2}),
    "llama pp": ({"preset": "llama-tiny", "layers": 3}, {"pp": 2}),
    "gpt2 tp": ({"preset": "gpt2-tiny"}, {"tp": 2}),
    "gpt2 pp": ({"preset": "gpt2-tiny"}, {"pp": 2}),
}
LAYOUTS: dict[str, dict[str, int]] = {"copies": {"dp": 2}, "shard": {"shard": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}}
MOST = 0.8  # of the weights on the fuller process: of three blocks a stage has two, and what is before them all have

pytestmark = pytest.mark.slow


def train_and_weigh(flags: list[str], folder: Path) -> None:
    """Train a LoRA, and write what this process holds."""
    run = train(load_config(flags)).task
    trained = run.network.parameters()
    ids = {id(p) for p in trained}
    frozen = [to_local(p) for p in run.transformer.parameters() if id(p) not in ids and not p.is_meta]
    states = unwrapped(run.engine.optimizer).state.values()
    held = {
        "weights": tensor_bytes(frozen),
        "LoRA": tensor_bytes([to_local(p) for p in trained]),
        "optimizer": tensor_bytes([value for state in states for key, value in state.items() if key != "step"]),
    }
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(held))


def pretrain_and_weigh(flags: list[str], folder: Path) -> None:
    """Train a language model in full, and write what this process holds."""
    run = pretrain(load_for(LLM, flags)).task
    held = {"weights": tensor_bytes([to_local(p) for p in run.transformer.parameters() if not p.is_meta])}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(held))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each of two processes holds under each layout."""
    folder = tmp_path_factory.mktemp("weights")
    base = write_base(folder / "base")
    images = write_dataset(folder / "images", text="batch_size = 2")
    jobs = []
    for name, layout in LAYOUTS.items():
        (folder / name).mkdir()
        settings: dict[str, object] = {"max_train_steps": 1, "mixed_precision": "bf16"}
        flags = arguments(base, images, folder / name / "out", **settings, **layout)
        jobs.append((name, train_and_weigh, (flags, folder / name)))
    (folder / "corpus").mkdir()
    corpus = write_corpus(folder / "corpus")
    for name, (model, layout) in TEXTS.items():
        (folder / name).mkdir()
        flags = corpus_flags(corpus, folder / name / "out", max_train_steps=3, **model, **layout)
        jobs.append((name, pretrain_and_weigh, (flags, folder / name)))
    assert run_in_group(jobs, folder) == {name: "" for name, _, _ in jobs}
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_process_holds_its_share_and_the_lora_in_full(name: str, place: Path) -> None:
    one, other = (json.loads((place / name / f"{rank}.json").read_text()) for rank in range(2))
    whole = json.loads((place / "copies/0.json").read_text())
    for key in ("LoRA", "optimizer"):
        assert one[key] == other[key] == whole[key]
    assert one["weights"] + other["weights"] >= whole["weights"]
    assert max(one["weights"], other["weights"]) <= (1 if name == "copies" else MOST) * whole["weights"]


@pytest.mark.parametrize("name", TEXTS)
def test_of_a_language_model_too(name: str, place: Path) -> None:
    """Half of embedding and head each under ``tp``; one on the first stage and one on the last, tied or not."""
    held = [json.loads((place / name / f"{rank}.json").read_text())["weights"] for rank in range(2)]
    config = load_for(LLM, corpus_flags(place / "corpus/tokens", place, **TEXTS[name][0]))
    whole = tensor_bytes(TransformerLM(fresh_config(config.model, 300)).parameters())
    assert sum(held) >= whole
    assert max(held) <= MOST * whole
