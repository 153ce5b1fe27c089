"""LoRA and LoKr with equally many trained parameters on the tiny FLUX: what each learns, and what it changes elsewhere.

    OMP_NUM_THREADS=1 python bench/adapters.py --json adapters.json
    OMP_NUM_THREADS=1 python bench/adapters.py --subjects zorbo --first_seed 101 --seeds 1 --rates 1e-3 2e-3 4e-3

The subjects and the way of training are those of ``bench/preservation.py``, without preservation. Adapters of one size
are compared: *behind* is the held-out loss at the end less the LoRA's of the same subject and seed, *elsewhere* the
mean squared change on other prompts where all of that size have learnt as much, *share* that over the LoRA's, *seconds*
the CPU time of a step. Each adapter has the best of several rates; the second command found them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor, nn

from bench.measure import Table, benchmark_parser, clock, finish
from bench.preservation import FLAGS, SUBJECTS, Curve, at_equal_learning, curve_of, write_dataset
from bench.tiny_runs import flags, mean_and_spread
from library.config.load import load_and_tell
from library.config.schema import TrainConfig
from library.config.scripts import LORA
from library.data.batches import Batch
from library.training.tasks.image_lora import ImageLora
from library.training.trainer import train


class Adapter(NamedTuple):
    """What is trained: ``rate`` is the best of several."""

    size: str
    rate: float
    options: Mapping[str, object]


def low_rank(rank: int) -> dict[str, object]:
    """Return a LoRA's options."""
    return {"network_dim": rank, "network_alpha": rank}


def lokr(factor: int, rank: int | None = None) -> dict[str, object]:
    """Return a LoKr's options; without a rank w2 is a full matrix."""
    matrices = [] if rank else ["full_matrix=True"]
    own = {"network_type": "lokr", "network_args": [f"factor={factor}", *matrices], "save_format": "comfy"}
    return low_rank(rank or 1) | own


ADAPTERS = {  # of each size a LoRA first
    "LoRA, rank 7": Adapter("small", 4e-3, low_rank(7)),
    "LoKr, factor 4, full": Adapter("small", 8e-3, lokr(4)),
    "LoKr, factor 2, rank 14": Adapter("small", 8e-3, lokr(2, 14)),
    "LoRA, rank 29": Adapter("large", 2e-3, low_rank(29)),
    "LoKr, factor 2, full": Adapter("large", 2e-3, lokr(2)),
}
STEPS, EVERY = 60, 20


class TimedLora(ImageLora):
    """The training of an image LoRA, which notes when each step begins, in CPU seconds."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.began = list[float]()

    def loss(self, model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        self.began.append(clock())
        return super().loss(model, batch, step)


class Trained(NamedTuple):
    """A run: its validations, trained parameters, CPU seconds of a step (the median)."""

    curve: Curve
    parameters: int
    seconds: float


def train_adapter(folder: Path, name: str, seed: int, options: Mapping[str, object]) -> Trained:
    """Train one adapter, in this process."""
    with tempfile.TemporaryDirectory(dir=folder) as output, redirect_stdout(StringIO()):
        own = {"dataset_config": folder / name / "plain.toml", "cache_directory": folder / "cache", "seed": seed}
        own |= {"max_train_steps": STEPS, "validate_every_n_steps": EVERY, "output_dir": output}
        task = TimedLora(load_and_tell(LORA, flags(FLAGS | own | options)))
        train(task)
        parameters = sum(parameter.numel() for parameter in task.network.parameters())
        return Trained(curve_of(Path(output)), parameters, float(np.median(np.diff(task.began))))


def rows_of(runs: Mapping[str, Mapping[tuple[str, int], Trained]]) -> list[dict[str, object]]:
    """Return a row for each adapter of one size, the LoRA being the first."""
    curves = {name: {case: run.curve for case, run in found.items()} for name, found in runs.items()}
    equal = {name: reached[:, 2] for name, reached in at_equal_learning(curves).items()}
    losses = {name: np.array([curve[1] for curve in found.values()]) for name, found in curves.items()}
    rows, lora = list[dict[str, object]](), next(iter(runs))
    for name, found in runs.items():
        row: dict[str, object] = {"adapter": name, "parameters": next(iter(found.values())).parameters}
        row |= mean_and_spread("loss", losses[name][:, -1].tolist()) | {"lowest": losses[name].min(axis=1).mean()}
        row |= mean_and_spread("behind", (losses[name] - losses[lora])[:, -1].tolist())
        row |= mean_and_spread("elsewhere", equal[name].tolist())
        row |= mean_and_spread("share", (equal[name] / equal[lora]).tolist())
        rows.append(row | mean_and_spread("seconds", [run.seconds for run in found.values()]))
    return rows


MEASURED = ("loss", "behind", "elsewhere", "share", "seconds")
COLUMNS = {"adapter": "<32", "parameters": "10,d", "lowest": "7.3f"}
COLUMNS |= {key: "16.3f" for name in MEASURED for key in (name, f"{name}_spread")}


def main() -> None:
    """Measure, print, write."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="training seeds (default: %(default)s)")
    parser.add_argument("--first_seed", type=int, default=1, help="the first of them (default: %(default)s)")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--rates", nargs="+", type=float, help="rates to try of each adapter (default: its own)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds, table = range(options.first_seed, options.first_seed + options.seeds), Table(COLUMNS)
    cases = [(name, seed) for name in options.subjects for seed in seeds]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in options.subjects:
            write_dataset(folder / name, name)
        for size in dict.fromkeys(adapter.size for adapter in ADAPTERS.values()):
            runs = dict[str, dict[tuple[str, int], Trained]]()
            for name, adapter in ADAPTERS.items():
                for rate in (options.rates or [adapter.rate]) if adapter.size == size else []:
                    own = {**adapter.options, "learning_rate": rate}
                    runs[f"{name}, {rate:g}"] = {case: train_adapter(folder, *case, own) for case in cases}
            for row in rows_of(runs):
                table.add(row)
    finish(table.rows, {}, options.json)


if __name__ == "__main__":
    main()
