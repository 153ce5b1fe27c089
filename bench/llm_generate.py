"""Cached greedy decoding and reading of prompts beside transformers and llama.cpp.

All generate from the same weights, of any language model that Tandem reads; transformers gets it as a folder,
dequantised. Tandem's is loaded as ``tools/generate.py --dtype`` loads it; transformers has no ``int8`` on a CPU and
stands beside it in bf16. llama.cpp stands beside ``int8`` if the model is a GGUF file and xllamacpp is installed
(``requirements/bench.txt``); it computes with the file's own types. Time as ``bench.measure`` takes it, the median of a
case; of a batch the milliseconds of all its rows. Tandem sets in generation only how threads wait for each other: with
one thread both ways are the same, and there is one row.

    python bench/llm_generate.py --model PATH [--threads 1] [--dtypes fp32 bf16 int8] [--json PATH]
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from bench.measure import WAITING, Case, Table, benchmark_parser, both_ways, clock, finish, measure_time
from library.errors import exit_on_user_error
from library.llm.generation import SamplingSettings, generate_tokens
from library.models.llm.files import export_hf, load_lm
from tools.command import load_language_model

NEW_TOKENS, PROMPT = 32, 30
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16}
Generate = Callable[[list[list[int]], int], object]


def tandem(source: Path, dtype: str) -> Generate:
    """Return the function from prompts and a number of new tokens to these."""
    model = load_language_model(source, dtype, False)
    return lambda prompts, new: generate_tokens(model, prompts, SamplingSettings(max_new_tokens=new, temperature=0))


def transformers(folder: Path, dtype: str) -> Generate:
    """Return the same of transformers' model in ``folder``."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=_DTYPES[dtype]).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new: int) -> Tensor:
        tokens = torch.tensor(prompts)
        options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)

    return generate


def llama_cpp(source: Path, rows: int, length: int) -> Generate:
    """Return the same of llama.cpp's server, for up to ``rows`` prompts that become ``length`` tokens."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.n_ctx = str(source), rows, rows * length
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    params.verbosity = 0
    server, options = xllamacpp.Server(params), {"temperature": 0, "cache_prompt": False, "ignore_eos": True}
    return lambda prompts, new: server.handle_completions({"prompt": prompts, "max_tokens": new} | options)


def _has_llama_cpp() -> bool:
    found = find_spec("xllamacpp") is not None
    if not found:
        print("llama.cpp is left out; to measure it: pip install --no-deps -r requirements/bench.txt")
    return found


def times(inputs: list[list[list[int]]], generate: Generate) -> list[tuple[float, float]]:
    """Return of each batch of prompts the seconds until its first token, and of each token behind it."""
    found = []
    for prompts in inputs:
        started = clock()
        generate(prompts, 1)
        first = clock() - started
        generate(prompts, 1 + NEW_TOKENS)
        found.append((first, (clock() - started - 2 * first) / NEW_TOKENS))
    return found


def model_rows(table: Table, source: Path, options: Any) -> dict[str, float]:
    """Add the rows of a model; return ratios of the others' time to ours."""
    ratios, sizes = {}, [*itertools.product(options.batches, options.prompts)]
    model, draw = load_lm(source, torch.float32, dequantised=True), torch.Generator().manual_seed(0)
    inputs = [torch.randint(0, model.config.vocab_size, size, generator=draw).tolist() for size in sizes]
    with tempfile.TemporaryDirectory() as folder:
        theirs_in = export_hf(model, folder)
        for dtype in options.dtypes:
            cases = {"tandem": Case(tandem, (source, dtype)), "transformers": Case(transformers, (theirs_in, dtype))}
            if dtype == "int8" and source.suffix == ".gguf" and _has_llama_cpp():
                length = max(options.prompts) + NEW_TOKENS + 1
                cases["llama.cpp"] = Case(llama_cpp, (source, max(options.batches), length))
            if options.threads > 1:
                cases = both_ways(cases, WAITING)
            found = measure_time(cases, options.rounds, options.threads, partial(times, inputs))
            medians = {who: torch.tensor(turns).median(dim=0).values for who, turns in found.items()}  # [sizes, 2]
            for (who, taken), (i, (batch, prompt)) in itertools.product(medians.items(), enumerate(sizes)):
                first, token = taken[i].tolist()
                row = {"dtype": dtype, "batch": batch, "prompt": prompt, "who": who}
                table.add(row | {"prompt_ms": first * 1e3, "token_ms": token * 1e3})
                for what, ratio in zip(("prompt", "token"), (taken[i] / medians["tandem"][i]).tolist(), strict=True):
                    ratios[f"{what} {dtype}, batch {batch}, prompt {prompt}: {who}"] = round(ratio, 3)
    return ratios


@exit_on_user_error
def main() -> None:
    """Measure and print the table."""
    parser = benchmark_parser(__doc__, rounds=5)
    parser.add_argument("--model", type=Path, required=True, help="folder or GGUF file")
    parser.add_argument("--threads", type=int, default=1, help="of a case; above 1 time is the clock's (%(default)s)")
    parser.add_argument("--dtypes", nargs="+", choices=_DTYPES, default=list(_DTYPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompts", nargs="+", type=int, default=[PROMPT], help="tokens of a prompt")
    options = parser.parse_args()
    table = Table({"dtype": "<6", "batch": "6", "prompt": "7", "who": "<27", "prompt_ms": "10.1f", "token_ms": "9.2f"})
    ratios = model_rows(table, options.model, options)
    finish(table.rows, ratios, options.json)


if __name__ == "__main__":
    main()
