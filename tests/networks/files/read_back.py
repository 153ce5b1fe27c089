"""A LoRA file read back, compared with the network it was written from."""

from __future__ import annotations

from pathlib import Path

import torch

from library.models.layer_names import LoraTargets
from networks.files.adapters import load_lora
from networks.files.layouts import layout_of
from networks.network import AdapterNetwork


def assert_read_as_written(path: Path, network: AdapterNetwork, targets: LoraTargets, save_format: str) -> None:
    """Hold a file's layout, and every layer's A, B and alpha, to what was saved in fp32."""
    read = load_lora(path, targets)
    assert read.layout == save_format
    for name, weights in network.weights().items():
        if read.weights[name].rank != weights.rank:  # a layer that is joined there has its parts' ranks together
            found, update = ((w.up @ w.down) * w.scale for w in (read.weights[name], weights))
            torch.testing.assert_close(found, update, rtol=1e-5, atol=1e-6)
            continue
        assert torch.equal(read.weights[name].down, weights.down)
        if layout_of("lora", save_format, targets).alpha == "folded":  # alpha / rank is in B there
            assert read.weights[name].alpha == read.weights[name].rank
            torch.testing.assert_close(read.weights[name].up, weights.up * weights.scale, rtol=1e-7, atol=0)
        else:
            assert torch.equal(read.weights[name].up, weights.up)
            assert read.weights[name].alpha == weights.alpha
