"""The FLUX family against diffusers' FluxPipeline: velocity, text, latents, samples; where its parts lie."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from diffusers import FluxPipeline
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import T5TokenizerFast

from library.config.schema import ModelConfig
from library.errors import UserError
from library.models.family import SampleSettings
from library.models.family_by_name import model_family
from library.models.flux.spec import FluxFamily
from library.models.text import load_tokenizer
from library.models.vae import image_positions, pack_latents, unpack_latents
from tests.models.claims import assert_sample_is_the_pipelines, family_maker, quiet
from tests.tiny import SingleFiles, save_single_files, tiny_flux_inputs, tiny_flux_pipeline

TEXT = ("prompt_embeds", "pooled_prompt_embeds")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("flux")
    return {name: tiny_flux_pipeline(root / name, guidance=name == "dev") for name in ("dev", "schnell")}


family_of = family_maker("flux", FluxFamily)


def pipeline_of(folder: Path) -> FluxPipeline:
    return quiet(FluxPipeline.from_pretrained(folder))


def test_packing_and_positions_are_those_of_the_pipeline() -> None:
    latents = tiny_flux_inputs(side=8)["latents"][..., :6]  # 8 x 6: a swapped axis would show
    assert torch.equal(pack_latents(latents), FluxPipeline._pack_latents(latents, 2, 16, 8, 6))
    assert torch.equal(unpack_latents(pack_latents(latents), 8, 6), latents)
    assert torch.equal(image_positions(4, 3), FluxPipeline._prepare_latent_image_ids(2, 4, 3, "cpu", torch.float32))


@pytest.mark.parametrize("kind", ["dev", "schnell"])
def test_velocity_is_that_of_diffusers_called_by_hand(folders: dict[str, Path], kind: str) -> None:
    family, pipeline = family_of(folders[kind]), pipeline_of(folders[kind])
    inputs = tiny_flux_inputs(side=8)
    with torch.no_grad():
        ours = family.predict_velocity(
            family.load_transformer(torch.float32),
            inputs["latents"],
            inputs["sigmas"],
            {name: inputs[name] for name in TEXT},
            guidance_scale=3.5,
        )
        tokens = pipeline.transformer(
            hidden_states=FluxPipeline._pack_latents(inputs["latents"], 2, 16, 8, 8),
            timestep=inputs["sigmas"],
            guidance=torch.full((2,), 3.5) if kind == "dev" else None,
            pooled_projections=inputs["pooled_prompt_embeds"],
            encoder_hidden_states=inputs["prompt_embeds"],
            txt_ids=torch.zeros(12, 3),
            img_ids=FluxPipeline._prepare_latent_image_ids(2, 4, 4, "cpu", torch.float32),
            return_dict=False,
        )[0]
    theirs = FluxPipeline._unpack_latents(tokens, 64, 64, 8)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # one order of operations; sums may be split


@pytest.mark.parametrize("kind", ["dev", "schnell"])
def test_text_is_encoded_as_the_pipeline_encodes_it(folders: dict[str, Path], kind: str) -> None:
    captions = ["a red ball", "", "x" * 200]  # short, empty, too long for both encoders
    encoder = family_of(folders[kind]).load_text_encoder(torch.float32)
    embeds, pooled, _ = pipeline_of(folders[kind]).encode_prompt(captions, max_sequence_length=24)
    rows = encoder.encode(captions)
    assert encoder.encode([]) == []
    for i, row in enumerate(rows):
        torch.testing.assert_close(row["prompt_embeds"], embeds[i], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(row["pooled_prompt_embeds"], pooled[i], rtol=1e-5, atol=1e-5)
    alone = encoder.encode([captions[0]])[0]
    torch.testing.assert_close(alone["prompt_embeds"], rows[0]["prompt_embeds"], rtol=1e-5, atol=1e-5)


def test_latents_are_the_normalised_mean_and_decode_to_pixels(folders: dict[str, Path]) -> None:
    encoder = family_of(folders["dev"]).load_image_encoder(torch.float32)
    vae = pipeline_of(folders["dev"]).vae
    pixels = torch.rand(2, 3, 64, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        mean = vae.encode(pixels).latent_dist.mean
    latents = encoder.encode(pixels)
    assert latents.shape == (2, 16, 8, 4)
    torch.testing.assert_close(latents, (mean - 0.1159) * 0.3611, rtol=1e-5, atol=1e-5)
    assert torch.equal(latents, encoder.encode(pixels))
    with torch.no_grad():
        torch.testing.assert_close(encoder.decode(latents), vae.decode(mean).sample, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="image of 40 x 64 pixels: sides must be multiples of 16"):
        encoder.encode(torch.zeros(1, 3, 64, 40))


@pytest.mark.parametrize(("kind", "cfg"), [("dev", 1.0), ("schnell", 1.0), ("dev", 3.0)])
def test_sample_is_the_pipelines_picture(folders: dict[str, Path], kind: str, cfg: float) -> None:
    family, pipeline = family_of(folders[kind]), pipeline_of(folders[kind])
    guidance = {"guidance_scale": 3.5, "true_cfg_scale": cfg, "max_sequence_length": 24}
    assert_sample_is_the_pipelines(family, pipeline, cfg, **guidance)


def test_sampling_leaves_the_transformer_as_it_was(folders: dict[str, Path]) -> None:
    family = family_of(folders["dev"])
    transformer = family.load_transformer(torch.bfloat16).train()
    transformer.transformer_blocks[0].eval()
    modes = [module.training for module in transformer.modules()]
    text = family.load_text_encoder(torch.float32).encode(["a red ball"])[0]
    encoder = family.load_image_encoder(torch.float32)

    class Wrapped(nn.Module):  # as DDP holds it
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    pictures = [
        family.sample(model, encoder, text, SampleSettings(32, 32, steps=2, guidance=3.5, seed=1))
        for model in (transformer, Wrapped(transformer))
    ]
    assert np.array_equal(pictures[0], pictures[1])
    assert [module.training for module in transformer.modules()] == modes
    reference = weakref.ref(transformer)
    del transformer
    gc.collect()
    assert reference() is None


def test_fingerprints_follow_weights_and_settings(folders: dict[str, Path], tmp_path: Path) -> None:
    dev, other = family_of(folders["dev"]), family_of(tiny_flux_pipeline(tmp_path / "other", seed=1))
    assert dev.fingerprint() != other.fingerprint()
    text = dev.load_text_encoder(torch.float32).fingerprint
    assert text == family_of(folders["dev"]).load_text_encoder(torch.float32).fingerprint
    assert text != other.load_text_encoder(torch.float32).fingerprint
    assert text != dev.load_text_encoder(torch.bfloat16).fingerprint
    assert text != family_of(folders["dev"], t5xxl_max_token_length=8).load_text_encoder(torch.float32).fingerprint
    vocabulary = other.files.tokenizers[0] / "tokenizer.json"
    before = other.load_text_encoder(torch.float32)
    vocabulary.write_text(vocabulary.read_text().replace('"a"', '"\u00e4"'))
    after = other.load_text_encoder(torch.float32)
    assert before.fingerprint != after.fingerprint, "the caption's tokens are others"
    assert before.weights_fingerprint == after.weights_fingerprint
    image = dev.load_image_encoder(torch.float32).fingerprint
    assert image != other.load_image_encoder(torch.float32).fingerprint


def test_t5_length_is_the_option_and_never_more_than_the_tokenizers(folders: dict[str, Path]) -> None:
    short = family_of(folders["dev"], t5xxl_max_token_length=8).load_text_encoder(torch.float32)
    assert short.encode(["a"])[0]["prompt_embeds"].shape == (8, 64)
    with pytest.raises(UserError, match="t5xxl_max_token_length 300: the tokenizer gives at most 24; lower it"):
        family_of(folders["dev"], t5xxl_max_token_length=300).load_text_encoder(torch.float32)


@pytest.mark.parametrize(("kind", "length"), [("dev", 512), ("schnell", 256)])
def test_t5_length_defaults_to_the_published_one(folders: dict[str, Path], kind: str, length: int) -> None:
    assert family_of(folders[kind])._t5_length(10**30) == length


@pytest.mark.parametrize("kind", ["dev", "schnell"])
@pytest.mark.parametrize("comfy", [False, True])
def test_single_files_give_the_folders_model(folders: dict[str, Path], tmp_path: Path, kind: str, comfy: bool) -> None:
    files = save_single_files(folders[kind], tmp_path)
    ours, reference = model_family(files.model_config(comfy=comfy)), family_of(folders[kind])
    mine, theirs = ours.load_transformer(torch.float32), reference.load_transformer(torch.float32)
    assert mine.config.guidance_embeds is (kind == "dev")
    assert mine.config.axes_dims_rope == tuple(theirs.config.axes_dims_rope)
    state = theirs.state_dict()
    assert list(mine.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in mine.state_dict().items())
    pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    encoders = [family.load_image_encoder(torch.float32) for family in (ours, reference)]
    assert torch.equal(encoders[0].encode(pixels), encoders[1].encode(pixels))
    latents = encoders[0].encode(pixels)
    assert torch.equal(encoders[0].decode(latents), encoders[1].decode(latents))
    rows = [family.load_text_encoder(torch.float32).encode(["a red ball"])[0] for family in (ours, reference)]
    assert all(torch.equal(rows[0][name], rows[1][name]) for name in TEXT)


def test_modules_for_training_give_what_the_encoder_caches_and_have_no_dropout(folders: dict[str, Path]) -> None:
    encoder = family_of(folders["dev"]).load_text_encoder(torch.float32)
    captions = ["a red ball", "blurry"]
    cached = encoder.encode(captions)
    modules = encoder.load_modules(["text_encoder", "text_encoder_2"])
    current = modules.train()(captions)
    assert current.keys() == cached[0].keys()
    for name, rows in current.items():
        assert not rows.requires_grad  # frozen until something is trained on top
        assert torch.equal(rows, torch.stack([one[name] for one in cached]))
    assert [name for name, _ in encoder.load_modules(["text_encoder"]).named_children()] == ["text_encoder"]
    assert encoder.load_modules(["text_encoder"])(captions).keys() == {"pooled_prompt_embeds"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux_pipeline(tmp_path_factory.mktemp("flux") / "pipeline")


@pytest.fixture(scope="module")
def files(folder: Path) -> SingleFiles:
    return save_single_files(folder, folder.parent / "files")


def refuses(match: str, path: Path, **options: object) -> None:
    with pytest.raises(UserError, match=match) as caught:
        model_family(ModelConfig(model_type="flux", pretrained_model_name_or_path=str(path), **options))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_folders_that_are_no_flux_are_refused(folder: Path, tmp_path: Path) -> None:
    refuses(r"pretrained_model_name_or_path '.*nowhere' does not exist; give a local", tmp_path / "nowhere")
    refuses("no model_index.json, so no diffusers pipeline", tmp_path)
    no_index = "a StableDiffusionXLPipeline without a transformer folder; give a FLUX.1 folder"
    missing = r"transformer/config\.json: no such file; the folder is no complete model, download it again"
    config, vae = "transformer/config.json", "vae/config.json"
    other, tiny = {"_class_name": "SD3Transformer2DModel"}, {"_class_name": "AutoencoderTiny"}
    cases: list[tuple[str, str, Any]] = [  # the message; the file that is spoilt, and how
        (r"model_index\.json: not valid JSON", "model_index.json", "{"),
        ("'SD3Transformer2DModel', not FluxTransformer2DModel", config, other),
        (missing, config, None),
        (r"vae/config\.json: not valid JSON", vae, "{"),
        ("takes 128 channels and returns 64, as FLUX.1 De", config, {"in_channels": 128, "out_channels": 64}),
        ("'AutoencoderTiny', not AutoencoderKL; give FLUX's VAE", vae, tiny),
    ]
    for number, (message, name, change) in enumerate(cases):
        copy = Path(shutil.copytree(folder, tmp_path / f"copy{number}"))
        if change is None:
            (copy / name).unlink()
        elif isinstance(change, str):
            (copy / name).write_text(change)
        else:
            rewrite(copy / name, **change)
        refuses(message, copy)
    rewrite(copy / "model_index.json", _class_name="StableDiffusionXLPipeline")
    shutil.rmtree(copy / "transformer")
    refuses(no_index, copy)


def test_parts_that_are_missing_or_in_each_others_place_are_named(files: SingleFiles, tmp_path: Path) -> None:
    published = {"ae": "ae.safetensors", "clip_l": "clip_l.safetensors", "t5xxl": "t5xxl_fp16.safetensors"}
    small = load_file(files.ae)
    small["decoder.conv_in.weight"] = small["decoder.conv_in.weight"][:, :4].contiguous()
    save_file(small, tmp_path / "sd.safetensors")
    qwen = {"encoder.conv_in": (96, 3), "decoder.conv_in": (384, 16), "encoder.down_blocks.0.conv1": (96, 96)}
    tensors = {f"{name}.weight": torch.zeros(*shape, 3, 3, 3) for name, shape in qwen.items()}
    save_file(tensors, tmp_path / "qwen.safetensors")
    cases = [
        (option, None, f"needs {option} beside it; set {option} to {named}") for option, named in published.items()
    ]
    cases += [(option, "gone.safetensors", rf"{option} 'gone\.safetensors' does not exist") for option in published]
    cases += [
        ("ae", str(files.transformer), r"not FLUX's VAE \(no encoder\.conv_in\.weight\); give ae\.safetensors"),
        ("clip_l", str(files.transformer), r"not a CLIP text encoder .*; give clip_l\.safetensors as clip_l"),
        ("t5xxl", str(files.transformer), r"not a T5 encoder .*; give t5xxl_fp16\.safetensors as t5xxl"),
        ("ae", str(tmp_path / "sd.safetensors"), "4 latent channels, FLUX's VAE has 16"),
        ("ae", str(tmp_path / "qwen.safetensors"), r"not FLUX's VAE \(no encoder\.down_blocks\.0\.resnets\.0\.conv1"),
    ]
    for option, value, message in cases:
        with pytest.raises(UserError, match=message):
            model_family(files.model_config(**{option: value}))


def test_other_checkpoints_are_recognised(files: SingleFiles, tmp_path: Path) -> None:
    cases = {
        "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": "a LoRA, not a base model; give it as network_w",
        "transformer.transformer_blocks.0.attn.to_q.lora_A.weight": "a LoRA, not a base model",
        "model.diffusion_model.input_blocks.0.0.weight": "a Stable Diffusion or SDXL checkpoint, not FLUX.1",
        "distilled_guidance_layer.in_proj.weight": "a Chroma checkpoint, not FLUX.1",
        "model.diffusion_model.joint_blocks.0.x": "a Stable Diffusion 3 checkpoint, not FLUX.1",
        "transformer_blocks.0.img_mod.1.weight": "a Qwen-Image transformer, not FLUX.1",
        "something.else": "of no known layout",
    }
    path = tmp_path / "other.safetensors"
    for key, message in cases.items():
        save_file({key: torch.ones(2, 2)}, path)
        with pytest.raises(UserError, match=message):
            model_family(files.model_config(model_type="flux", pretrained_model_name_or_path=str(path)))


def test_transformer_files_with_more_or_less_in_them(files: SingleFiles, folder: Path, tmp_path: Path) -> None:
    path, whole, comfy = tmp_path / "x.safetensors", load_file(files.transformer), load_file(files.comfy_transformer)

    def family(tensors: dict[str, torch.Tensor]) -> Any:
        save_file(tensors, path)
        return model_family(files.model_config(model_type="flux", pretrained_model_name_or_path=str(path)))

    def is_alone(loaded: Any) -> bool:
        ours, alone = (each.load_transformer(torch.float32).state_dict() for each in (loaded, plain))
        return ours.keys() == alone.keys() and all(torch.equal(ours[name], each) for name, each in alone.items())

    plain = model_family(files.model_config())
    others = {"vae.encoder.conv_in.weight": torch.ones(1), "text_encoders.clip_l.scaled_fp8": torch.ones(1)}
    assert is_alone(family(comfy | others)), "of an all-in-one file the transformer"
    assert is_alone(family(load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")))
    lacking = {name: tensor for name, tensor in whole.items() if name != "single_blocks.1.linear2.weight"}
    for tensors, message in (
        (lacking, r"tensor 'single_blocks\.1\.linear2\.weight' is missing"),
        (whole | {"controlnet.x": torch.ones(1)}, r"tensor 'controlnet\.x' is unknown to this architecture"),
        (comfy | {"model.diffusion_model.double_blocks.0.img_attn.qkv.scale_weight": torch.ones(1)},
         r"'model\.diffusion_model\..*scale_weight' is a scale without a"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            family(tensors).load_transformer(torch.float32)


def test_options_replace_parts_of_a_folder(folder: Path, files: SingleFiles) -> None:
    config = ModelConfig(
        pretrained_model_name_or_path=str(folder), ae=str(files.ae), clip_l=str(folder), t5xxl=str(files.t5xxl)
    )
    family, plain = model_family(config), model_family(ModelConfig(pretrained_model_name_or_path=str(folder)))
    pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    encoders = [each.load_image_encoder(torch.float32) for each in (family, plain)]
    assert torch.equal(encoders[0].encode(pixels), encoders[1].encode(pixels))
    rows = [each.load_text_encoder(torch.float32).encode(["a"])[0] for each in (family, plain)]
    assert all(torch.equal(rows[0][name], rows[1][name]) for name in rows[0])


def test_tokenizers_that_cannot_be_had_or_read_name_their_option(
    folder: Path, files: SingleFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.copytree(folder / "tokenizer_2", tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer_config.json").write_text("{")
    absent = "{}: tokenizer 'nobody/nothing' is neither .*point {} to a local"
    for option, given, message in (
        ("clip_l_tokenizer", "nobody/nothing", absent),
        ("t5xxl_tokenizer", "nobody/nothing", absent),
        ("clip_l_tokenizer", str(tmp_path), r"{}: .* holds no tokenizer \(none of tokenizer\.json"),
        ("t5xxl_tokenizer", str(tmp_path / "broken"), "{}: .* holds no readable tokenizer; download it again"),
    ):
        with pytest.raises(UserError, match=message.format(option, option)):
            model_family(files.model_config(**{option: given})).load_text_encoder(torch.float32)


def test_tokenizer_is_downloaded_where_the_cache_has_other_files_of_the_model_alone(
    folder: Path, files: SingleFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(name: str, allow_patterns: list[str], local_files_only: bool = False) -> str:
        return str(tmp_path if local_files_only else folder / "tokenizer_2")

    monkeypatch.setattr("library.models.text.snapshot_download", snapshot)
    family = model_family(files.model_config(t5xxl_tokenizer="someone/t5"))
    assert family.load_text_encoder(torch.float32).encode(["a"])


def test_t5_tokenizer_is_read_from_the_published_sentencepiece_model(
    files: SingleFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """google/t5-v1_1-xxl holds spiece.model and no tokenizer.json."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a red ball\nhello world of tiny pictures\n" * 20)
    Path("t5").mkdir()
    sentencepiece.SentencePieceTrainer.train(
        "--input=text.txt --model_prefix=t5/spiece --vocab_size=60 --hard_vocab_limit=false "
        "--pad_id=0 --eos_id=1 --unk_id=2 --bos_id=-1 --minloglevel=2"
    )
    tokenizer = load_tokenizer(T5TokenizerFast.from_pretrained, "t5", "t5xxl_tokenizer")
    pieces = sentencepiece.SentencePieceProcessor(model_file="t5/spiece.model").encode("a red ball")
    assert tokenizer("a red ball").input_ids == [*pieces, 1]


def test_fp16_keeps_t5s_output_matrices_in_fp32(files: SingleFiles) -> None:
    encoder = model_family(files.model_config()).load_text_encoder(torch.float16)
    encoder.encode(["a red ball"])
    dtypes = {name: p.dtype for name, p in encoder._model.text_encoder_2.named_parameters()}
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert kept == {name for name in dtypes if name.endswith(".wo.weight")}
    encoder.release()
    assert encoder._model is None
