"""Quantised files of the families in the names that they are published with: the file's numbers in the running model.

Every format that is written here, GGUF and bitsandbytes' nf4 as ComfyUI-GGUF, diffusers and lllyasviel write them, the
published fp8 files of Qwen-Image and T5.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import gguf
import pytest
import torch
from diffusers import BitsAndBytesConfig, FluxTransformer2DModel
from diffusers.quantizers.bitsandbytes.bnb_quantizer import BnB4BitDiffusersQuantizer
from gguf import MODEL_ARCH, GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tools.quantize_model as quantize_model
from library.errors import UserError
from library.models.family_by_name import model_family
from library.models.flux.text import check_t5, load_t5
from library.models.flux2.text import MISTRAL
from library.models.qwen3 import VL_THETA, load_qwen3, qwen3_width
from library.models.qwen_image.text import check_qwen_text, load_qwen_text
from library.precision.files.fp8 import Fp8Scheme
from library.precision.linear import QuantizedLinear
from library.precision.recipe import Recipe, WeightLoader
from tests.precision.files.gguf_files import blocks_of, image_model_types, read_by_the_package, write_gguf
from tests.precision.files.nf4_files import nf4_of
from tests.runs import call
from tests.tiny import save_single_files, tiny_flux_inputs, tiny_flux_pipeline, tiny_text_encoders
from tests.tiny_ernie_image import save_ernie_split_files, tiny_ernie_inputs, tiny_ernie_pipeline
from tests.tiny_flux2 import save_flux2_files, tiny_flux2_inputs, tiny_flux2_pipeline
from tests.tiny_krea2 import save_krea2_split_files, tiny_krea2_inputs, tiny_krea2_pipeline
from tests.tiny_qwen import (
    save_split_files,
    tiny_qwen_inputs,
    tiny_qwen_pipeline,
    tiny_qwen_text_encoder,
    tiny_qwen_tokenizer,
)
from tests.tiny_qwen_21 import tiny_21_text_encoder
from tests.tiny_z_image import save_z_split_files, tiny_z_inputs, tiny_z_pipeline, tiny_z_text_encoder

FP8 = torch.float8_e4m3fn
# a K-quant has blocks of 256 numbers, FLUX.2's blocks of 128 need 8 heads
WRITERS: dict[str, tuple[Callable[..., Path], dict[str, int], Callable[..., Any], Callable[..., dict[str, Tensor]]]] = {
    "flux": (tiny_flux_pipeline, {"heads": 4, "head_dim": 64}, save_single_files, tiny_flux_inputs),
    "flux2_klein": (tiny_flux2_pipeline, {"single_blocks": 1, "heads": 8}, save_flux2_files, tiny_flux2_inputs),
    "krea2": (tiny_krea2_pipeline, {}, save_krea2_split_files, tiny_krea2_inputs),
    "ernie_image": (tiny_ernie_pipeline, {}, save_ernie_split_files, tiny_ernie_inputs),
    "z_image": (tiny_z_pipeline, {}, save_z_split_files, tiny_z_inputs),
    "qwen_image": (tiny_qwen_pipeline, {}, save_split_files, tiny_qwen_inputs),
}


@dataclass(frozen=True)
class Model:
    """A family's tiny model: its pipeline's folder and its published files."""

    folder: Path
    files: Any
    inputs: dict[str, Tensor]

    def loaded(self, path: Path) -> tuple[nn.Module, Tensor, int]:
        """Return the transformer in ``path``, its velocity, and how many layers are quantised."""
        family = model_family(self.files.model_config(pretrained_model_name_or_path=str(path)))
        loading = WeightLoader(compute="dequant")
        transformer = family.load_transformer(torch.float32, fp8=loading)
        text = {name: each for name, each in self.inputs.items() if name not in ("latents", "sigmas")}
        with torch.no_grad():
            velocity = family.predict_velocity(transformer, self.inputs["latents"], self.inputs["sigmas"], text, 3.5)
        count = sum(isinstance(layer, QuantizedLinear) for layer in transformer.modules())
        assert count == loading.read
        return transformer, velocity, count


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in made:
            root, (write, sizes, save, inputs) = tmp_path_factory.mktemp(name), WRITERS[name]
            folder = write(root / "pipeline", **sizes)
            made[name] = Model(folder, save(folder, root / "files"), inputs())
        return made[name]

    return model


def q8_where(*beginnings: str) -> Callable[[str, Tensor], str]:
    """Return the types of a file whose blocks are Q8_0, as far as their rows are whole blocks of 32."""
    return lambda name, tensor: "Q8_0" if name.startswith(beginnings) and tensor.shape[-1] % 32 == 0 else "F16"


GGUFS = {
    **{f"flux {kind}": ("flux", image_model_types(kind), "", 26) for kind in ("Q8_0", "Q4_K", "Q5_0")},
    "flux below a prefix": ("flux", image_model_types("Q4_K"), "model.diffusion_model.", 26),
    "flux2_klein": ("flux2_klein", q8_where("double_blocks.", "single_blocks."), "", 12 + 2),
    "krea2": ("krea2", q8_where("blocks."), "", 16),
    "ernie_image": ("ernie_image", q8_where("layers."), "", 14),
    "z_image": ("z_image", q8_where("layers."), "", 14),
}


@pytest.mark.parametrize("name", GGUFS)
def test_a_gguf_file_is_the_model_of_its_numbers(name: str, models: Callable[[str], Model], tmp_path: Path) -> None:
    family, kinds, prefix, count = GGUFS[name]
    model = models(family)
    state = load_file(model.files.transformer)
    # GGUF keeps no single row apart from a vector
    vectors = {key: each[0] if key.endswith("pad_token") else each for key, each in state.items()}
    path = write_gguf(tmp_path / "m.gguf", {prefix + key: each for key, each in vectors.items()}, kinds,
                      architecture={"krea2": "krea2", "z_image": "lumina2"}.get(family, "flux"))  # fmt: skip
    numbers = {key.removeprefix(prefix): each for key, each in read_by_the_package(path).items()}
    save_file({key: each.view(state[key].shape) for key, each in numbers.items()}, tmp_path / "plain.safetensors")
    (own, ours, quantised), (plain, theirs, none) = (
        model.loaded(file) for file in (path, tmp_path / "plain.safetensors")
    )
    assert (quantised, none) == (count, 0)
    for key, layer in own.named_modules():
        if isinstance(layer, QuantizedLinear):
            assert torch.equal(layer.dequantized(torch.float32), plain.get_submodule(key).weight), key
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # multiplied in chunks of other sizes


# What rounding may do to the velocity, from the bits of the mantissa: e4m3 has 4, int8 by rows about 7, e2m1 2.
FORMATS = {
    "--layout plain": 0.1,
    "--layout comfy_scaled": 0.1,
    "--layout comfy_quant": 0.1,
    "--layout rows": 0.1,
    "--layout musubi --scheme block64": 0.1,
    "--scheme int8": 0.05,
    "--layout comfy_quant --scheme int8_convrot": 0.03,
    "--scheme int8_row": 0.02,
    "--scheme nvfp4": 0.3,
}
# the eight layers of both blocks of Krea 2 (the text's transformer stays high, as in musubi-tuner); 12 of the double
# block of FLUX.2, 2 of the single one and the three modulations; of both inputs and the end stay high
LAYERS = {"flux": 26, "flux2_klein": 12 + 2 + 3, "krea2": 16}


def source_of(model: Model) -> Path:
    return getattr(model.files, "comfy_transformer", model.files.transformer)


@pytest.fixture(scope="module")
def velocity_of(models: Callable[[str], Model]) -> Callable[[str], Tensor]:
    """Return the velocity of a family's plain file."""
    return functools.cache(lambda family: models(family).loaded(source_of(models(family)))[1])


@pytest.mark.parametrize("flags", FORMATS)
@pytest.mark.parametrize("family", LAYERS)
def test_a_quantised_file_is_near_the_plain_one(
    family: str, flags: str, models: Callable[[str], Model], velocity_of: Callable[[str], Tensor], tmp_path: Path
) -> None:
    model, path = models(family), tmp_path / "quantised.safetensors"
    call(quantize_model, "--model", source_of(model), "--save_to", path, *flags.split())
    exact = velocity_of(family)
    transformer, velocity, quantised = model.loaded(path)
    assert quantised == LAYERS[family]
    assert 0 < (velocity - exact).norm() / exact.norm() < FORMATS[flags]
    if family == "flux" and "--layout" in flags and "--scheme" not in flags:
        stored = load_file(path)["model.diffusion_model.double_blocks.0.img_attn.qkv.weight"]
        attention: Any = transformer.get_submodule("transformer_blocks.0.attn")
        own = [layer.weight.view(torch.uint8) for layer in (attention.to_q, attention.to_k, attention.to_v)]
        assert torch.equal(torch.cat(own), stored.view(torch.uint8)), "the file's own codes"


@pytest.mark.parametrize("nested", [False, True])
def test_an_all_in_one_nf4_file_is_the_model_of_its_dequantised_weights(
    nested: bool, models: Callable[[str], Model], tmp_path: Path
) -> None:
    model = models("flux")
    stored, plain = nf4_of(load_file(model.files.transformer), "model.diffusion_model.", nested)
    save_file(stored | {"vae.encoder.conv_in.weight": torch.ones(2, 2, 3, 3)}, tmp_path / "nf4.safetensors")
    save_file(plain, tmp_path / "plain.safetensors")
    (_, ours, count), (_, theirs, _) = (model.loaded(tmp_path / f"{name}.safetensors") for name in ("nf4", "plain"))
    assert count == 26
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_folder_that_diffusers_saves_in_nf4_is_the_model_that_it_loads(
    models: Callable[[str], Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # it asks for a GPU, and bitsandbytes quantises on the CPU as well
    monkeypatch.setattr(BnB4BitDiffusersQuantizer, "validate_environment", lambda *_, **__: None)
    model = models("flux")
    for part in model.folder.iterdir():
        if part.name != "transformer":
            (tmp_path / part.name).symlink_to(part)
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["proj_out", "x_embedder"],
    )
    theirs = FluxTransformer2DModel.from_pretrained(
        model.folder / "transformer", quantization_config=how, torch_dtype=torch.float32, device_map="cpu"
    )
    theirs.save_pretrained(tmp_path / "transformer")
    config = json.loads((tmp_path / "transformer" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "bitsandbytes"
    ours, _, count = model.loaded(tmp_path)
    assert count > 20
    for name, module in theirs.named_modules():
        if type(module).__name__ == "Linear4bit":
            own = ours.get_submodule(name)
            assert isinstance(own, QuantizedLinear)
            expected = bnb.dequantize_4bit(module.weight.data, module.weight.quant_state).float()
            assert torch.equal(own.dequantized(torch.float32), expected), name


def test_a_scaled_t5_file_encodes_in_fp8(models: Callable[[str], Model], tmp_path: Path) -> None:
    source, target = models("flux").files.t5xxl, tmp_path / "t5.safetensors"
    call(quantize_model, "--model", source, "--save_to", target)
    ids = torch.randint(0, 40, (1, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        fp8, high = (load_t5(path, torch.bfloat16)(ids)[0] for path in (target, source))
    assert fp8.dtype == torch.bfloat16
    assert float((fp8 - high).float().norm() / high.float().norm()) < 0.1


def test_a_plain_cast_transformer_computes_what_its_numbers_say(models: Callable[[str], Model], tmp_path: Path) -> None:
    """As qwen_image_fp8_e4m3fn.safetensors: every tensor is fp8, biases and norms too."""
    model = models("qwen_image")
    cast = {name: tensor.to(FP8) for name, tensor in load_file(model.files.transformer).items()}
    save_file(cast, tmp_path / "fp8.safetensors")
    save_file({name: tensor.float() for name, tensor in cast.items()}, tmp_path / "same.safetensors")
    (own, ours, count), (_, theirs, _) = (model.loaded(tmp_path / f"{name}.safetensors") for name in ("fp8", "same"))
    assert count == 2 * 14 + 6
    assert isinstance(own.get_submodule("transformer_blocks.0.img_mod.1"), QuantizedLinear)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # fp32 products with the very same numbers


def test_a_scaled_text_encoder_is_used_as_it_is(models: Callable[[str], Model], tmp_path: Path) -> None:
    """As qwen_2.5_vl_7b_fp8_scaled.safetensors: linear weights of the language model with a scale each."""
    files = models("qwen_image").files
    scaled: dict[str, Tensor] = {"scaled_fp8": torch.zeros(0, dtype=FP8)}
    same: dict[str, Tensor] = {}
    for name, tensor in load_file(files.text_encoder).items():
        scaled[name] = same[name] = tensor
        if name.startswith("model.layers.") and tensor.ndim == 2:
            scale = tensor.abs().max() / 448
            scaled[name] = (tensor / scale).to(FP8)
            scaled[name.replace(".weight", ".scale_weight")] = scale
            same[name] = scaled[name].float() * scale
    embeddings = []
    for kind, tensors in (("scaled", scaled), ("same", same)):
        save_file(tensors, tmp_path / f"{kind}.safetensors")
        config = files.model_config(text_encoder=str(tmp_path / f"{kind}.safetensors"))
        encoder = model_family(config).load_text_encoder(torch.float32)
        embeddings.append(encoder.encode(["a red disc, plain"])[0]["prompt_embeds"])
    torch.testing.assert_close(*embeddings, rtol=1e-4, atol=1e-4)  # fp32, two layers of the same numbers
    config = files.model_config(text_encoder=str(tmp_path / "scaled.safetensors"))
    with pytest.raises(UserError, match="fp8_text_encoder: .* is in fp8 already and is used as it is"):
        model_family(config).load_text_encoder(torch.float32, recipe=Recipe(Fp8Scheme("block64")))


def t5() -> tuple[nn.Module, str]:
    return tiny_text_encoders(64, 40)[1], ""


def qwen3() -> tuple[nn.Module, str]:
    return tiny_z_text_encoder(50), "model."


def qwen3_vl() -> tuple[nn.Module, str]:
    return tiny_21_text_encoder(tiny_qwen_tokenizer()).model.language_model, "model."


def qwen2_vl() -> tuple[nn.Module, str]:
    return tiny_qwen_text_encoder(tiny_qwen_tokenizer()).model.language_model, "model."


KINDS: dict[str, tuple[Callable[[], tuple[nn.Module, str]], MODEL_ARCH, Callable[..., Any]]] = {
    "t5": (t5, MODEL_ARCH.T5ENCODER, load_t5),
    "qwen3": (qwen3, MODEL_ARCH.QWEN3, lambda path, dtype: load_qwen3(path, -1, dtype)),
    "qwen3vl": (qwen3_vl, MODEL_ARCH.QWEN3VL, lambda path, dtype: load_qwen3(path, -1, dtype, theta=VL_THETA)),
    "qwen2vl": (qwen2_vl, MODEL_ARCH.QWEN2VL, load_qwen_text),
}


def converted(kind: str, path: Path) -> tuple[Path, dict[str, Tensor]]:
    """Write a tiny encoder as llama.cpp does; return the file, and what its numbers are under transformers' names."""
    build, architecture, _ = KINDS[kind]
    model, prefix = build()
    names = gguf.get_tensor_name_map(architecture, 36)
    theirs: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "encoder.embed_tokens.weight":
            continue  # the same as shared.weight
        theirs_name = names.get_name(prefix + name, try_suffixes=(".weight", ".bias"))
        assert theirs_name is not None, name
        theirs[theirs_name] = tensor
        numbers[name] = tensor
        if tensor.ndim > 1 and "relative" not in name:
            numbers[name] = torch.from_numpy(
                gguf.dequantize(blocks_of(tensor, "Q8_0"), GGMLQuantizationType.Q8_0)
            ).view(tensor.shape)
    kinds = lambda name, tensor: "F32" if "rel_b" in name else "Q8_0"  # noqa: E731
    written = write_gguf(path, theirs, kinds, architecture=gguf.MODEL_ARCH_NAMES[architecture], tokens=["a"] * 9)
    return written, numbers


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_has_the_numbers_of_its_blocks(kind: str, tmp_path: Path) -> None:
    path, numbers = converted(kind, tmp_path / "encoder.gguf")
    model = KINDS[kind][2](path, torch.float32)
    reference, _ = KINDS[kind][0]()
    reference.load_state_dict(numbers, strict=False)
    ids = torch.randint(0, 40, (1, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(input_ids=ids)[0]
        if kind.startswith("qwen3"):  # Z-Image takes what enters the last layer
            theirs = reference(input_ids=ids, output_hidden_states=True).hidden_states[-2]
        else:
            theirs = reference(input_ids=ids)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_a_file_lacks_is_said_at_once(tmp_path: Path) -> None:
    path, _ = converted("qwen2vl", tmp_path / "qwen.gguf")
    check_qwen_text(path)
    with pytest.raises(UserError, match="qwen.gguf: Qwen2.5-VL without its vision tower, as GGUF files have it; for a"):
        check_qwen_text(path, images=True)
    with pytest.raises(UserError, match="not a T5 encoder"):
        check_t5(path)


def test_qwen3_and_qwen3_vl_which_have_the_same_shapes_are_told_apart(tmp_path: Path) -> None:
    plain, sees = (converted(kind, tmp_path / f"{kind}.gguf")[0] for kind in ("qwen3", "qwen3vl"))
    assert qwen3_width(plain) == qwen3_width(sees, VL_THETA) // 2 == 64
    with pytest.raises(UserError, match="qwen3.gguf: Qwen3, not Qwen3-VL; give Qwen3-VL as text_encoder"):
        qwen3_width(plain, VL_THETA)
    with pytest.raises(UserError, match="qwen3vl.gguf: Qwen3-VL, not Qwen3; give Qwen3 as text_encoder"):
        qwen3_width(sees)


@pytest.mark.parametrize("architecture", ["llama", "mistral3"])
def test_a_gguf_file_of_mistrals_whose_rows_are_in_another_order_is_refused(architecture: str, tmp_path: Path) -> None:
    tensors = {"token_embd.weight": torch.ones(64, 32), "blk.0.ffn_gate.weight": torch.ones(64, 32)}
    write_gguf(tmp_path / "m.gguf", tensors, lambda name, tensor: "F32", architecture=architecture)
    with pytest.raises(UserError, match="Mistral Small 3 is not read from GGUF; give mistral_3_small_flux2_bf16"):
        MISTRAL.width(tmp_path / "m.gguf")
