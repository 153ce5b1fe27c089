"""What the trainer will say first of a model and a dataset, asked of a process of its own: looking needs torch.

    python -m library.web.trainable MODEL DATASET SEED     # MODEL, DATASET: the configuration's sections as JSON

prints the reason against them in UTF-8, or nothing. Headers are read and images listed; nothing is decoded or stored.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from library.config.model_types import MODEL_TYPES
from library.config.published_models import MODEL
from library.config.schema import DatasetArguments, ModelConfig, TrainConfig
from library.errors import printable
from library.web.jobs import ROOT

_KEPT, _MOST_SECONDS = 30, 60  # how long an answer holds, how long one may take


def reason_against(config: TrainConfig) -> str:
    """Return in a line what the trainer would refuse of model and dataset, "" if nothing; an answer holds 30 s."""
    words = (config.model.model_dump_json(), config.dataset.model_dump_json(), str(config.training.seed))
    return _answer(words, int(time.monotonic() / _KEPT))


@lru_cache(maxsize=8)
def _answer(words: tuple[str, ...], period: int) -> str:
    command = [sys.executable, "-m", "library.web.trainable", *words]
    # the folder stays the page's, which paths begin at
    surroundings = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8:surrogateescape"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=_MOST_SECONDS, env=surroundings, check=False)
    except subprocess.TimeoutExpired:  # a dataset on a slow disk: the run itself will tell
        return ""
    said, why = (one.decode(errors="surrogateescape").strip() for one in (done.stdout, done.stderr))
    if done.returncode:
        why = why.rpartition("\n")[2] or f"its process ended with {done.returncode}"
        said = f"model and dataset could not be looked at ({why}); try again, or start the run in a terminal"
    return printable(said)


def _look(model: str, dataset: str, seed: str) -> str:
    from library.data.config import load_dataset_config  # with torch, which the page does without
    from library.data.samples import scan
    from library.models.family_files import files_of
    from library.models.files import locate

    arguments, config = DatasetArguments.model_validate_json(dataset), ModelConfig.model_validate_json(model)
    kind, key = MODEL_TYPES[config.model_type], MODEL
    paths = [path for option in (MODEL, *kind.files) if (path := getattr(config, option))]
    try:
        if all(Path(path).expanduser().exists() for path in paths):  # what is on the hub is not downloaded
            locate(config, files_of(config.model_type))
        key = "dataset_config"
        found = load_dataset_config(arguments.dataset_config, arguments, kind.conditioning)
        with tempfile.TemporaryDirectory() as scratch:
            datasets = tuple(replace(each, cache_directory=Path(scratch)) for each in found.datasets)
            scan(replace(found, datasets=datasets), int(seed), kind.pixel_multiple)
    except (OSError, ValueError) as error:  # a UserError is a ValueError
        return f"{key}: {error}".partition("\n")[0]
    return ""


if __name__ == "__main__":
    print(_look(*sys.argv[1:]))
