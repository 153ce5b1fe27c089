"""Reading weights: layouts against diffusers' converters, memory, and what is said when a file is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from diffusers.loaders.single_file_utils import (
    convert_flux_transformer_checkpoint_to_diffusers,
    convert_ldm_vae_checkpoint,
)
from safetensors.torch import load_file, save_file
from torch import nn

from library.checksums import fingerprint
from library.errors import UserError
from library.models.flux.vae import FluxImageEncoder
from library.models.layer_names import original_key_map
from library.models.llm.files import export_hf
from library.models.llm.model import TransformerLM
from library.models.llm.spec import llama
from library.models.registry import family_names
from library.models.weights import identity_map, load_into
from library.precision.checkpoint import WeightFiles
from library.safetensors_io import RowRange
from tests.forked import run_code
from tests.targets import FLUX_KEYS
from tests.tiny import bfl_state_dict, bfl_vae_state_dict, tiny_flux_transformer, tiny_vae

ROOT = Path(__file__).resolve().parents[2]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def two_linears() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.fixture
def linear_file(tmp_path: Path) -> Path:
    path = tmp_path / "linears.safetensors"
    save_file({name: random(*p.shape, seed=i) for i, (name, p) in enumerate(two_linears().named_parameters())}, path)
    return path


def test_pieces_are_rows_of_the_tensor_in_the_file(tmp_path: Path) -> None:
    tensor = random(6, 3)
    save_file({"a": torch.ones(2), "qkv": tensor, "scalar": torch.tensor(2.5)}, tmp_path / "x.safetensors")
    weights = WeightFiles(tmp_path / "x.safetensors")
    assert torch.equal(weights.read([RowRange("qkv")]), tensor)
    assert torch.equal(weights.read([RowRange("qkv", 2, 4)]), tensor[2:4])
    assert torch.equal(weights.read([RowRange("qkv", 3), RowRange("qkv", 0, 3)]), torch.cat([tensor[3:], tensor[:3]]))
    assert weights.read([RowRange("qkv", 2, 4)]).untyped_storage().nbytes() == 2 * 3 * 4  # no view of the whole
    assert weights.read([RowRange("scalar")]).item() == 2.5


def test_rows_of_two_dtypes_are_not_read_as_one(tmp_path: Path) -> None:
    """q in fp32 and k in bf16, say, joined in one parameter: the bytes of k would be read as fp32."""
    save_file({"q": random(2, 3), "k": random(2, 3).bfloat16()}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="'k' is BF16, 'q' beside it F32; save the model in one dtype"):
        WeightFiles(tmp_path / "x.safetensors").read([RowRange("q"), RowRange("k")])


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_every_plain_dtype_is_cast_to_the_one_asked_for(tmp_path: Path, stored: torch.dtype) -> None:
    path = tmp_path / "x.safetensors"
    state = {name: random(*p.shape).to(stored) for name, p in two_linears().named_parameters()}
    save_file(state, path)
    weights = WeightFiles(path)
    module = load_into(two_linears, weights, identity_map(weights.names), torch.bfloat16)
    for name, parameter in module.named_parameters():
        stays = stored == torch.float8_e4m3fn and name.endswith(".weight")  # those of linears; biases are cast
        wanted = state[name] if stays else state[name].to(torch.bfloat16)
        assert parameter.dtype == wanted.dtype
        assert torch.equal(parameter.float(), wanted.float())
        assert not parameter.requires_grad


def test_sharded_folder_is_read_as_one_model(tmp_path: Path) -> None:
    transformer = tiny_flux_transformer()
    transformer.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    weights = WeightFiles(tmp_path)
    ours = load_into(
        lambda: FluxTransformer2DModel.from_config(transformer.config),
        weights,
        identity_map(weights.names),
        torch.float32,
    )
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in transformer.state_dict().items())


def test_one_of_several_files_stands_for_all_and_a_missing_one_is_named(tmp_path: Path) -> None:
    """As musubi-tuner's documents name a text encoder: its first file, without an index beside it."""
    state = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict()
    one, other = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    save_file({name: state[name] for name in ("0.weight", "0.bias")}, one)
    save_file({name: state[name] for name in ("1.weight", "1.bias")}, other)
    for file in (one, other):
        model = load_into(two_linears, weights := WeightFiles(file), identity_map(weights.names), torch.float32)
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    before = fingerprint(one)
    save_file({"1.weight": state["1.weight"], "1.bias": state["1.bias"] + 1}, other)
    assert fingerprint(one) != before
    other.unlink()
    with pytest.raises(UserError, match="model-00001-of-00002.safetensors: one of 2 files, model-00002-of-00002.safet"):
        WeightFiles(one)


def test_the_key_map_of_bfl_names_is_that_of_diffusers_converter(tmp_path: Path) -> None:
    width, mlp = (3072, 12288)  # the converter knows FLUX.1's width only; columns do not matter to it, one is enough
    narrow: dict[str, torch.Tensor] = {}
    for i, (name, tensor) in enumerate(tiny_flux_transformer(double_blocks=2, single_blocks=2).state_dict().items()):
        rows = {64: width, 256: mlp, 6 * 64: 6 * width, 3 * 64: 3 * width, 2 * 64: 2 * width, 32: 128}[tensor.shape[0]]
        if name.startswith("proj_out"):
            rows = 64
        narrow[name] = random(rows, 1, seed=i) if tensor.ndim == 2 else random(rows, seed=i)
    bfl = bfl_state_dict(narrow)
    save_file(bfl, tmp_path / "flux.safetensors")
    weights = WeightFiles(tmp_path / "flux.safetensors")
    reference = convert_flux_transformer_checkpoint_to_diffusers(dict(bfl))
    key_map = original_key_map(weights, "", FLUX_KEYS, family_names("flux").norms)
    assert set(key_map) == set(reference) == set(narrow)
    for name, pieces in key_map.items():
        assert torch.equal(weights.read(pieces), reference[name]), name


def test_bfl_autoencoder_is_that_of_diffusers_converter(tmp_path: Path) -> None:
    vae = tiny_vae()
    bfl = bfl_vae_state_dict(vae.state_dict())
    save_file(bfl, tmp_path / "ae.safetensors")
    reference = convert_ldm_vae_checkpoint(dict(bfl), vae.config)
    ours = FluxImageEncoder.load(tmp_path / "ae.safetensors", torch.float32)
    assert isinstance(ours, AutoencoderKL)
    assert (ours.config.scaling_factor, ours.config.shift_factor) == (0.3611, 0.1159)
    assert set(ours.state_dict()) == set(reference)
    assert all(torch.equal(tensor, reference[name]) for name, tensor in ours.state_dict().items())


def test_other_names_and_shapes_are_refused_by_name(linear_file: Path, tmp_path: Path) -> None:
    state = load_file(linear_file)
    less = {name: tensor for name, tensor in state.items() if name != "1.bias"}
    extra = {f"extra.{i}": torch.ones(1) for i in range(5)}
    for tensors, message in (
        (less, r"x\.safetensors: tensor '1\.bias' is missing; the file is incomplete"),
        (state | extra, r"tensors 'extra\.0', 'extra\.1', 'extra\.2' and 2 more are unknown"),
        (state | {"scaled_fp8": torch.ones(1)}, "tensor 'scaled_fp8' is unknown to this architecture"),
        (state | {"0.weight": torch.ones(4, 5)}, r"'0\.weight' has shape \(4, 5\), the architecture wants \(4, 3\)"),
        (state | {"0.weight": torch.ones(11)}, r"has shape \(11,\), the architecture wants \(4, 3\)"),
    ):
        save_file(tensors, tmp_path / "x.safetensors")
        weights = WeightFiles(tmp_path / "x.safetensors")
        with pytest.raises(UserError, match=message):
            load_into(two_linears, weights, identity_map(weights.names), torch.float32)
    with pytest.raises(UserError, match=r"tensor '0\.weigth' is missing; did you mean '0\.weight'"):
        WeightFiles(linear_file).shape("0.weigth")


def test_a_vector_may_stand_for_a_table_of_as_many_numbers_row_by_row(linear_file: Path, tmp_path: Path) -> None:
    state = load_file(linear_file)
    save_file(state | {"0.weight": state["0.weight"].flatten()}, tmp_path / "flat.safetensors")
    weights = WeightFiles(tmp_path / "flat.safetensors")
    model = load_into(two_linears, weights, identity_map(weights.names), torch.float32)
    assert torch.equal(model[0].weight, state["0.weight"])


def test_quantisations_of_no_known_format_are_refused_by_the_name_that_shows_them(tmp_path: Path) -> None:
    path = tmp_path / "q.safetensors"
    for name, why in {
        "0.scale_weight": "is a scale without a quantised weight; download or convert it again",
        "0.weight_scale": "is a scale without a quantised weight; download or convert it again",
        "0.comfy_quant": "is not the JSON object ComfyUI writes; download or convert it again",
        "0.weight.absmax": "belongs to a bitsandbytes checkpoint; use the bf16 file, or one of a format",
        "0.weight.quant_state.x": "belongs to a bitsandbytes checkpoint; use the bf16 file, or one of a format",
    }.items():
        save_file({"0.weight": torch.ones(1), name: torch.ones(1)}, path)
        with pytest.raises(UserError, match=f"'{name}' {why}"):
            WeightFiles(path)
    save_file({"0.weight": torch.ones(4, 3, dtype=torch.int8)}, path)
    with pytest.raises(UserError, match=r"'0\.weight' has dtype I8, whose meaning no known layout gives; use the bf16"):
        WeightFiles(path)


def test_what_holds_no_weights_is_refused(linear_file: Path, tmp_path: Path) -> None:
    linear_file.write_bytes(linear_file.read_bytes()[:-4])
    (tmp_path / "model.ckpt").write_bytes(b"PK")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/pytorch_model.bin").write_bytes(b"")
    (tmp_path / "index").mkdir()
    index = {"weight_map": {"a": "part-1.safetensors"}}
    (tmp_path / "index/model.safetensors.index.json").write_text(json.dumps(index))
    for name, message in (
        (linear_file.name, "its end is missing, or more follows"),
        ("nowhere", "nowhere: no such file or folder"),
        ("model.ckpt", r"model\.ckpt: weights are read from \.safetensors and \.gguf files"),
        ("bin", r"no \.safetensors weights in this folder"),
        ("index", r"part-1\.safetensors: missing, but model\.safetensors\.index\.json lists it"),
    ):
        with pytest.raises(UserError, match=message):
            WeightFiles(tmp_path / name)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_loading_peaks_at_one_models_size(tmp_path: Path) -> None:
    """A model of about 120 MB in bf16: what loading adds to the process, over the model's size."""
    model = TransformerLM(llama(1024, 6, 16, 4, 2048, vocab_size=8192)).initialise()
    export_hf(model, tmp_path, torch.bfloat16)
    script = f"""
import json
import torch
from bench.measure import reset_peak, resident
from library.models.llm.files import load_lm
rows = []
for dtype in (torch.bfloat16, torch.float32):
    before = resident("VmRSS")
    reset_peak()
    weights = [*load_lm({str(tmp_path)!r}, dtype).parameters()]
    for weight in weights:
        weight.detach().view(-1).view(torch.uint8)[::4096].sum()  # a mapped page counts once touched
    size = sum(weight.nbytes for weight in weights)
    rows.append({{"model_bytes": size, "peak_over_model": (resident("VmHWM") - before) / size}})
    del weights, weight
print(json.dumps(rows))
"""
    done = run_code(script, [], ROOT)
    assert done.returncode == 0, done.stderr
    for row in json.loads(done.stdout.splitlines()[-1]):
        assert row["model_bytes"] > 100e6
        # One model plus the tensor being read (the largest is 13 % of this model), and a few MB of allocator.
        assert row["peak_over_model"] < 1.3, row


def test_a_weight_with_two_names_is_read_once_and_stays_one(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
        model[1][0].weight = model[0].weight
        return model

    save_file({name: random(*tensor.shape) for name, tensor in build().named_parameters()}, tmp_path / "x.safetensors")
    weights = WeightFiles(tmp_path / "x.safetensors")
    assert sorted(weights.names) == ["0.bias", "0.weight", "1.0.bias"]
    model = load_into(build, weights, identity_map(weights.names), torch.float32)
    assert model[1][0].weight is model[0].weight
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
