"""What headers tell, against diffusers' and transformers' own classes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

from library.config.model_layouts import is_lora
from library.errors import UserError
from library.models.inspection import Component, components, weight_sets
from library.safetensors_io import read_entries
from tests.tiny import (
    bfl_state_dict,
    bfl_vae_state_dict,
    tiny_flux_pipeline,
    tiny_flux_transformer,
    tiny_text_encoders,
    tiny_vae,
)
from tests.tiny_ernie_image import tiny_ernie_transformer
from tests.tiny_flux2 import bfl_flux2_state_dict, tiny_flux2_transformer
from tests.tiny_flux3 import bfl_name, tiny_flux3_transformer
from tests.tiny_krea2 import published_state_dict, tiny_krea2_transformer
from tests.tiny_qwen_21 import tiny_21_transformer, tiny_21_vae
from tests.tiny_z_image import comfy_state_dict, tiny_z_transformer


def one_component(path: Path) -> Component:
    (weights,) = weight_sets(path)
    (component,) = components(weights)
    return component


def qwen_image() -> nn.Module:
    return QwenImageTransformer2DModel(
        num_layers=2, attention_head_dim=32, num_attention_heads=2, joint_attention_dim=64, axes_dims_rope=(8, 12, 12)
    )


def qwen_vae() -> nn.Module:
    return AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1)


def llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaModel(LlamaConfig(vocab_size=50, **sizes))


def gpt2() -> nn.Module:
    return GPT2Model(GPT2Config(vocab_size=50, n_positions=8, n_embd=32, n_layer=2, n_head=2))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "flux": (lambda: tiny_flux_transformer(double_blocks=2), "FLUX.1 transformer (diffusers' names)"),
    "qwen": (qwen_image, "Qwen-Image transformer"),
    "qwen_21": (tiny_21_transformer, "Qwen-Image-2.1 transformer"),
    "z_image": (tiny_z_transformer, "Z-Image transformer"),
    "flux2": (lambda: tiny_flux2_transformer(2), "FLUX.2 transformer (diffusers' names)"),
    "flux3": (tiny_flux3_transformer, "FLUX.3 transformer (diffusers' names)"),
    "krea2": (tiny_krea2_transformer, "Krea 2 transformer"),
    "ernie": (tiny_ernie_transformer, "ERNIE-Image transformer"),
    "vae": (tiny_vae, "image autoencoder, AutoencoderKL (diffusers' names)"),
    "qwen_vae": (qwen_vae, "Qwen-Image autoencoder (diffusers' names)"),
    "qwen_21_vae": (tiny_21_vae, "Qwen-Image-2.1 autoencoder (diffusers' names)"),
    "clip": (lambda: tiny_text_encoders(50, 60)[0], "CLIP text encoder"),
    "t5": (lambda: tiny_text_encoders(50, 60)[1], "T5 encoder"),
    "llama": (llama, "Llama-style language model"),
    "gpt2": (gpt2, "GPT-2 language model"),
}


@pytest.mark.parametrize("name", MODELS)
def test_architecture_parameters_and_bytes_are_those_of_the_class(name: str, tmp_path: Path) -> None:
    build, title = MODELS[name]
    model = build()
    path = tmp_path / "model.safetensors"
    state = dict(model.state_dict())
    if name == "t5":
        del state["encoder.embed_tokens.weight"]  # the same tensor as shared.weight; published files hold one
    save_file(state, path)
    found = one_component(path)
    assert found.architecture == title
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.bytes == 4 * found.parameters
    assert found.dtypes == {"F32": found.parameters}


ORIGINALS: dict[str, tuple[Callable[[], nn.Module], Callable[..., dict[str, Tensor]], str]] = {
    "flux": (lambda: tiny_flux_transformer(double_blocks=2), bfl_state_dict, "FLUX.1 transformer (Black Forest Labs'"),
    "flux2": (lambda: tiny_flux2_transformer(2), bfl_flux2_state_dict, "FLUX.2 transformer (Black Forest Labs'"),
    "flux3": (
        lambda: tiny_flux3_transformer(flow_map=True),
        lambda state: {bfl_name(name): tensor for name, tensor in state.items()},
        "FLUX.3 transformer (Black Forest Labs'",
    ),
    "z_image": (tiny_z_transformer, comfy_state_dict, "Z-Image transformer"),
    "krea2": (tiny_krea2_transformer, published_state_dict, "Krea 2 transformer"),
    "ernie": (tiny_ernie_transformer, dict, "ERNIE-Image transformer"),
    "vae": (tiny_vae, bfl_vae_state_dict, "image autoencoder, AutoencoderKL (Black Forest Labs'"),
}
FACTS = {"flux": {"width": 64, "guidance": True}, "flux3": {"width": 64, "distilled": True}, "krea2": {"width": 64}}
FACTS["ernie"] = {"width": 64}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("name", ORIGINALS)
def test_original_names_are_recognised(name: str, prefix: str, tmp_path: Path) -> None:
    build, renamed, title = ORIGINALS[name]
    model = build()
    state = {prefix + key: each.contiguous() for key, each in renamed(model.state_dict()).items()}
    save_file(state, tmp_path / "m.safetensors")
    found = one_component(tmp_path / "m.safetensors")
    assert found.architecture.startswith(title)
    assert found.name == prefix.rstrip(".")
    if name in FACTS:
        assert found.facts == FACTS[name]
    if name == "flux":
        assert found.blocks == {"double_blocks": 2, "single_blocks": 2}


def test_a_pipeline_folder_gives_its_parts_and_an_all_in_one_file_its_components(tmp_path: Path) -> None:
    folder = tiny_flux_pipeline(tmp_path / "pipeline")
    sets = weight_sets(folder)
    assert [weights.name for weights in sets] == ["text_encoder", "text_encoder_2", "transformer", "vae"]
    assert [component.name for weights in sets for component in components(weights)] == [w.name for w in sets]
    flux = {f"model.diffusion_model.{k}": v for k, v in bfl_state_dict(tiny_flux_transformer().state_dict()).items()}
    vae = {f"vae.{key}": tensor for key, tensor in bfl_vae_state_dict(tiny_vae().state_dict()).items()}
    clip = {f"text_encoders.clip_l.transformer.{k}": v for k, v in tiny_text_encoders(50, 60)[0].state_dict().items()}
    path = tmp_path / "all.safetensors"
    save_file(flux | vae | clip | {"scaled_fp8": torch.zeros(0)}, path)
    found = {component.name: component.architecture for component in components(weight_sets(path)[0])}
    assert found == {
        "model.diffusion_model": "FLUX.1 transformer (Black Forest Labs' names)",
        "vae": "image autoencoder, AutoencoderKL (Black Forest Labs' names)",
        "text_encoders.clip_l.transformer": "CLIP text encoder",
    }


def test_shards_are_one_model_and_loose_files_several(tmp_path: Path) -> None:
    state = tiny_flux_transformer().state_dict()
    names = sorted(state)
    for number, part in ((1, names[:40]), (2, names[40:])):
        save_file({name: state[name] for name in part}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    loose = weight_sets(tmp_path)
    assert [weights.name for weights in loose] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert len(weight_sets(tmp_path / loose[0].name)[0].tensors) == len(names), "a shard is named for all"
    place = {name: f"model-0000{1 if name in names[:40] else 2}-of-00002.safetensors" for name in names}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": place}))
    assert one_component(tmp_path).parameters == sum(tensor.numel() for tensor in state.values())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert len(weight_sets(tmp_path / loose[0].name)[0].tensors) == 40, "what is there is shown"
    with pytest.raises(UserError, match="model-00002-of-00002.safetensors: missing, but model.safetensors.index.json"):
        weight_sets(tmp_path)


def test_scales_count_as_bytes_and_not_as_parameters(tmp_path: Path) -> None:
    path = tmp_path / "fp8.safetensors"
    save_file(
        {
            "blocks.0.up.weight": torch.zeros(8, 4, dtype=torch.float8_e4m3fn),
            "blocks.0.up.bias": torch.zeros(8, dtype=torch.bfloat16),
            "blocks.0.up.scale_weight": torch.ones(()),
            "scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn),
        },
        path,
    )
    found = one_component(path)
    assert found.dtypes == {"F8_E4M3": 32, "BF16": 8}
    assert (found.parameters, found.bytes) == (40, 32 + 16 + 4 + 2)


def test_an_unknown_architecture_is_called_so(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a.weight": torch.zeros(3), "a.bias": torch.zeros(3), "b.weight": torch.zeros(2, 3, 5)}, path)
    found = one_component(path)
    assert found.architecture == "unknown architecture"


def write_sparse(path: Path, layers: int, width: int) -> int:
    """Write the header of ``layers`` square fp32 matrices and a file as long as their data, without the data."""
    header, end = {}, 0
    for i in range(layers):
        start, end = end, end + 4 * width * width
        header[f"double_blocks.{i}.img_attn.qkv.weight"] = {
            "dtype": "F32", "shape": [width, width], "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return 8 + len(text)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts the bytes read with Linux's /proc")
def test_a_file_of_many_gigabytes_takes_no_time_and_only_its_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    header = write_sparse(path, layers=800, width=4096)
    assert path.stat().st_size > 50e9

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

    before, begun = bytes_read(), time.perf_counter()
    found = one_component(path)
    seconds, read = time.perf_counter() - begun, bytes_read() - before
    assert found.parameters == 800 * 4096 * 4096
    assert seconds < 1  # measured: 0.03
    assert read < 2 * header + 65536  # the header, its length twice, a buffer's worth beyond


def test_a_file_that_ends_early_is_remarked_on(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    save_file({"a.weight": torch.zeros(10, 10)}, path)
    assert weight_sets(path)[0].notes == ()
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 60)
    assert read_entries([path], may_be_cut=True)[0]
    assert weight_sets(path)[0].notes == (f"{path}: 60 bytes are missing at its end; download it again",)


def test_what_holds_no_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no .safetensors or .gguf weights in this folder; give"):
        weight_sets(tmp_path)
    with pytest.raises(UserError, match="nothing: no such file or folder; check the path"):
        weight_sets(tmp_path / "nothing")
    for name, message in (("model.ckpt", "weights are read from .safetensors and"), ("m.safetensors", "not a safeten")):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(UserError, match=f"{name}: {message}"):
            weight_sets(tmp_path / name)


def test_loras_are_known_by_their_keys() -> None:
    loras = (
        "lora_unet_x_qkv.lora_down.weight",
        "base_model.model.x.lora_A.default.weight",
        "lycoris_x.lokr_w1",
        "x.hada_w1_a",
    )
    assert all(is_lora([key]) for key in loras)
    assert not is_lora(["double_blocks.0.img_attn.qkv.weight"])
