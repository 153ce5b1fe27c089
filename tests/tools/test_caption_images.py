"""Captions by tiny models in published formats: what transformers itself says, where it belongs, and nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import ExifTags, Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from library.errors import counted
from library.models.captioner import PROMPT, Captioner
from tests.hub_server import Hub, serving
from tests.runs import ROOT, call, printed, refusal
from tests.tiny import tiny_text_model
from tests.tiny_captioner import TEMPLATE, tiny_captioner_tokenizer, write_tiny_captioner
from tools import caption_images

TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_captioner(tmp_path_factory.mktemp("captioner"), ends=2)


def write_images(folder: Path, count: int = 4) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{n}.png" for n in range(count)]
    for n, path in enumerate(paths):
        Image.effect_mandelbrot((90 + 40 * n, 140), (-2, -1.5, 1 + n / 9, 1.5), 20).convert("RGB").save(path)
    return paths


def said(model: Path, picture: Image.Image, prompt: str = PROMPT, most: int = TOKENS) -> str:
    """Return what transformers' own model says of a picture, its prompt written out here."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    lm = transformers.Qwen3VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    seen = Qwen2VLImageProcessorPil.from_pretrained(model)(images=[picture], return_tensors="pt")
    pads = "<|image_pad|>" * (int(seen["image_grid_thw"].prod()) // 4)
    chat = f"<|im_start|>user\n<|vision_start|>{pads}<|vision_end|>{prompt}<|im_end|>\n<|im_start|>assistant\n"
    given = tokenizer(chat, return_tensors="pt")
    is_pad = given["input_ids"] == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    made = lm.generate(**given, **seen, mm_token_type_ids=is_pad.int(), max_new_tokens=most, do_sample=False)
    return str(tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def test_a_caption_is_what_transformers_says_of_the_upright_picture_on_white(model: Path, tmp_path: Path) -> None:
    pictures = [Image.open(path) for path in write_images(tmp_path / "images", 3)]
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    pictures[1].save(tmp_path / "images/1.png", exif=exif)
    clear = pictures[2].convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(clear.size))
    clear.save(tmp_path / "images/2.png")
    pictures[1] = pictures[1].transpose(Image.Transpose.ROTATE_270)
    white = Image.new("RGB", clear.size, "white")
    white.paste(clear, mask=clear)
    pictures[2] = white
    words = (
        "--model",
        model,
        "--prompt",
        "What is it, {trigger}?",
        "--trigger_word",
        "ohwx",
        "--max_new_tokens",
        TOKENS,
    )
    output = printed(caption_images, tmp_path / "images", *words, "--batch_size", 2)
    texts = [(tmp_path / f"images/{n}.txt").read_text() for n in range(3)]
    assert texts == [said(model, picture, "What is it, ohwx?") for picture in pictures]
    assert len(set(texts)) == 3
    cut = [text for text in texts if len(text.split()) == TOKENS]  # a word is a token of the tiny one
    assert 0 < len(cut) < 3
    assert f"{counted(len(cut), 'caption')} cut at {TOKENS} tokens" in output


def tiny_llava(folder: Path) -> Any:
    tokenizer = tiny_captioner_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 32}
    config = transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **small, "image_size": 64, "patch_size": 16},
        text_config={"model_type": "llama", **small, "vocab_size": len(tokenizer), "eos_token_id": 99},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    tiny_text_model(lambda: transformers.LlavaForConditionalGeneration(config), 0, 4).save_pretrained(folder)
    images = CLIPImageProcessorPil(size={"height": 64, "width": 64}, crop_size={"height": 64, "width": 64})
    chat = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")
    shape = {"patch_size": 16, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return transformers.LlavaProcessor(images, tokenizer, chat_template=chat, **shape)


def tiny_florence(folder: Path) -> Any:
    known = {word: n for word, n in tiny_captioner_tokenizer().get_vocab().items() if not word.startswith("<|")}
    known |= {word: len(known) + n for n, word in enumerate(("<s>", "</s>", "<pad>", "<unk>", "<mask>", "<image>"))}
    pairs = json.loads(tiny_captioner_tokenizer().backend_tokenizer.to_str())["model"]["merges"]
    tokenizer = transformers.BartTokenizer(
        vocab=known, merges=[tuple(pair) for pair in pairs], extra_special_tokens={"image_token": "<image>"}
    )
    config = transformers.Florence2Config(
        vision_config={
            "depths": (1, 1, 1, 1),
            "embed_dim": (8, 8, 16, 16),
            "num_heads": (1, 1, 2, 2),
            "num_groups": (1, 1, 2, 2),
            "window_size": 4,
            "projection_dim": 32,
        },
        text_config={
            "model_type": "bart",
            "vocab_size": len(tokenizer),
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "max_position_embeddings": 256,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "decoder_start_token_id": tokenizer.eos_token_id,
        },
        image_token_id=tokenizer.image_token_id,
    )
    lm = tiny_text_model(lambda: transformers.Florence2ForConditionalGeneration(config), 0, 4)
    with torch.no_grad():
        lm.model.language_model.decoder.layers[0].encoder_attn.out_proj.weight.mul_(50)  # the picture counts
    lm.generation_config.repetition_penalty = 3.0
    lm.save_pretrained(folder)
    images = CLIPImageProcessorPil(size={"height": 64, "width": 64}, do_center_crop=False)
    images.image_seq_length = 5
    return transformers.Florence2Processor(images, tokenizer)


@pytest.mark.parametrize("build", [tiny_llava, tiny_florence])
def test_other_kinds_of_models_are_asked_as_they_want_it(build: Any, tmp_path: Path) -> None:
    processor, pictures = build(tmp_path / "model"), list(map(Image.open, write_images(tmp_path / "images", 3)))
    processor.save_pretrained(tmp_path / "model")
    captioner = Captioner(str(tmp_path / "model"), torch.device("cpu"), torch.float32)
    answers = captioner.answers([(picture, PROMPT) for picture in pictures], TOKENS)
    lm = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    for picture, (text, is_cut) in zip(pictures, answers, strict=True):
        is_florence = build is tiny_florence
        chat = f"<|im_start|>user\n<image>{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
        asked = "<DETAILED_CAPTION>" if is_florence else chat
        given = processor(text=asked, images=picture, return_tensors="pt")
        made = lm.generate(**given, max_new_tokens=TOKENS, do_sample=False, forced_eos_token_id=None)[0]
        expected = processor.decode(
            made if is_florence else made[given["input_ids"].shape[1] :], skip_special_tokens=True
        )
        assert text == " ".join(expected.replace("\ufffd", "").split())
        assert is_cut
    assert len(set(answers)) > 1
    if build is tiny_florence:
        images = tmp_path / "images"
        line = refusal(caption_images, images, "--model", tmp_path / "model", "--prompt", "What is it?")
        assert "'What is it?': Florence-2 knows only tasks: <CAPTION>" in line


def test_a_stopped_run_goes_on_and_undo_brings_every_old_text_back(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = write_images(tmp_path / "images", 5)
    (tmp_path / "images/0.txt").write_bytes("\ufeffold\r\n".encode("utf-16-le"))
    (tmp_path / "images/1.txt").write_bytes(b" \n")
    before = {path: path.read_bytes() for path in sorted((tmp_path / "images").iterdir())}
    asked: list[int] = []
    answers = Captioner.answers

    def stopping(self: Captioner, pairs: Any, most: int) -> Any:
        asked.append(len(pairs))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return answers(self, pairs, most)

    monkeypatch.setattr(Captioner, "answers", stopping)
    words = (tmp_path / "images", "--model", model, "--all", "--prefix", "ohwx", "--max_new_tokens", TOKENS)
    with pytest.raises(SystemExit) as ended:
        call(caption_images, *words)
    assert ended.value.code == 130
    assert (tmp_path / "images/0.txt").read_bytes().decode("utf-16").startswith("ohwx, ")
    assert (tmp_path / "images/0.txt").read_bytes().endswith("\r\n".encode("utf-16-le"))
    assert not (tmp_path / "images/2.txt").exists()
    assert "3 of 3, 0 s left: 4.png: ohwx, " in printed(caption_images, *words)
    assert len(asked) == 6
    assert all(path.with_suffix(".txt").stat().st_size > 5 for path in images)
    assert "nothing to do" in printed(caption_images, *words)
    (tmp_path / "images/3.txt").write_text("mine")
    assert "left alone" in printed(caption_images, tmp_path / "images", "--undo")
    after = {path: path.read_bytes() for path in sorted((tmp_path / "images").iterdir()) if path.name[0] != "."}
    assert after == before | {tmp_path / "images/3.txt": b"mine"}


def test_captions_go_where_the_dataset_has_them_and_what_is_left_out_is_named(model: Path, tmp_path: Path) -> None:
    images = write_images(tmp_path / "photos", 4)
    write_images(tmp_path / "others", 1)
    (tmp_path / "photos/2.png").write_bytes(images[2].read_bytes()[:200])
    Image.new("RGB", (900, 3)).save(tmp_path / "photos/strip.png")
    Image.new("RGB", (1, 1)).save(tmp_path / "photos/dot.png")
    (tmp_path / "photos/1.caption").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/3.caption").touch()
    (tmp_path / "photos/3.caption").symlink_to(tmp_path / "elsewhere/3.caption")
    (tmp_path / "list.jsonl").write_text('{"image_path": "photos/0.png", "caption": "x"}')
    (tmp_path / "dataset.toml").write_text(
        '[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = "photos"\ncaption_extension = ".caption"\n'
        'trigger_word = "ohwx"\nclass_tokens = "ohwx cat"\n[[datasets.subsets]]\nimage_dir = "others"\nis_reg = true\n'
        '[[datasets.subsets]]\nmetadata_file = "list.jsonl"\n'
    )
    words = (tmp_path / "dataset.toml", "--model", model, "--prefix", "ohwx,", "--prompt", "{trigger}?")
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    refusal(caption_images, *words, "--preview", 4, "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert not list(tmp_path.glob("others/*.caption"))
    assert len(found["images"]) == 2  # of four, those that can be read
    line = refusal(caption_images, *words)
    assert "3 of 6 images left out: " in line
    for what in ("2.png: damaged image", "strip.png: is too narrow a strip", "3.png: its caption leads to"):
        assert what in line
    text = (tmp_path / "photos/0.caption").read_text()
    assert text == "ohwx, " + said(model, Image.open(images[0]), "ohwx?", 256)
    assert [one["text"] for one in found["images"] if one["image"] == str(images[0])] == [text]
    assert (tmp_path / "photos/1.caption").read_text() == "mine"
    assert not (tmp_path / "elsewhere/3.caption").read_text()
    regular = said(model, Image.open(tmp_path / "others/0.png"), PROMPT, 256)
    assert (tmp_path / "others/0.caption").read_text() == regular


def test_a_caption_of_another_extension_is_kept_and_told(model: Path, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", 4)
    for image, ending in zip(images, (".txt", ".txt", ".caption"), strict=False):
        image.with_suffix(ending).write_text("mine")
    words = (tmp_path / "images", "--model", model, "--max_new_tokens", TOKENS)
    output = printed(caption_images, *words)
    assert "left out, as most captions are .txt files and theirs are not: 2.png; rename" in output
    assert "1 caption made" in output
    assert sorted(path.name for path in (tmp_path / "images").glob("*.txt")) == ["0.txt", "1.txt", "3.txt"]


def _without(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def _changed(**values: object) -> Any:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


def _renamed(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file({f"other.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "is a LoRA, no whole model; choose"),
        (_without("config.json"), "is no folder of a transformers model"),
        (_changed(model_type="llama"), "llama is no model that reads pictures; choose another captioner, as Qwen/"),
        (_changed(model_type="new", auto_map={"AutoModel": "x.Y"}), "runs Python code of its own, which is never"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "cannot be loaded"),
        (_renamed, "weights of the model not in its files"),
        (_without("tokenizer.json"), "the model cannot caption (Image features and image tokens do not match"),
        (_without("preprocessor_config.json"), "cannot be loaded"),
    ],
)  # fmt: skip
def test_what_is_no_captioner_is_refused_in_a_line(spoil: Any, message: str, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    spoil(tmp_path / "model")
    images = write_images(tmp_path / "images", 1)
    assert message in refusal(caption_images, images[0].parent, "--model", tmp_path / "model")


# huggingface_hub reads the environment when it is imported, so this needs a process of its own
CAPTION_TWICE = """
import runpy, sys
script, images, *models = sys.argv[1:]
codes = []
for model in models:
    sys.argv = [script, images, "--model", model]
    code = None
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code
    codes.append(code)
print("ended with", ", ".join(map(str, codes)))
"""


def test_a_name_on_the_hub_is_fetched_and_a_gated_one_told(model: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "images", 1)
    with serving(Hub({"acme/sees": model, "acme/gated": model}, {"acme/gated"})) as hub:
        settings = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        words = ["tools/caption_images.py", str(tmp_path / "images"), "acme/gated", "acme/sees"]
        how: Any = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
        done = subprocess.run([sys.executable, "-c", CAPTION_TWICE, *words], env=settings, **how)
    assert done.stderr.count("acme/gated is gated; accept its licence at") == 1
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "ended with 2, None"), done.stderr
    expected = said(model, Image.open(tmp_path / "images/0.png"), most=256)
    assert (tmp_path / "images/0.txt").read_text() == expected


def test_a_dataset_whose_captions_all_stand_in_metadata_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "photos" / "a.png")
    (tmp_path / "list.jsonl").write_text('{"image_path": "photos/a.png", "caption": "x"}\n')
    text = '[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = "photos"\nmetadata_file = "list.jsonl"\n'
    (tmp_path / "lists.toml").write_text(text)
    assert "no subset has captions in text files" in refusal(caption_images, tmp_path / "lists.toml", "--model", "none")
