"""tools/merge_lora.py as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from library.errors import UserError
from library.models.flux.files import FLUX_TARGETS
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from networks.merging.merge import LoraSource
from tests.forked import run_script
from tools.command import lora_source

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "merge_lora.py"


def test_two_loras_are_merged_at_their_strengths(tmp_path: Path) -> None:
    base = torch.zeros(6, 2)
    save_file({"double_blocks.0.img_attn.qkv.weight": base.half()}, tmp_path / "base.safetensors")
    for name, column in (("a", [1.0, 0.0]), ("b", [0.0, 1.0])):
        lora = {"transformer_blocks.0.attn.to_k": LoraWeights(torch.tensor([column]), torch.ones(2, 1), 2.0)}
        save_adapter(tmp_path / f"{name}.safetensors", lora, FLUX_TARGETS)
    words = ["--model", "base.safetensors", "--lora", "a.safetensors:0.5", "b.safetensors"]
    words += ["--save_to", "m.safetensors", "--save_precision", "bf16"]
    done = run_script(SCRIPT, words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "m.safetensors: 1 of 1 tensor changed by 2 LoRAs\n"
    merged = load_file(tmp_path / "m.safetensors")["double_blocks.0.img_attn.qkv.weight"]
    assert merged.dtype == torch.bfloat16
    # k is rows 2 and 3; alpha 2 at rank 1 doubles, and a counts half
    assert merged.tolist() == [[0, 0], [0, 0], [1, 2], [1, 2], [0, 0], [0, 0]]


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    words = ["--model", "none", "--lora", "a.safetensors", "--save_to", "m.safetensors"]
    done = run_script(SCRIPT, words, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --model 'none' does not exist; give a local file or folder, or a name on the")
    assert done.stderr.count("\n") == 1


def test_strength_follows_the_last_colon_unless_a_file_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "a:0.5").touch()
    for text, path, strength in (
        ("a.safetensors", "a.safetensors", 1.0),
        ("dir/a:b.safetensors:-1", "dir/a:b.safetensors", -1.0),
        ("C:/loras/a.safetensors", "C:/loras/a.safetensors", 1.0),
        (f"{tmp_path}/a:0.5", f"{tmp_path}/a:0.5", 1.0),
    ):
        assert lora_source(text) == LoraSource(Path(path), strength)
    with pytest.raises(UserError, match=r"--lora a.safetensors:high: 'high' is not a number; write"):
        lora_source("a.safetensors:high")
