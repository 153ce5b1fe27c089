"""A LoRA file's self-description, its hashes recomputed from the file's bytes."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import safetensors.torch
import torch

from library.models.flux.files import FLUX_TARGETS
from networks.files.adapters import load_lora
from networks.files.metadata import build_metadata
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter


def test_training_facts_and_modelspec_have_kohyas_keys_and_string_values() -> None:
    facts = {
        "network_dim": 16,
        "network_alpha": 8.0,
        "learning_rate": 1e-4,
        "seed": None,
        "gradient_checkpointing": True,
    }
    metadata = build_metadata(
        facts, FLUX_TARGETS, title="cat", timestamp=1700000000.7, architecture="flux-1-schnell", resolution=(768, 512),
        spec={"description": "mine"}, base_fingerprint="abc", config='{"a": 1}', version="0.1", attention=None,
    )  # fmt: skip
    assert metadata == {
        "ss_network_module": "networks.lora_flux",
        "ss_base_model_version": "flux1",
        "ss_output_name": "cat",
        "ss_network_dim": "16",
        "ss_network_alpha": "8.0",
        "ss_learning_rate": "0.0001",
        "ss_seed": "None",
        "ss_gradient_checkpointing": "True",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": "flux-1-schnell/lora",
        "modelspec.implementation": "https://github.com/black-forest-labs/flux",
        "modelspec.title": "cat",
        "modelspec.resolution": "768x512",
        "modelspec.date": "2023-11-14T22:13:20+00:00",
        "modelspec.description": "mine",
        "tandem.version": "0.1",
        "tandem.base_fingerprint": "abc",
        "tandem.config": '{"a": 1}',
    }


def test_hashes_are_those_of_the_file(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    weights = {  # over 1 MiB in bf16, so that the legacy hash sees data; alphas are fp32 beside it
        f"transformer_blocks.{i}.ff.net.2": LoraWeights(
            torch.randn(64, 4096, generator=rng), torch.randn(1024, 64, generator=rng), 32.0
        )
        for i in range(3)
    }
    path = tmp_path / "a.safetensors"
    save_adapter(path, weights, FLUX_TARGETS, "kohya", "bf16", {"ss_seed": "1", "modelspec.title": "cat"})
    data = path.read_bytes()
    (header,) = struct.unpack("<Q", data[:8])
    metadata = load_lora(path, FLUX_TARGETS).metadata
    digest = hashlib.sha256(data[8 + header :]).hexdigest()
    assert metadata["modelspec.hash_sha256"] == f"0x{digest}"
    assert metadata["sshs_model_hash"] == digest
    # sd-webui's old hash, over the file as it is with the ss_ metadata alone
    alone = safetensors.torch.save(safetensors.torch.load(data), {"ss_seed": "1"})
    assert metadata["sshs_legacy_hash"] == hashlib.sha256(alone[0x100000:0x110000]).hexdigest()[:8]


def test_a_name_with_bytes_that_are_not_utf8_is_spelt_in_the_metadata(tmp_path: Path) -> None:
    weights = {"transformer_blocks.0.attn.to_q": LoraWeights(torch.ones(2, 64), torch.ones(64, 2), 2.0)}
    path = tmp_path / "a.safetensors"
    save_adapter(path, weights, FLUX_TARGETS, "kohya", metadata={"ss_sd_model_name": "caf\udce9.safetensors"})
    assert load_lora(path, FLUX_TARGETS).metadata["ss_sd_model_name"] == "caf\\udce9.safetensors"
