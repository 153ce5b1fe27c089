"""Peak memory of loading a model: Tandem, the published libraries, and loading a state dict the plain way.

A FLUX-shaped model of random numbers is written to a temporary folder, as a diffusers folder and as BFL's
single file. Each case then loads it in a process of its own. Reported is the peak of the process's resident
memory during loading above what it was before (Linux: VmHWM, reset through /proc/self/clear_refs), in bytes
and over the size of the loaded model, and the seconds taken. Pages of a mapped file count as resident while
they are mapped, although the system may drop them when memory is short; `anonymous` is the part that it may
not drop, read every 2 ms.

With ``--model llm`` the same is measured for a Llama. There ``naive`` is what tutorials do: a model with random
weights, the whole file read beside it, copied over. ``sequential`` copies tensor by tensor into such a model; ``meta``
builds without memory and takes the whole file's tensors over; ``mmap`` takes over tensors that are mapped from the
file. Tandem reads each tensor straight into its place, also where it is a part of a joined matrix and where the file is
one of Meta's.

    python bench/loading.py [--json PATH] [--model flux] [--single-blocks 2]
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bench.families import Sizes, build_transformer
from bench.measure import Table, benchmark_parser, finish, reset_peak, resident, run_alone, watched
from library.errors import exit_on_user_error
from library.models.llm.files import load_lm, meta_name
from library.models.llm.spec import config_to_hf, llama

Cases = dict[str, Callable[[], nn.Module]]  # case -> what is measured; all it imports is imported already


def random_weights(shapes: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return bf16 tensors of those shapes, no two alike, or a head would count as tied."""
    tile = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    state = {}
    for i, (name, tensor) in enumerate(shapes):
        tiles = tile.roll(i).repeat(-(-tensor.numel() // tile.numel()))
        state[name] = tiles[: tensor.numel()].reshape(tensor.shape).clone()
    return state


def write_flux(folder: Path, sizes: Sizes) -> None:
    """Write the model in bf16: ``folder/transformer`` (diffusers) and ``folder/flux1.safetensors`` (BFL)."""
    from tests.tiny import bfl_state_dict

    model = build_transformer("flux", sizes, torch.bfloat16, "meta")
    state = random_weights(model.state_dict().items())
    (folder / "transformer").mkdir(parents=True)
    model.save_config(folder / "transformer")
    save_file(state, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    save_file(bfl_state_dict(state), folder / "flux1.safetensors")


def flux_cases(folder: Path) -> Cases:
    """Return the ways to load what :func:`write_flux` wrote: as it is, and from a single file into fp32."""
    from diffusers import FluxTransformer2DModel
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

    from library.models.files import file_arguments
    from library.models.flux.files import FILES
    from library.models.weights import identity_map, load_into, read_config
    from library.precision.checkpoint import WeightFiles

    single, parts = folder / "flux1.safetensors", folder / "transformer"
    build = FluxTransformer2DModel.from_config

    def tandem_folder() -> nn.Module:
        weights, config = WeightFiles(parts), read_config(parts)
        return load_into(lambda: build(config), weights, identity_map(weights.names), torch.bfloat16)

    def tandem_single(dtype: torch.dtype) -> nn.Module:
        weights = WeightFiles(single)
        prefix, config = file_arguments(weights, FILES)
        return load_into(lambda: build(config), weights, FILES.key_map(weights, prefix), dtype)

    def diffusers_single(dtype: torch.dtype) -> nn.Module:
        return FluxTransformer2DModel.from_single_file(str(single), config=str(parts), torch_dtype=dtype)

    def plain_single(dtype: torch.dtype) -> nn.Module:
        model = build(read_config(parts))
        model.load_state_dict(convert_flux_transformer_checkpoint_to_diffusers(load_file(single)))
        return model.to(dtype)

    found: Cases = {
        "tandem folder": tandem_folder,
        "diffusers folder": lambda: FluxTransformer2DModel.from_pretrained(parts, torch_dtype=torch.bfloat16),
    }
    singles = {"tandem": tandem_single, "diffusers": diffusers_single, "plain": plain_single}
    for dtype, into in ((torch.bfloat16, ""), (torch.float32, ", bf16 to fp32")):
        found |= {f"{who} single file{into}": partial(load, dtype) for who, load in singles.items()}
    return found


def measure(cases: Callable[[Path], Cases], case: str, folder: Path) -> dict:
    """Load as ``case`` says and return its row; call it in a fresh process."""
    load = cases(folder)[case]
    gc.collect()
    before, before_anonymous = resident("VmRSS"), resident("RssAnon")
    reset_peak()
    with watched(partial(resident, "RssAnon"), 0.002) as anonymous:
        start = time.perf_counter()
        model = load()
        for parameter in model.parameters():
            parameter.detach().view(-1).view(torch.uint8)[::4096].sum()  # a mapped page counts once touched
        seconds = time.perf_counter() - start
        peak = resident("VmHWM") - before
    size = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "case": case,
        "model_bytes": size,
        "peak_bytes": peak,
        "peak_over_model": round(peak / size, 3),
        "anonymous_over_model": round((max(anonymous) - before_anonymous) / size, 3),
        "seconds": round(seconds, 2),
    }


_LLAMA = llama(2048, 6, 32, 8, 8192, vocab_size=32000, context=4096)  # of Llama 3.2 1B's width, 1 GB in bf16


def write_llm(folder: Path) -> None:
    """Write the model in bf16: one file, shards, and Meta's layout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = config_to_hf(_LLAMA)
    values.pop("architectures")
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).state_dict()
    state = random_weights(shapes.items())
    for part in ("one", "shards", "meta"):
        (folder / part).mkdir(parents=True)
    for part in ("one", "shards"):
        (folder / part / "config.json").write_text(json.dumps(config_to_hf(_LLAMA)))
    save_file(state, folder / "one/model.safetensors", metadata={"format": "pt"})
    names, weight_map = list(state), {}
    for i in range(2):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        save_file({name: state[name] for name in names[i::2]}, folder / "shards" / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names[i::2], file)
    (folder / "shards/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save({meta_name(name): tensor for name, tensor in state.items()}, folder / "meta/consolidated.00.pth")
    params = {"dim": _LLAMA.width, "n_layers": _LLAMA.layers, "n_heads": _LLAMA.heads, "n_kv_heads": _LLAMA.kv_heads}
    params["rope_theta"] = _LLAMA.rope_theta
    (folder / "meta/params.json").write_text(json.dumps(params))


def llm_cases(folder: Path) -> Cases:
    """Return the ways to load what :func:`write_llm` wrote."""
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

    from library.precision.files.fp8 import Fp8Scheme
    from library.precision.recipe import Recipe, WeightLoader

    one, file, dtype = folder / "one", folder / "one/model.safetensors", torch.bfloat16
    config = AutoConfig.from_pretrained(one)

    def naive() -> nn.Module:
        model = LlamaForCausalLM(config).to(dtype)
        model.load_state_dict(load_file(file))
        return model

    def sequential() -> nn.Module:
        model = LlamaForCausalLM(config).to(dtype)
        with safe_open(file, "pt") as tensors, torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(tensors.get_tensor(name))
        return model

    def taking_over(copied: bool) -> nn.Module:
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        state = {name: tensor.clone() if copied else tensor for name, tensor in load_file(file).items()}
        model.load_state_dict(state, assign=True)
        return model

    fp8 = WeightLoader(recipe=Recipe(Fp8Scheme("row")), compute="dequant")
    return {
        "tandem": lambda: load_lm(one, dtype),
        "tandem sharded": lambda: load_lm(folder / "shards", dtype),
        "tandem Meta's file": lambda: load_lm(folder / "meta", dtype),
        "tandem fp8": lambda: load_lm(one, dtype, fp8=fp8),
        "transformers": lambda: AutoModelForCausalLM.from_pretrained(one, dtype=dtype),
        "naive": naive,
        "sequential": sequential,
        "meta": lambda: taking_over(copied=True),
        "mmap": lambda: taking_over(copied=False),
    }


@exit_on_user_error
def main() -> None:
    """Run every case and print the table."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", choices=("flux", "llm"), default="flux", help="what is loaded")
    parser.add_argument("--single-blocks", type=int, default=2, help="blocks of 0.28 GB to add")
    options = parser.parse_args()
    cases = llm_cases if options.model == "llm" else flux_cases
    sizes = {"model_bytes": "13,", "peak_bytes": "13,", "peak_over_model": "15.2f", "anonymous_over_model": "20.2f"}
    table = Table({"case": "<37", **sizes, "seconds": "8.2f"})
    with tempfile.TemporaryDirectory(prefix="tandem-loading-") as temporary:
        folder = Path(temporary)
        if options.model == "llm":
            write_llm(folder)
        else:
            write_flux(folder, Sizes(blocks=(1, options.single_blocks)))
        for case in cases(folder):
            table.add(run_alone(measure, cases, case, folder))
    finish(table.rows, {}, options.json)


if __name__ == "__main__":
    main()
