"""Peak memory of loading a model: Tandem, the published libraries, and loading a state dict the plain way.

A FLUX-shaped model of random numbers is written to a temporary folder, as a diffusers folder and as BFL's
single file. Each case then loads it in a process of its own. Reported is the peak of the process's resident
memory during loading above what it was before (Linux: VmHWM, reset through /proc/self/clear_refs), in bytes
and over the size of the loaded model, and the seconds taken. Pages of a mapped file count as resident while
they are mapped, although the system may drop them when memory is short; `anonymous` is the part that it may
not drop, sampled every 2 ms.

With ``--model llm`` the same is measured for a Llama. There ``naive`` is what tutorials do: a model with random
weights, the whole file read beside it, copied over. ``sequential`` copies tensor by tensor into such a model; ``meta``
builds without memory and takes the whole file's tensors over; ``mmap`` takes over tensors that are mapped from the
file. Tandem reads each tensor straight into its place, also where it is a part of a joined matrix and where the file is
one of Meta's.

    python bench/loading.py [--json PATH] [--model flux] [--single-blocks 2]
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from bench.measure import benchmark_parser, finish, reset_peak, resident
from library.errors import exit_on_user_error
from library.models.llm.files import load_lm
from library.models.llm.spec import config_to_hf, llama


@dataclass(frozen=True)
class Sizes:
    """Shape of the generated transformer; the default is FLUX.1's width with few blocks, 1.5 GB in bf16."""

    width: int = 3072
    head_dim: int = 128
    double_blocks: int = 1
    single_blocks: int = 2
    text_width: int = 4096


FLUX_CASES = (
    "tandem folder",
    "diffusers folder",
    "tandem single file",
    "diffusers single file",
    "plain single file",
    "tandem single file, bf16 to fp32",
    "diffusers single file, bf16 to fp32",
    "plain single file, bf16 to fp32",
)


def write_flux(folder: Path, sizes: Sizes) -> None:
    """Write the model in bf16: ``folder/transformer`` (diffusers) and ``folder/flux1.safetensors`` (BFL)."""
    from diffusers import FluxTransformer2DModel

    from tests.tiny import bfl_state_dict

    first = sizes.head_dim // 8
    with torch.device("meta"):
        model = FluxTransformer2DModel(
            num_layers=sizes.double_blocks,
            num_single_layers=sizes.single_blocks,
            attention_head_dim=sizes.head_dim,
            num_attention_heads=sizes.width // sizes.head_dim,
            joint_attention_dim=sizes.text_width,
            pooled_projection_dim=768,
            guidance_embeds=True,
            axes_dims_rope=(first, (sizes.head_dim - first) // 2, (sizes.head_dim - first) // 2),
        )
    tile = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    state = {name: _tiled(tile, tensor.shape) for name, tensor in model.state_dict().items()}
    (folder / "transformer").mkdir(parents=True)
    model.save_config(folder / "transformer")
    save_file(state, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    save_file(bfl_state_dict(state), folder / "flux1.safetensors")


def _tiled(tile: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return tile.repeat(-(-shape.numel() // tile.numel()))[: shape.numel()].reshape(shape).clone()


def flux_loader(case: str, folder: Path) -> Callable[[], nn.Module]:
    """Return the function that a case measures; everything it imports is imported already."""
    from diffusers import FluxTransformer2DModel
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

    from library.models.files import file_arguments
    from library.models.flux.files import FILES
    from library.models.weights import identity_map, load_into, read_config
    from library.precision.checkpoint_layouts import WeightFiles

    dtype = torch.float32 if case.endswith("to fp32") else torch.bfloat16
    single, parts = folder / "flux1.safetensors", folder / "transformer"

    def tandem_folder() -> nn.Module:
        weights, config = WeightFiles(parts), read_config(parts)
        names = identity_map(weights.names)
        return load_into(lambda: FluxTransformer2DModel.from_config(config), weights, names, dtype)

    def tandem_single() -> nn.Module:
        weights = WeightFiles(single)
        prefix, config = file_arguments(weights, FILES)
        key_map = FILES.key_map(weights, prefix)
        return load_into(lambda: FluxTransformer2DModel.from_config(config), weights, key_map, dtype)

    def diffusers_folder() -> nn.Module:
        return FluxTransformer2DModel.from_pretrained(parts, torch_dtype=dtype)

    def diffusers_single() -> nn.Module:
        return FluxTransformer2DModel.from_single_file(str(single), config=str(parts), torch_dtype=dtype)

    def plain_single() -> nn.Module:
        model = FluxTransformer2DModel.from_config(read_config(parts))
        model.load_state_dict(convert_flux_transformer_checkpoint_to_diffusers(load_file(single)))
        return model.to(dtype)

    return {
        "tandem folder": tandem_folder,
        "diffusers folder": diffusers_folder,
        "tandem single file": tandem_single,
        "diffusers single file": diffusers_single,
        "plain single file": plain_single,
    }[case.partition(",")[0]]


def measure(case: str, folder: Path, model_kind: str = "flux") -> dict:
    """Load as ``case`` says and return its row; call it in a fresh process."""
    load = (llm_loader if model_kind == "llm" else flux_loader)(case, folder)
    gc.collect()
    before, before_anonymous = resident("VmRSS"), resident("RssAnon")
    reset_peak()
    peak_anonymous, done = [before_anonymous], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak_anonymous[0] = max(peak_anonymous[0], resident("RssAnon"))

    watcher = threading.Thread(target=watch, daemon=True)  # an error in loading must end the process
    watcher.start()
    start = time.perf_counter()
    model = load()
    for parameter in model.parameters():
        parameter.detach().view(-1).view(torch.uint8)[::4096].sum()  # a mapped page counts once touched
    seconds = time.perf_counter() - start
    peak = resident("VmHWM") - before
    done.set()
    watcher.join()
    size = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "case": case,
        "model_bytes": size,
        "peak_bytes": peak,
        "peak_over_model": round(peak / size, 3),
        "anonymous_over_model": round((max(peak_anonymous[0], resident("RssAnon")) - before_anonymous) / size, 3),
        "seconds": round(seconds, 2),
    }


def _in_own_process(case: str, folder: Path, model: str) -> dict:
    command = [sys.executable, __file__, "--case", case, "--folder", str(folder), "--model", model]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def flux_ratios(rows: list[dict]) -> dict[str, float]:
    by_case = {row["case"]: row["peak_over_model"] for row in rows}
    ours = [figure for case, figure in by_case.items() if case.startswith("tandem")]
    return {
        "peak_over_model": max(ours),
        "peak_over_diffusers_folder": round(by_case["tandem folder"] / by_case["diffusers folder"], 3),
        "peak_over_diffusers_single_file": round(by_case["tandem single file"] / by_case["diffusers single file"], 3),
        "peak_over_plain_loading": round(by_case["tandem single file"] / by_case["plain single file"], 3),
    }


LLM_CASES = (
    "tandem",
    "tandem sharded",
    "tandem Meta's file",
    "tandem fp8",
    "transformers",
    "naive",
    "sequential",
    "meta",
    "mmap",
)
_LLAMA = llama(2048, 6, 32, 8, 8192, vocab_size=32000, context=4096)  # of Llama 3.2 1B's width, 1 GB in bf16


def write_llm(folder: Path) -> None:
    """Write the model in bf16: one file, shards, and Meta's layout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = config_to_hf(_LLAMA)
    values.pop("architectures")
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).state_dict()
    tile = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    state = {}
    for i, (name, tensor) in enumerate(shapes.items()):  # no two alike, or the head would count as tied
        tiles = tile.roll(i).repeat(-(-tensor.numel() // tile.numel()))
        state[name] = tiles[: tensor.numel()].reshape(tensor.shape).clone()
    for part in ("whole", "shards", "meta"):
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps(config_to_hf(_LLAMA)))
    save_file(state, folder / "whole/model.safetensors", metadata={"format": "pt"})
    names, weight_map = list(state), {}
    for i in range(2):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        save_file({name: state[name] for name in names[i::2]}, folder / "shards" / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names[i::2], file)
    (folder / "shards/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "meta/config.json").unlink()
    torch.save({_meta_name(name): tensor for name, tensor in state.items()}, folder / "meta/consolidated.00.pth")
    params = {"dim": 2048, "n_layers": 6, "n_heads": 32, "n_kv_heads": 8, "rope_theta": 500000.0}
    (folder / "meta/params.json").write_text(json.dumps(params))


def _meta_name(name: str) -> str:
    for theirs, metas in {
        "model.embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "model.": "",
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }.items():
        name = name.replace(theirs, metas)
    return name


def llm_loader(case: str, folder: Path) -> Callable[[], nn.Module]:
    """Return the function that a case measures; everything it imports is imported already."""
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

    from library.precision.recipe import Fp8Loader, Fp8Recipe

    whole, file, dtype = folder / "whole", folder / "whole/model.safetensors", torch.bfloat16
    config = AutoConfig.from_pretrained(whole)

    def built() -> nn.Module:
        return LlamaForCausalLM(config).to(dtype)

    def naive() -> nn.Module:
        model = built()
        model.load_state_dict(load_file(file))
        return model

    def sequential() -> nn.Module:
        model = built()
        with safe_open(file, "pt") as tensors, torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(tensors.get_tensor(name))
        return model

    def meta() -> nn.Module:
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        state = {name: tensor.clone() for name, tensor in load_file(file).items()}
        model.load_state_dict(state, assign=True)
        return model

    def mapped() -> nn.Module:
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model.load_state_dict(load_file(file), assign=True)
        return model

    fp8 = Fp8Loader(recipe=Fp8Recipe(granularity="row"), compute="dequant")
    return {
        "tandem": lambda: load_lm(whole, dtype),
        "tandem sharded": lambda: load_lm(folder / "shards", dtype),
        "tandem Meta's file": lambda: load_lm(folder / "meta", dtype),
        "tandem fp8": lambda: load_lm(whole, dtype, fp8=fp8),
        "transformers": lambda: AutoModelForCausalLM.from_pretrained(whole, dtype=dtype),
        "naive": naive,
        "sequential": sequential,
        "meta": meta,
        "mmap": mapped,
    }[case]


def llm_ratios(rows: list[dict]) -> dict[str, float]:
    """Return the worst of ours over the model's size (fp8: over the file's), and over the naive way."""
    peak = {row["case"]: row["peak_over_model"] for row in rows}
    size = next(row["model_bytes"] for row in rows if row["case"] == "tandem")
    high = [peak[case] for case in ("tandem", "tandem sharded", "tandem Meta's file")]
    fp8 = next(row["peak_bytes"] for row in rows if row["case"] == "tandem fp8")
    return {
        "peak_over_file": max(high),
        "fp8_peak_over_bf16_file": round(fp8 / size, 3),
        "peak_over_naive": round(peak["tandem"] / peak["naive"], 3),
        "peak_over_transformers": round(peak["tandem"] / peak["transformers"], 3),
    }


@exit_on_user_error
def main() -> None:
    """Run every case and print the table."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", choices=("flux", "llm"), default="flux", help="what is loaded")
    parser.add_argument("--single-blocks", type=int, default=2, help="blocks of 0.28 GB to add")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, options.folder, options.model)))
        return
    folder = Path(tempfile.mkdtemp(prefix="tandem-loading-"))
    try:
        if options.model == "llm":
            write_llm(folder)
        else:
            write_flux(folder, Sizes(single_blocks=options.single_blocks))
        cases = LLM_CASES if options.model == "llm" else FLUX_CASES
        rows = [_in_own_process(case, folder, options.model) for case in cases]
    finally:
        shutil.rmtree(folder)
    print(f"{'case':<38}{'model MB':>10}{'peak MB':>10}{'peak/model':>12}{'anonymous':>11}{'seconds':>9}")
    for row in rows:
        print(
            f"{row['case']:<38}{row['model_bytes'] / 1e6:>10.0f}{row['peak_bytes'] / 1e6:>10.0f}"
            f"{row['peak_over_model']:>12.2f}{row['anonymous_over_model']:>11.2f}{row['seconds']:>9.2f}"
        )
    finish(rows, llm_ratios(rows) if options.model == "llm" else flux_ratios(rows), options.json)


if __name__ == "__main__":
    main()
