"""Kill runs, let them go on, and compare what they end with to a run that was left in peace.

    python -m tests.faults.suite --faults 300

Every chain is one training run from an empty folder: killed at one point, resumed with ``--resume auto``, killed again
some points later, and so on, then resumed to the end. After every kill all files under their final names must be whole;
at the end the LoRA must be the same bit for bit, the metrics the same line for line, and the folder hold the same
names.

A killed process leaves its lock behind. And before a run goes on, its disk may spoil what it wrote: caches vanish, a
byte of a cache or of the newest state changes, or such a file is cut off; the lock may be one that was never filled.
Processes are forked from one that has its imports behind it, so a run takes a second or two.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path

from PIL import Image

import train_llm
import train_lora
from library.config import load_config
from library.config.load import load_for
from library.config.scripts import LANGUAGE_LORA, LLM
from library.training.checkpoint.state import find_damage, newest_state
from library.training.tasks import chat_lora, image_lora, pretraining  # noqa: F401 - so that forks have them
from library.training.trainer import Trainer  # noqa: F401
from tests.chat_runs import flags as chat_flags
from tests.chat_runs import write_place
from tests.faults.points import PHASES, Points, phase
from tests.pretraining_runs import flags as pretraining_flags
from tests.pretraining_runs import write_corpus
from tests.runs import arguments, write_base, write_dataset

_STEPS = 6
_CHAIN = 4  # kills of one run
_SEEDS = {"adamw": 0, "prodigy": 1, "schedule-free": 2, "pretraining": 3, "conversations": 4}
_COMMON: dict[str, object] = {
    "max_train_steps": _STEPS,
    "save_every_n_steps": 2,
    "save_every_n_epochs": 1,
    "save_last_n_steps": 2,
    "save_state": True,
    "network_dropout": 0.1,
    "resume": "auto",
}
SCENARIOS: dict[str, dict[str, object]] = {
    "adamw": {
        "lr_scheduler": "cosine",
        "ema_decay": 0.9,
        "max_data_loader_n_workers": 2,
        "validate_every_n_steps": 3,
        "save_best": True,
    },
    "prodigy": {
        "optimizer_type": "Prodigy",
        "learning_rate": 1.0,
        "gradient_accumulation_steps": 2,
        "huggingface_repo_id": "me/loras",
        "async_upload": True,
    },
    "schedule-free": {"optimizer_type": "AdamWScheduleFree", "sample_every_n_steps": 3},
    "pretraining": {},  # train_llm.py, and a LoRA on a language model; their settings are below
    "conversations": {},
}
_PRETRAINING: dict[str, object] = {
    "max_train_steps": _STEPS,
    "tokens_per_batch": 256,
    "save_every_n_steps": 2,
    "save_state": True,
    "validate_every_n_steps": 3,
    "sample_prompts": ["the cat"],
    "sample_every_n_steps": 3,
    "sample_tokens": 4,
    "resume": "auto",
}
_CONVERSATIONS: dict[str, object] = {
    **_COMMON,
    "validation_split": 0.25,
    "validate_every_n_steps": 3,
    "save_best": True,
    "sample_prompts": ["say 1"],
    "sample_every_n_steps": 3,
    "sample_tokens": 4,
}
_RESULTS = {"pretraining": "model/model.safetensors", "conversations": "lora/adapter_model.safetensors"}


@dataclass
class Place:
    """Where the runs of one scenario lie; every run has the same paths."""

    root: Path
    base: Path
    scenario: str
    points: Counter[str] = field(default_factory=Counter)  # of an undisturbed run, by phase
    metrics: list[dict[str, float]] = field(default_factory=list)
    lora: bytes = b""
    names: set[str] = field(default_factory=set)

    @property
    def output(self) -> Path:
        return self.root / "output"

    @property
    def result(self) -> Path:
        """What the run ends with."""
        return self.output / _RESULTS.get(self.scenario, "lora.safetensors")

    def train(self) -> None:
        """Train in this process."""
        if self.scenario == "pretraining":
            corpus = self.root.parent / "corpus"
            train_llm.train(load_for(LLM, pretraining_flags(corpus / "tokens", self.output, **_PRETRAINING)))
        elif self.scenario == "conversations":
            flags = chat_flags(self.root.parent / "talks", self.output, **_CONVERSATIONS)
            train_lora.train(load_for(LANGUAGE_LORA, flags))
        else:
            train_lora.train(load_config(self.flags()))

    def flags(self) -> list[str]:
        """Return the command line of a run on images."""
        settings = {**_COMMON, **SCENARIOS[self.scenario]}
        if "sample_every_n_steps" in settings:
            settings["sample_prompts"] = self.root.parent / "prompts.txt"
        return arguments(self.base, self.root / "data" / "dataset.toml", self.output, **settings)

    def clear(self) -> None:
        """Begin anew: images and captions, no cache, no output."""
        shutil.rmtree(self.root, ignore_errors=True)
        two_datasets(self.root / "data")


def two_datasets(folder: Path) -> None:
    """Write six images of two datasets, which differ in size and batch, two of them held out."""
    write_dataset(folder / "wide", images=3, size=(96, 64))
    toml = write_dataset(
        folder, images=4, text="batch_size = 2\nvalidation_split = 0.25\nvalidation_seed = 1", flip_aug=True
    )
    wide = f'image_dir = "{folder / "wide" / "images"}"'
    toml.write_text(
        f"{toml.read_text()}[[datasets]]\nresolution = [96, 64]\nbatch_size = 1\n[[datasets.subsets]]\n{wide}\n"
    )
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))  # the index of files does not trust one that changed a moment ago


def run_forked(work: Callable[[], None], log: Path) -> int:
    """Run ``work`` in a forked process of its own group; return its exit code, negative for a signal."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # the data loader's workers
    return os.waitstatus_to_exitcode(status)


def train_until(place: Place, kill_at: tuple[str, int] | None) -> tuple[str | None, list[str]]:
    """Train in a forked process; return where it was killed, or None and the points that it passed."""
    trace, log, killed = (place.root.parent / name for name in ("trace.json", "log.txt", "killed.txt"))

    def work() -> None:
        points = Points(place.root, kill_at, killed)
        points.watch()
        place.train()
        trace.write_text(json.dumps(points.passed))

    code = run_forked(work, log)
    assert code in (0, -signal.SIGKILL), f"{place.scenario}: exit code {code}\n{log.read_text()}"
    return (None, json.loads(trace.read_text())) if code == 0 else (killed.read_text(), [])


def broken_files(root: Path) -> list[str]:
    """Return what is not whole among the files below ``root`` that bear their final names."""
    broken = []
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root).parts
        if any(part.startswith(".") and part.endswith((".tmp", ".old", ".gone")) for part in inside):
            continue
        if path.is_dir() and path.name.endswith("-state"):
            broken += [damage] if (damage := find_damage(path)) else []
        elif path.is_file() and not _is_whole(path):
            broken.append(str(path))
    return broken


def _is_whole(path: Path) -> bool:
    try:
        if path.suffix == ".safetensors":
            tensors(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".png":
            with Image.open(path) as image:
                image.load()
    except Exception:
        return False
    return True


def tensors(path: Path) -> bytes:
    """Return a safetensors file's layout and data without its metadata, which say when it was made.

    Raises:
        AssertionError: it is cut off.
    """
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    data = content[8 + length :]
    assert len(data) == max(entry["data_offsets"][1] for entry in header.values())
    return json.dumps(header, sort_keys=True).encode() + data


def metrics(output: Path) -> list[dict[str, float]]:
    """Return the lines of ``metrics.jsonl`` without what the clock and the machine have a say in."""
    changing = ("s_per_it", "data_wait_s", "peak_mem_bytes", "tokens_per_s", "samples_per_s")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in changing} for line in lines]


def names(root: Path) -> set[str]:
    """Return what lies below a run's folder."""
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def spoil(place: Place, draw: random.Random, changed: set[str]) -> str | None:
    """Do to a killed run's files what disks and people do; return what that was, None where there was nothing to.

    ``changed`` learns the names of files and states: those that the run does not come by again stay as they are.
    """
    caches = [path for path in (place.root / "data").rglob("*.safetensors") if not path.name.startswith(".")]
    states = [path for path in place.output.glob("*-state") if not find_damage(path)]
    kind = draw.choice(["caches vanish", "a cache changes", "a state changes", "an empty lock", "nothing"])
    if kind == "caches vanish" and caches:
        for folder in list((place.root / "data").rglob(".tandem_cache")):
            shutil.rmtree(draw.choice([folder, draw.choice(caches).parent]), ignore_errors=True)
        return kind
    if kind == "a cache changes" and caches:
        indexes = (place.root / "data").rglob("index.json")
        for path in [*draw.sample(sorted(caches), min(3, len(caches))), *indexes]:
            change(path, draw)
            changed.add(path.name)
        return kind
    if kind == "a state changes" and len(states) > 1:  # of one alone nobody can go on
        newest = newest_state(place.output, states[0].name.partition("-")[0])
        assert newest is not None
        change(draw.choice(sorted(newest.iterdir())), draw)
        changed.add(newest.name)
        return kind
    if kind == "an empty lock" and (place.output / ".lock").exists():
        os.truncate(place.output / ".lock", 0)
        return kind
    return None


def change(path: Path, draw: random.Random) -> None:
    """Flip a bit of a file, or cut it off, or delete it."""
    content = bytearray(path.read_bytes())
    how = draw.randrange(6)
    if how == 0:
        path.unlink()
        return
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content[: draw.randrange(len(content))] if how == 1 else content)


def undisturbed(place: Place) -> Place:
    """Train once without a fault, and remember what came out."""
    place.clear()
    _, passed = train_until(place, None)
    place.points, place.metrics = Counter(map(phase, passed)), metrics(place.output)
    place.lora, place.names = tensors(place.result), names(place.root)
    return place


def chain(
    place: Place, phases: Iterator[str], kills: int, draw: random.Random, spoilt: Counter[str] | None = None
) -> list[str]:
    """Kill one run ``kills`` times, each time in the next of ``phases``, and let it end; return where it was killed.

    ``spoilt`` counts what else befell it.

    Raises:
        AssertionError: something was lost.
    """
    place.clear()
    faults: list[str] = []
    changed: set[str] = set()
    for attempt in range(kills):
        # a resumed run has less of everything before it, and its caches
        wanted = next(name for name in phases if place.points[name] and not (attempt and name == "caching"))
        most = place.points[wanted] if attempt == 0 else max(place.points[wanted] // 3, 1)
        killed, _ = train_until(place, (wanted, draw.randint(1, most)))
        if killed is None:  # it came to its end before that point
            break
        faults.append(killed)
        broken = [path for path in broken_files(place.root) if not any(name in path for name in changed)]
        assert not broken, f"{faults}: broken: {broken}"
        if what := spoil(place, draw, changed):
            faults[-1] += f", then {what}"
            if spoilt is not None:
                spoilt[what] += 1
    else:
        train_until(place, None)
    assert tensors(place.result) == place.lora, f"{faults}: another LoRA"
    assert metrics(place.output) == place.metrics, f"{faults}: {metrics(place.output)} instead of {place.metrics}"
    differing = [path for path in names(place.root) ^ place.names if not changed & set(Path(path).parts)]
    assert not differing, f"{faults}: {sorted(differing)}"
    return faults


def run_suite(folder: Path, faults: int, scenarios: Sequence[str], say: Callable[[str], None]) -> Counter[str]:
    """Kill runs at ``faults`` points or more, spread over ``scenarios``; return how many were survived by phase.

    Raises:
        AssertionError: one was not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = write_base(folder / "base")
    (folder / "prompts.txt").write_text("a disc --w 64 --h 64 --s 2 --d 1\n")
    log = folder / "log.txt"
    for name, write in (("corpus", write_corpus), ("talks", write_place)):
        (folder / name).mkdir()
        assert run_forked(partial(write, folder / name), log) == 0, log.read_text()
    survived: Counter[str] = Counter()
    each, phases = -(-faults // len(scenarios)), cycle(PHASES)
    for scenario in scenarios:
        place = undisturbed(Place(folder / "run", base, scenario))
        say(f"{scenario}: {place.points.total()} points in an undisturbed run")
        draw, done = random.Random(_SEEDS[scenario]), 0
        while done < each:
            faults_of_run = chain(place, phases, min(_CHAIN, each - done), draw, survived)
            done += len(faults_of_run)
            survived.update(phase(fault.partition(", then ")[0]) for fault in faults_of_run)
            survived["(of them in a run that was resumed)"] += max(len(faults_of_run) - 1, 0)
            say(f"{scenario}: {done} of {each} faults survived")
    return survived


def main() -> None:
    """Run the suite from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300, help="processes to kill, at least")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), help="default: all")
    options = parser.parse_args()
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        survived = run_suite(Path(folder), options.faults, options.scenarios, lambda line: print(line, flush=True))
    resumed = survived.pop("(of them in a run that was resumed)")
    total = sum(survived[name] for name in PHASES)
    print(f"{total} faults survived in {time.time() - started:.0f} s, {resumed} of them in runs that had been resumed")
    for name in [*PHASES, *sorted(survived.keys() - PHASES.keys())]:
        print(f"{survived[name]:5} {'' if name in PHASES else 'then: '}{name}")


if __name__ == "__main__":
    main()
