"""Cached greedy decoding and reading of prompts beside transformers: ms by the clock, and GB/s against the machine's.

Both generate from the same weights, a tiny GPT-2 and a tiny Llama (vocabulary 8192, 6 layers, width 384), or with
``--model`` any language model that Tandem reads; transformers gets it as a folder, dequantised. Tandem's is loaded as
``tools/generate.py --dtype`` loads it; transformers has no ``int8`` on a CPU and stands beside it in bf16. The two take
turns, the median of a case counts. ``--beside litgpt`` takes its ``generate`` in for a Llama's single prompts, if the
package is in ``PYTHONPATH``. ``gb_s`` is the weights that a token reads over its time; the machine's own figure,
printed last, is that of summing a tensor that no cache holds.

    python bench/llm_generate.py [--model PATH] [--threads 1] [--dtypes fp32 bf16 int8] [--beside litgpt] [--json PATH]
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
from safetensors.torch import load_file
from torch import Tensor, nn

from bench.llm_train import litgpt_model
from bench.measure import Table, benchmark_parser, finish
from library.errors import exit_on_user_error
from library.llm.generation import SamplingSettings, generate_tokens
from library.models.llm.files import export_hf, load_lm
from library.models.llm.model import TransformerLM
from library.models.llm.spec import LMConfig, preset
from library.precision.packed_linear import DecodedLinear, Int4Linear
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


def litgpt(folder: Path, config: LMConfig, dtype: torch.dtype) -> Generate:
    """Return the same, of one prompt at a time, of litgpt's model with the weights of ``folder``."""
    from litgpt.generate.base import generate as generate_tokens  # type: ignore[import-not-found]
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama  # type: ignore[import-not-found]

    model, state = litgpt_model(config), dict[str, Tensor]()
    copy_weights_hf_llama(model.config, {}, state, load_file(folder / "model.safetensors"))
    model.load_state_dict(state)
    model.to(dtype).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new: int) -> Tensor:
        (prompt,) = prompts
        model.max_seq_length = len(prompt) + new
        model.set_kv_cache(batch_size=1, dtype=dtype)
        return generate_tokens(model, torch.tensor(prompt), len(prompt) + new, temperature=0.0)[None]

    return generate


def times(generate: Generate, prompts: list[list[int]]) -> tuple[float, float]:
    """Return the seconds of a prompt with its first token, and of each token behind it."""
    started = time.perf_counter()
    generate(prompts, 1)
    first = time.perf_counter()
    generate(prompts, 1 + NEW_TOKENS)
    return first - started, (time.perf_counter() - first - (first - started)) / NEW_TOKENS


def bytes_read(model: TransformerLM) -> int:
    """Return the bytes of the weights that a token reads: all but an embedding that is no head."""
    total = 0
    for module in model.modules():
        if isinstance(module, DecodedLinear):
            bits = 5 if isinstance(module, Int4Linear) else 8  # four, and a scale and an offset of 16 for 32
            total += module.in_features * module.out_features * bits // 8
        elif not isinstance(module, nn.Embedding):
            own = [*module.parameters(recurse=False), *filter(torch.is_tensor, [getattr(module, "packed", None)])]
            total += sum(tensor.numel() * tensor.element_size() for tensor in own)
    return total


def bandwidth() -> float:
    """Return the bytes a second that this machine reads, of the best of ten sums of half a GiB."""
    numbers = torch.ones(1 << 27)
    taken = []
    for _ in range(10):
        started = time.perf_counter()
        numbers.sum()
        taken.append(time.perf_counter() - started)
    return numbers.numel() * numbers.element_size() / min(taken)


def model_rows(table: Table, name: str, source: Path, options: Any, rounds: int) -> dict[str, float]:
    """Add the rows of a model; return ratios of the best other time to ours."""
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        theirs_in = export_hf(load_lm(source, torch.float32, dequantised=True), folder)
        for dtype in options.dtypes:
            model = load_language_model(source, dtype, False)
            programs = {"tandem": tandem(model), "transformers": transformers(theirs_in, _DTYPES[dtype])}
            if options.beside and model.config.family == "llama":
                programs["litgpt"] = litgpt(theirs_in, model.config, _DTYPES[dtype])
            for batch, prompt in itertools.product(options.batches, options.prompts):
                generator = torch.Generator().manual_seed(0)
                prompts = torch.randint(0, model.config.vocab_size, (batch, prompt), generator=generator).tolist()
                cases = {who: run for who, run in programs.items() if who != "litgpt" or batch == 1}
                taken = dict[str, list[tuple[float, float]]]()
                for generate in cases.values():
                    times(generate, prompts)
                for _ in range(rounds):
                    for who, generate in cases.items():
                        taken.setdefault(who, []).append(times(generate, prompts))
                found = {who: [statistics.median(part) for part in zip(*t, strict=True)] for who, t in taken.items()}
                for who, (first, token) in found.items():
                    read = {"gb_s": bytes_read(model) / token / 1e9} if who == "tandem" else {}
                    row = {"model": name, "dtype": dtype, "batch": batch, "prompt": prompt, "implementation": who}
                    table.add(row | {"prompt_ms": first * 1e3, "token_ms": token * 1e3} | read)
                label = f"{name} {dtype}, batch {batch}, prompt {prompt}"
                for i, what in enumerate(("prompt", "token")):
                    others = [own[i] for who, own in found.items() if who != "tandem"]
                    ratios[f"{what} {label}"] = round(min(others) / found["tandem"][i], 3)
    return ratios


@exit_on_user_error
def main() -> None:
    """Measure and print the table."""
    parser = benchmark_parser(__doc__, rounds=5)
    parser.add_argument("--model", type=Path, help="folder or GGUF file; default: two tiny ones with random weights")
    parser.add_argument("--beside", nargs="+", choices=["litgpt"], default=[], help="in PYTHONPATH")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtypes", nargs="+", choices=_DTYPES, default=list(_DTYPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompts", nargs="+", type=int, default=[PROMPT], help="tokens of a prompt")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    widths = {"model": "<28", "dtype": "<6", "batch": "6", "prompt": "7", "implementation": "<14"}
    table = Table(widths | {"prompt_ms": "10.1f", "token_ms": "9.2f", "gb_s": "6.1f"})
    with tempfile.TemporaryDirectory() as folder:
        sources = {options.model.stem: options.model} if options.model else {}
        for name in TINY if not sources else ():
            torch.manual_seed(0)
            sources[name] = export_hf(TransformerLM(preset(name)).initialise(), Path(folder) / name)
        ratios: dict[str, float] = {}
        for name, source in sources.items():
            ratios |= model_rows(table, name, source, options, options.rounds)
    ratios["machine reads, GB/s"] = round(bandwidth() / 1e9, 1)
    finish(table.rows, ratios, options.json)


if __name__ == "__main__":
    main()
