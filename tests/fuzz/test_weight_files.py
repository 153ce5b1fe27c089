"""Safetensors headers, and the keys and shapes of LoRA files."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from library.config.kinds import kind_of
from library.models.inspection import components, weight_sets
from library.models.registry import lora_targets
from library.precision.checkpoint import WeightFiles
from library.safetensors_io import DTYPES, RowRange, read_safetensors_header
from networks.files.adapters import load_adapter
from networks.files.detection import likely_targets
from networks.files.inspection import inspect_lora
from tests.fuzz import harmless, share_of_cases
from tests.networks.conftest import inject, make_flux

NAMES = ["a", "b.weight", "b.weight_scale", "b.comfy_quant", "scaled_fp8", "__metadata__", "", "c.absmax", "𝕬\0"]
numbers = st.integers(0, 24) | st.sampled_from([-1, 2**31, 2**62, 2**63, 2**64, 10**30, 0.5, True, None, "1", []])
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*DTYPES, "F4", "F8_E8M0", "X", "", None, 3]),
        "shape": st.lists(numbers, max_size=3) | numbers,
        "data_offsets": st.lists(numbers, max_size=3) | numbers,
        "more": numbers,
    },
)
headers = st.dictionaries(
    st.sampled_from(NAMES), entries | numbers | st.dictionaries(st.text(max_size=3), numbers), max_size=4
)
WHOLE = save(
    {
        "b.weight": torch.ones(2, 3),
        "b.weight_scale": torch.ones(()),
        "h": torch.ones(3).half(),
        "u": torch.ones(1).byte(),
    },
    {"format": "pt"},
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def open_all(path: Path) -> None:
    """Do with a weight file what opening a model does, and compare with the safetensors library where it is taken."""
    header = harmless(read_safetensors_header, path)
    files = harmless(WeightFiles, path)
    for weights in harmless(weight_sets, path) or ():
        harmless(components, weights)
    harmless(inspect_lora, path)
    harmless(kind_of, str(path))
    if header is None or files is None:
        return
    try:
        with safe_open(path, "pt") as theirs:
            keys = set(theirs.keys())
    except SafetensorError:
        return
    assert header.keys() - {"__metadata__"} == keys
    for name in files.names:
        harmless(files.read, [RowRange(name)])


@share_of_cases(0.07)
@given(header=headers, data=st.integers(0, 64), length=st.none() | st.integers(0, 2**64 - 1))
def test_any_header_is_taken_or_refused(folder: Path, header: dict, data: int, length: int | None) -> None:
    text = json.dumps(header).encode()
    path = folder / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(data))
    open_all(path)


@share_of_cases(0.07)
@given(data=st.data())
def test_any_damage_to_a_file_is_taken_or_refused(folder: Path, data: st.DataObject) -> None:
    content = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    path = folder / "a.safetensors"
    path.write_bytes(content[:end])
    open_all(path)


stems = st.tuples(
    st.sampled_from(
        ["", "transformer.", "lora_unet_", "lycoris_", "diffusion_model.", "base_model.model.", "lora_te1_", "x."]
    ),
    st.sampled_from(
        [
            "transformer_blocks.0.attn.to_q", "transformer_blocks_0_attn_to_k", "double_blocks.0.img_attn.qkv",
            "double_blocks_0_img_attn_qkv", "single_blocks.1.linear1", "single_transformer_blocks.0.proj_mlp",
            "transformer_blocks.99999999999999999999.attn.to_v", "text_model.encoder.layers.0.mlp.fc1",
            "layers.0.attention.to_q",
            "model.layers.0.self_attn.q_proj", "norm_out.linear", "",
        ]
    ),
).map("".join)  # fmt: skip
suffixes = st.sampled_from(
    [
        ".lora_A.weight", ".lora_B.weight", ".lora_down.weight", ".lora_up.weight", ".alpha", ".lora_magnitude_vector",
        ".dora_scale", ".lokr_w1", ".lokr_w2", ".lokr_w1_a", ".lokr_w2_b", ".hada_w1_a", ".hada_w1_b", ".oft_blocks",
        ".diff", ".weight", "",
    ]
)  # fmt: skip
shapes = st.sampled_from(
    [(), (0,), (1,), (2,), (2, 32), (32, 2), (96, 2), (2, 0), (32,), (32, 1), (2, 4, 4), (1, 2, 4, 4)]
)
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
adapter_metadata = st.sampled_from(
    ["", "{", "[]", "1", '{"transformer.r": 0}', '{"transformer.r": "x", "transformer.lora_alpha": null}',
     '{"transformer.lora_alpha": "x"}', '{"transformer.alpha_pattern": {"(": 1}}', '{"transformer.alpha_pattern": [1]}',
     '{"transformer.r": 2, "transformer.lora_alpha": 1e400, "transformer.rank_pattern": []}', "[" * 5000]
)  # fmt: skip
NETWORK = inject(make_flux(), dim=2)


@share_of_cases(0.1)
@given(
    keys=st.dictionaries(st.tuples(stems, suffixes).map("".join), st.tuples(shapes, dtypes), max_size=5),
    paired=st.lists(st.tuples(stems, st.sampled_from([(32, 32), (96, 32), (32, 128), (160, 32)])), max_size=2),
    family=st.sampled_from(sorted(lora_targets())),
    metadata=st.dictionaries(
        st.sampled_from(["lora_adapter_metadata", "tandem.config", "x"]), adapter_metadata, max_size=2
    ),
    value=st.sampled_from([0.0, 1.0, float("nan"), -1e30]),
)
def test_any_lora_keys_are_taken_or_refused(
    folder: Path, keys: dict, paired: list, family: str, metadata: dict[str, str], value: float
) -> None:
    tensors = {key: torch.full(shape, value).to(dtype) for key, (shape, dtype) in keys.items()}
    for stem, (rows, columns) in paired:
        tensors |= {f"{stem}.lora_A.weight": torch.ones(2, columns), f"{stem}.lora_B.weight": torch.ones(rows, 2)}
    path = folder / "lora.safetensors"
    path.write_bytes(save(tensors, metadata or None))  # of {} and {}, safetensors 0.8 makes no JSON
    harmless(load_adapter, path, lora_targets()[family])
    harmless(likely_targets, read_safetensors_header(path))
    harmless(inspect_lora, path)
    before = {name: tensor.clone() for name, tensor in NETWORK.state_dict().items()}
    taken = harmless(NETWORK.load_file, path)
    assert taken is not None or all(torch.equal(before[n], t) for n, t in NETWORK.state_dict().items())
    for name, tensor in NETWORK.state_dict().items():
        tensor.copy_(before[name])
