"""Text encoders as llama.cpp converts them: under its names, which the ``gguf`` package gives, in blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType
from torch import Tensor, nn

from library.errors import UserError
from library.models.flux.text import check_t5, load_t5
from library.models.qwen3 import VL_THETA, load_qwen3, qwen3_width
from library.models.qwen_image.text import check_qwen_text, load_qwen_text
from tests.precision.files.gguf_files import blocks_of, write_gguf
from tests.tiny import tiny_text_encoders
from tests.tiny_qwen import tiny_qwen_text_encoder, tiny_qwen_tokenizer
from tests.tiny_qwen_21 import tiny_21_text_encoder
from tests.tiny_z_image import tiny_z_text_encoder


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
