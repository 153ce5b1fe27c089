"""Peak memory of loading a language model: Tandem, transformers, and loading a state dict in the ways of tutorials.

A Llama of random numbers is written to a temporary folder: one file, shards, and Meta's layout. Each case then loads it
in a process of its own. Reported is the peak of the process's resident memory during loading above what it was before
(Linux: VmHWM, reset through /proc/self/clear_refs), in bytes and over the size of the loaded model, and the seconds
taken. Pages of a mapped file count as resident while they are mapped, although the system may drop them when memory is
short; `anonymous` is the part that it may not drop, read every 2 ms.

``naive`` is what tutorials do: a model with random weights, the whole file read beside it, copied over. ``sequential``
copies tensor by tensor into such a model; ``meta`` builds without memory and takes the whole file's tensors over;
``mmap`` takes over tensors that are mapped from the file. Tandem reads each tensor straight into its place, also where
it is a part of a joined matrix and where the file is one of Meta's.

    python bench/loading.py [--json PATH]
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bench.measure import Table, benchmark_parser, finish, reset_peak, resident, watched
from library.errors import exit_on_user_error
from library.models.llm.files import load_lm, meta_name
from library.models.llm.spec import LMConfig, config_to_hf, llama

Cases = dict[str, Callable[[], nn.Module]]  # case -> what is measured; all it imports is imported already


def random_weights(shapes: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return bf16 tensors of those shapes, no two alike, or a head would count as tied."""
    tile = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    state = {}
    for i, (name, tensor) in enumerate(shapes):
        tiles = tile.roll(i).repeat(-(-tensor.numel() // tile.numel()))
        state[name] = tiles[: tensor.numel()].reshape(tensor.shape).clone()
    return state


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


LLAMA = llama(2048, 6, 32, 8, 8192, vocab_size=32000, context=4096)  # of Llama 3.2 1B's width, 1 GB in bf16


def write_model(folder: Path, model: LMConfig = LLAMA) -> None:
    """Write a model in bf16: one file, shards, and Meta's layout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = config_to_hf(model)
    values.pop("architectures")
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).state_dict()
    state = random_weights(shapes.items())
    for part in ("one", "shards", "meta"):
        (folder / part).mkdir(parents=True)
    for part in ("one", "shards"):
        (folder / part / "config.json").write_text(json.dumps(config_to_hf(model)))
    save_file(state, folder / "one/model.safetensors", metadata={"format": "pt"})
    names, weight_map = list(state), {}
    for i in range(2):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        save_file({name: state[name] for name in names[i::2]}, folder / "shards" / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names[i::2], file)
    (folder / "shards/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save({meta_name(name): tensor for name, tensor in state.items()}, folder / "meta/consolidated.00.pth")
    params = {"dim": model.width, "n_layers": model.layers, "n_heads": model.heads, "n_kv_heads": model.kv_heads}
    params["rope_theta"] = model.rope_theta
    (folder / "meta/params.json").write_text(json.dumps(params))


def cases(folder: Path) -> Cases:
    """Return the ways to load what :func:`write_model` wrote."""
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
    options = benchmark_parser(__doc__).parse_args()
    sizes = {"model_bytes": "13,", "peak_bytes": "13,", "peak_over_model": "15.2f", "anonymous_over_model": "20.2f"}
    table = Table({"case": "<37", **sizes, "seconds": "8.2f"})
    with tempfile.TemporaryDirectory(prefix="tandem-loading-") as temporary:
        folder = Path(temporary)
        write_model(folder)
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
            for case in cases(folder):
                table.add(pool.submit(measure, cases, case, folder).result())
    finish(table.rows, {}, options.json)


if __name__ == "__main__":
    main()
