"""The tiny base model and dataset, made once for all tests of whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chat_runs import write_place
from tests.pretraining_runs import write_corpus
from tests.runs import write_base, write_dataset


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny FLUX pipeline."""
    return write_base(tmp_path_factory.mktemp("base") / "tiny-flux")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight 64 x 64 images in one bucket, batches of four."""
    return write_dataset(tmp_path_factory.mktemp("data"), text="batch_size = 4")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus for language models."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny language models with a tokenizer, and conversations to learn by heart."""
    return write_place(tmp_path_factory.mktemp("llm"))
