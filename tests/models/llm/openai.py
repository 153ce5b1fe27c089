"""GPT-2 as OpenAI publishes it, a TensorFlow checkpoint, written without TensorFlow."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel


def write_openai_checkpoint(folder: Path, model: PreTrainedModel) -> None:
    """Write hparams.json and model.ckpt of a transformers GPT-2."""
    tensors = {}
    for key, tensor in model.transformer.state_dict().items():
        parts = key.split(".")
        leaf = {"weight": "w", "bias": "b"}[parts[-1]]
        if parts[0] in ("wte", "wpe"):
            tensors[f"model/{parts[0]}"] = tensor
        elif "ln_" in key:
            path = "/".join(parts[:-1]).replace("h/", "h")
            tensors[f"model/{path}/{'g' if leaf == 'w' else 'b'}"] = tensor
        else:
            path = "/".join(parts[:-1]).replace("h/", "h", 1)
            tensors[f"model/{path}/{leaf}"] = tensor[None] if leaf == "w" else tensor
    write_tensorflow_checkpoint(folder / "model.ckpt", tensors)
    config = model.config
    sizes = (config.vocab_size, config.n_positions, config.n_embd, config.n_head, config.n_layer)
    hparams = dict(zip(("n_vocab", "n_ctx", "n_embd", "n_head", "n_layer"), sizes, strict=True))
    (folder / "hparams.json").write_text(json.dumps(hparams))


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def leveldb_block(entries: list[tuple[bytes, bytes]]) -> bytes:
    """Return a block with a restart point every third entry, prefixes shared in between."""
    body, restarts, last = b"", [], b""
    for i, (key, value) in enumerate(entries):
        shared = 0
        if i % 3 == 0:
            restarts.append(len(body))
        else:
            while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                shared += 1
        body += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    return body + struct.pack(f"<{len(restarts)}I", *restarts) + struct.pack("<I", len(restarts))


def write_tensorflow_checkpoint(stem: Path, tensors: dict[str, Tensor]) -> None:
    """Write a bundle as TensorFlow does: two data blocks in the index, the header entry first."""
    data, entries = b"", [(b"", b"\x08\x01")]  # BundleHeaderProto: num_shards = 1
    for name in sorted(tensors):
        raw = tensors[name].contiguous().numpy().tobytes()
        shape = b"".join(b"\x12" + varint(len(dim)) + dim for dim in (b"\x08" + varint(s) for s in tensors[name].shape))
        entry = b"\x08\x01" + b"\x12" + varint(len(shape)) + shape  # DT_FLOAT, shape; shard 0 is left out
        entry += (b"\x20" + varint(len(data)) if data else b"") + b"\x28" + varint(len(raw)) + b"\x35\x00\x00\x00\x00"
        entries.append((name.encode(), entry))
        data += raw
    index, handles = b"", []
    for part in (entries[: len(entries) // 2], entries[len(entries) // 2 :]):
        block = leveldb_block(part)
        handles.append((part[-1][0], varint(len(index)) + varint(len(block))))
        index += block + b"\x00" + b"\x00" * 4  # no compression; a checksum nobody reads
    footer = b""
    for block in (struct.pack("<II", 0, 1), leveldb_block(handles)):  # metaindex (empty), index
        footer += varint(len(index)) + varint(len(block))
        index += block + b"\x00" * 5
    index += footer.ljust(40, b"\x00") + struct.pack("<Q", 0xDB4775248B80FB57)
    stem.with_name(stem.name + ".index").write_bytes(index)
    stem.with_name(stem.name + ".data-00000-of-00001").write_bytes(data)
