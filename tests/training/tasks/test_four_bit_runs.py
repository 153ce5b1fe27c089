"""Whole runs on GGUF and nf4 files: the LoRA is that of the same numbers in fp32, and the file is never merged into."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from library.errors import UserError
from library.models.inspection import components, weight_sets
from library.precision.linear import QuantizedLinear
from networks.files.base import check_target, open_base
from tests.precision.files.gguf_files import image_model_types, read_by_the_package, write_gguf
from tests.precision.files.nf4_files import nf4_of
from tests.runs import largest_difference, lora, metadata, run, write_dataset
from tests.tiny import SingleFiles, save_single_files, tiny_flux_pipeline

SAME_IN_FP32 = 2e-4  # other orders of summation, as in test_flux_runs


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SingleFiles:
    pipeline = tiny_flux_pipeline(tmp_path_factory.mktemp("bf16") / "p", dtype=torch.bfloat16)
    return save_single_files(pipeline, pipeline.parent / "single")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data"), images=2)


def base(kind: str, files: SingleFiles, folder: Path) -> tuple[Path, Path]:
    """Return a file of ``kind``, and one of its numbers in fp32."""
    state, plain = load_file(files.transformer), folder / "plain.safetensors"
    if kind == "nf4":
        stored, numbers = nf4_of(state, "", True)
        save_file(stored, folder / "nf4.safetensors")
        save_file(numbers, plain)
        return folder / "nf4.safetensors", plain
    path = write_gguf(folder / "flux.gguf", state, image_model_types(kind))
    save_file(read_by_the_package(path), plain)
    return path, plain


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "nf4"])
def test_the_lora_is_that_of_the_dequantised_model(
    kind: str, files: SingleFiles, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantised, plain = base(kind, files, tmp_path)
    settings = files.model_config().model_dump(include={"ae", "clip_l", "t5xxl", "clip_l_tokenizer", "t5xxl_tokenizer"})
    settings |= {"mixed_precision": "no", "max_train_steps": 2}
    events = run(quantised, dataset, tmp_path / "own", **settings)
    assert sum(isinstance(module, QuantizedLinear) for module in events.task.transformer.modules()) == 26
    run(plain, dataset, tmp_path / "theirs", **settings)
    assert largest_difference(lora(tmp_path / "own"), lora(tmp_path / "theirs")) < SAME_IN_FP32
    kept = metadata(tmp_path / "own")["tandem.base_precision"]
    assert "26 linear weights" in kept
    assert kept.startswith("nf4" if kind == "nf4" else "gguf")
    assert kind in " ".join(capsys.readouterr().out.split())
    # a LoRA merged into the base before training leaves those layers in high precision, as the servers add it
    first = {"base_weights": [tmp_path / "own" / "lora.safetensors"]}
    run(quantised, dataset, tmp_path / "own_second", **settings, **first)
    run(plain, dataset, tmp_path / "their_second", **settings, **first)
    assert largest_difference(lora(tmp_path / "own_second"), lora(tmp_path / "their_second")) < SAME_IN_FP32


@pytest.mark.parametrize("kind", ["Q8_0", "nf4"])
def test_such_a_file_is_described_and_never_merged_into(kind: str, files: SingleFiles, tmp_path: Path) -> None:
    quantised, plain = base(kind, files, tmp_path)
    with pytest.raises(UserError, match=f"{quantised.name}: {kind} of .* is read only here; .* so nothing needs to be"):
        check_target(open_base(quantised, quantized=True), tmp_path / "merged.safetensors", None)
    with pytest.raises(UserError, match="merge into the bf16 or fp16 file"):
        open_base(quantised)
    (own,), (theirs,) = (components(weight_sets(path)[0]) for path in (quantised, plain))
    assert (own.parameters, own.architecture, own.blocks) == (theirs.parameters, theirs.architecture, theirs.blocks)
    assert {group.name: group.shape for group in own.modules} == {group.name: group.shape for group in theirs.modules}
    assert kind in own.dtypes
