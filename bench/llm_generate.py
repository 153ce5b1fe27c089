"""Cached greedy decoding and reading of prompts beside transformers: ms by the clock.

Both generate from the same weights, a tiny GPT-2 and a tiny Llama (vocabulary 8192, 6 layers, width 384), or with
``--model`` any language model that Tandem reads; transformers gets it as a folder, dequantised. Tandem's is loaded as
``tools/generate.py --dtype`` loads it; transformers has no ``int8`` on a CPU and stands beside it in bf16. The two take
turns, the median of a case counts.

    python bench/llm_generate.py [--model PATH] [--threads 1] [--dtypes fp32 bf16 int8] [--json PATH]
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from bench.measure import Table, benchmark_parser, finish
from library.errors import exit_on_user_error
from library.llm.generation import SamplingSettings, generate_tokens
from library.models.llm.files import export_hf, load_lm
from library.models.llm.model import TransformerLM
from library.models.llm.spec import preset
from tools.command import load_language_model

NEW_TOKENS, PROMPT = 32, 30
TINY = ("gpt2-tiny", "llama-tiny")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16}
Generate = Callable[[list[list[int]], int], object]


def tandem(model: TransformerLM) -> Generate:
    """Return the function from prompts and a number of new tokens to these."""
    return lambda prompts, new: generate_tokens(model, prompts, SamplingSettings(max_new_tokens=new, temperature=0))


def transformers(folder: Path, dtype: torch.dtype) -> Generate:
    """Return the same of transformers' model in ``folder``."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new: int) -> Tensor:
        tokens = torch.tensor(prompts)
        options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)

    return generate


def times(generate: Generate, prompts: list[list[int]]) -> tuple[float, float]:
    """Return the seconds of a prompt with its first token, and of each token behind it."""
    started = time.perf_counter()
    generate(prompts, 1)
    first = time.perf_counter()
    generate(prompts, 1 + NEW_TOKENS)
    return first - started, (time.perf_counter() - first - (first - started)) / NEW_TOKENS


def model_rows(table: Table, name: str, source: Path, options: Any, rounds: int) -> dict[str, float]:
    """Add the rows of a model; return ratios of transformers' time to ours."""
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        theirs_in = export_hf(load_lm(source, torch.float32, dequantised=True), folder)
        for dtype in options.dtypes:
            model = load_language_model(source, dtype, False)
            cases = {"tandem": tandem(model), "transformers": transformers(theirs_in, _DTYPES[dtype])}
            for batch, prompt in itertools.product(options.batches, options.prompts):
                generator = torch.Generator().manual_seed(0)
                prompts = torch.randint(0, model.config.vocab_size, (batch, prompt), generator=generator).tolist()
                taken = dict[str, list[tuple[float, float]]]()
                for generate in cases.values():
                    times(generate, prompts)
                for _ in range(rounds):
                    for who, generate in cases.items():
                        taken.setdefault(who, []).append(times(generate, prompts))
                found = {who: [statistics.median(part) for part in zip(*t, strict=True)] for who, t in taken.items()}
                for who, (first, token) in found.items():
                    row = {"model": name, "dtype": dtype, "batch": batch, "prompt": prompt, "implementation": who}
                    table.add(row | {"prompt_ms": first * 1e3, "token_ms": token * 1e3})
                label = f"{name} {dtype}, batch {batch}, prompt {prompt}"
                for i, what in enumerate(("prompt", "token")):
                    ratios[f"{what} {label}"] = round(found["transformers"][i] / found["tandem"][i], 3)
    return ratios


@exit_on_user_error
def main() -> None:
    """Measure and print the table."""
    parser = benchmark_parser(__doc__, rounds=5)
    parser.add_argument("--model", type=Path, help="folder or GGUF file; default: two tiny ones with random weights")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtypes", nargs="+", choices=_DTYPES, default=list(_DTYPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompts", nargs="+", type=int, default=[PROMPT], help="tokens of a prompt")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    widths = {"model": "<28", "dtype": "<6", "batch": "6", "prompt": "7", "implementation": "<14"}
    table = Table(widths | {"prompt_ms": "10.1f", "token_ms": "9.2f"})
    with tempfile.TemporaryDirectory() as folder:
        sources = {options.model.stem: options.model} if options.model else {}
        for name in TINY if not sources else ():
            torch.manual_seed(0)
            sources[name] = export_hf(TransformerLM(preset(name)).initialise(), Path(folder) / name)
        ratios: dict[str, float] = {}
        for name, source in sources.items():
            ratios |= model_rows(table, name, source, options, options.rounds)
    finish(table.rows, ratios, options.json)


if __name__ == "__main__":
    main()
