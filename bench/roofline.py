"""What a training step costs a card at least, counted operation by operation without one: a roofline of every case.

A step of a full-size model is traced on fake tensors (``library.training.memory.trace``). Of every operation that
reaches the device are noted the FLOPs of its products, the bytes that it must read and write, and the line that called
it. A card of known rates then needs at least

    sum over operations of max(FLOPs / rate of their dtype, bytes / memory bandwidth)

the roofline of Williams et al. 2009 (doi 10.1145/1498765.1498785), taken for each operation, since one ends before the
next begins. What the host takes to launch them stands beside it: it hides behind the card's work, or the card waits.
Copies over the host link, of swapped blocks and offloaded activations, run beside the computation of their pass, so a
pass takes the longer of the two.

*FLOPs* are those done (``torch.utils.flop_counter``: attention's backward has 5 products to forward's 2, as it computes
the scores again). *Needed* are those without recomputation, of blocks and of scores. *Bytes*: each input and output
once, as far as it is touched: views cost nothing, what is broadcast is read by its own size, what is changed in place
is read and written. No cache is assumed, which is too much for small tensors; no tile is read twice, which is too
little for products. Rates are those of data sheets, which no product reaches: an H100 multiplies 8192 x 8192 x 8192 at
0.80 of its 989 TFLOP/s (docs/benchmarks.md), see ``--efficiency``. A fused optimizer counts as one launch.

*Few blocks stand for all.* Blocks of a kind are alike, so two of each are walked, then three of one kind, and counts go
on in a straight line. Swapped blocks, which are none, go up twice a step. A compiled case is its eager one with all
fused that is neither product nor attention (:func:`fused`): a perfect compiler's, of which Inductor falls short.

``--ladder`` counts the steps of ``bench/llm_ladder.py`` instead, whole models: tokens/s and MFU that the card allows,
and tokens/s that its host does.

    python bench/roofline.py [--only fp8] [--measured gpu.json] [--json PATH]
    python bench/roofline.py --ladder --efficiency 0.8
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from bench.families import FAMILIES
from bench.gpu import GpuCase, build, cases
from bench.llm_ladder import LADDERS, Rung, build_rung, config_of, context_of, flops_of, kernels_of, rungs
from bench.measure import Table, benchmark_parser, finish
from library.errors import UserError, exit_on_user_error
from library.models.family_by_name import family_class
from library.training.memory import fake_cuda, trace
from library.training.memory.block_swap import kind_sizes, kinds_of, swapped_per_kind
from library.training.memory.budget import GIB
from library.training.memory.fake_cuda import pretend
from library.training.memory.trace import MemoryTrace, device_processes, tracing

Piece = tuple[int, int, int]  # of a storage: offset, elements


class Cost(NamedTuple):
    """An operation's FLOPs and bytes; ``site`` is the line that called it, "" if PyTorch's own backward did."""

    name: str
    site: str  # "path:line function"
    kind: str  # products, attention, traffic, or link: a copy between host and card
    phase: str  # forward, recomputed, backward, update
    dtype: str
    flops: float
    bytes: float


class Operation(NamedTuple):
    """A launch, and the bytes of what it reads and writes."""

    cost: Cost
    reads: dict[Piece, int]
    writes: dict[Piece, int]


@dataclass(frozen=True)
class Card:
    """Published rates: dense TFLOP/s by dtype (fp32: not on tensor cores), GB/s of memory and of the link one way."""

    name: str
    rates: dict[str, float]
    memory: float
    link: float

    def seconds(self, cost: Cost, efficiency: float = 1.0) -> float:
        """Return what an operation takes at least; infinite where the card has no such product."""
        if cost.kind == "link":
            return cost.bytes / (self.link * 1e9)
        rate = self.rates.get(cost.dtype, 0.0) * efficiency * 1e12
        computing = (cost.flops / rate if rate else inf) if cost.flops else 0.0
        return max(computing, cost.bytes / (self.memory * 1e9))

    def step(self, costs: Counter[Cost], efficiency: float = 1.0) -> dict[str, float]:
        """Return the seconds of a step by kind; of the link's those that its pass does not hide."""
        found = dict.fromkeys((*_KINDS, "link"), 0.0)
        for forward in (True, False):
            own = dict.fromkeys(found, 0.0)
            for cost, n in costs.items():
                if (cost.phase == "forward") == forward:
                    own[cost.kind] += n * self.seconds(cost, efficiency)
            own["link"] = max(0.0, own["link"] - sum(own[kind] for kind in _KINDS))
            found = {kind: found[kind] + own[kind] for kind in found}
        return found


# Products sum in fp32. The sheets of Hopper state rates with sparsity, twice these; PCIe is stated for both directions.
# A100: https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/
#       nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
# 4090: https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf (appendix A)
# 5090: https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
# H100: https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
# H200: https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446
CARDS = {
    "A100": Card("A100 80GB SXM", {"bf16": 312, "tf32": 156, "fp32": 19.5}, 2039, 32),
    "4090": Card("RTX 4090", {"bf16": 165.2, "tf32": 82.6, "fp8": 330.3, "fp32": 82.6}, 1008, 32),
    "5090": Card("RTX 5090", {"bf16": 209.5, "tf32": 104.8, "fp8": 419, "fp32": 104.8}, 1792, 64),
    "H100": Card("H100 SXM", {"bf16": 989.4, "tf32": 494.7, "fp8": 1978.9, "fp32": 67}, 3350, 64),
    "H200": Card("H200", {"bf16": 989.4, "tf32": 494.7, "fp8": 1978.9, "fp32": 67}, 4800, 64),
}
_KINDS = ("products", "attention", "traffic")
_LAUNCH_US = 46.0  # of a virtual machine with an H100: 0.946 s for 20,337 (docs/benchmarks.md)
_FEW = 2  # blocks a kind
_DTYPES = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8", torch.bfloat16: "bf16", torch.float16: "bf16"}
_ROOT, _TORCH = f"{Path(__file__).resolve().parent.parent}/", str(Path(torch.__file__).parent)
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_"}  # write their first argument and do not read it


class LaunchTrace(MemoryTrace):
    """A trace that notes every launch while it is ``on``."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.on = False
        self._serials: dict[int, int] = {}  # of storages that live: addresses are used again
        self._next = itertools.count()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(operation, types, args, kwargs)
        if self.on and operation.namespace == "aten":
            self._note(operation, args, kwargs or {}, result)
        return result

    def living(self) -> set[int]:
        """Return the storages that live, as pieces name them."""
        return set(self._serials.values())

    def _note(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        name, schema = operation._schema.name.removeprefix("aten::"), operation._schema
        named, read, written = {each.name: each for each in schema.arguments}, list[Tensor](), list[Tensor]()
        given = [*zip(schema.arguments, args, strict=False), *((named.get(key), kwargs[key]) for key in kwargs)]
        for argument, value in given:
            tensors = _tensors(value)
            writes = argument is not None and argument.alias_info is not None and argument.alias_info.is_write
            writes = writes and argument.name != "grads"  # which a fused optimizer changes with a loss scaler alone
            written += tensors if writes else ()
            read += () if writes and (name in _OVERWRITES or argument.kwarg_only) else tensors
        known = {each.untyped_storage()._cdata for each in (*read, *written)}
        made = [each for each in _tensors(result) if each.untyped_storage()._cdata not in known]
        every = [*read, *written, *made]
        if not (written or made) or all(each.device.type == "cpu" for each in every):
            return
        site, phase, stand_in = _place()
        if name.startswith(("empty", "new_empty")):
            if not stand_in.startswith("_FusedRMSNorm") or made[0].dtype == torch.float32:
                return  # an allocation; the stand-in's outputs are those of one kernel, which in backward reads two
            name, read = (
                f"rms_norm {stand_in.rpartition('.')[2]}",
                [args[0], *made] if "back" in stand_in else [args[0]],
            )
        formula = flop_registry.get(getattr(torch.ops.aten, name.removesuffix("_"), None))
        flops = formula(*args, **kwargs, out_val=result) if formula else 0
        between = name in ("copy_", "_to_copy") and len({each.device.type for each in every}) > 1
        kind = "link" if between else "traffic" if not formula else "attention" if "attention" in name else "products"
        reads, writes = self._pieces(read), self._pieces([*written, *made])
        moved = max(sum(reads.values()), sum(writes.values())) if between else sum((*reads.values(), *writes.values()))
        dtype = _DTYPES.get((read or made or written)[0].dtype, "fp32")
        self.operations.append(Operation(Cost(name, site, kind, phase, dtype, flops, moved), reads, writes))

    def _pieces(self, tensors: Iterable[Tensor]) -> dict[Piece, int]:
        """Return the bytes that lie under tensors of the device; what is broadcast lies there once."""
        found = {}
        for each in (each for each in tensors if each.device.type == "cuda"):
            key = each.untyped_storage()._cdata
            if key not in self._serials:
                self._serials[key] = next(self._next)
            own = prod(n for n, stride in zip(each.shape, each.stride(), strict=True) if stride)
            found[self._serials[key], int(each.storage_offset()), own] = own * each.element_size()
        return found

    def _freed(self, key: int) -> None:
        super()._freed(key)
        self._serials.pop(key, None)


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def _place() -> tuple[str, str, str]:
    """Return the innermost line outside of PyTorch, the phase, and which function of the fake device stands in."""
    site, stand_in, again, updating = "", "", False, False
    frame: Any = sys._getframe(3)
    while frame is not None:
        code, path = frame.f_code, frame.f_code.co_filename
        again |= path.endswith("torch/utils/checkpoint.py")
        updating |= "/torch/optim/" in path
        if not site and code.co_name == "_engine_run_backward":
            break  # a node of PyTorch's own called it
        if path in (fake_cuda.__file__, trace.__file__):
            stand_in = stand_in or code.co_qualname
        elif not site and not path.startswith((_TORCH, __file__)):
            short = path.rpartition("site-packages/")[2].removeprefix(_ROOT)
            site = f"{short}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    backward = torch._C._current_graph_task_id() != -1
    phase = "update" if updating else "forward" if not backward else "recomputed" if again else "backward"
    return site, phase, stand_in


class Fusion(NamedTuple):
    """Operations that one kernel could do.

    ``member`` says which, as long as each reads what another wrote and no other operation read it.
    """

    name: str
    member: Callable[[Operation], bool]


def _is_traffic(op: Operation) -> bool:
    return op.cost.kind == "traffic" and op.cost.phase != "update"


COMPILED = Fusion("compiled", _is_traffic)


def fused(operations: Sequence[Operation], living: set[int], fusion: Fusion) -> Counter[Cost]:
    """Return the costs of ``operations`` with those of ``fusion`` joined: what stays within a kernel moves no bytes.

    A fused kernel runs where its last operation did. That is right as long as none outside has read what it writes,
    so a group is closed by the first that does. It writes what is read outside, and what lives when the step is over.
    """
    groups, owner = dict[int, list[int]](), dict[int, int]()  # a group's operations; whose an open storage is
    readers = defaultdict[int, set[int]](set)
    for index, op in enumerate(operations):
        for storage, *_ in op.reads:
            readers[storage].add(index)
        sources = {owner[storage] for storage, *_ in op.reads if storage in owner}
        if fusion.member(op):
            groups[index] = [*itertools.chain(*(groups.pop(each) for each in sources)), index]
            owner = {storage: index if group in sources else group for storage, group in owner.items()}
            owner |= {storage: index for storage, *_ in op.writes}
        else:
            owner = {storage: group for storage, group in owner.items() if group not in sources | {index}}
    grouped = set(itertools.chain(*groups.values()))
    found = Counter(op.cost for index, op in enumerate(operations) if index not in grouped)
    for group in groups.values():
        own = [operations[i] for i in sorted(group)]
        read, written, made = dict[Piece, int](), dict[Piece, int](), set[int]()
        for op in own:
            read |= {each: size for each, size in op.reads.items() if each[0] not in made}
            seen = {storage: storage in living or readers[storage] - set(group) for storage, *_ in op.writes}
            written |= {each: size for each, size in op.writes.items() if seen[each[0]]}
            made |= seen.keys()
        cost = max((op.cost for op in own), key=lambda cost: cost.flops)
        moved, flops = sum(read.values()) + sum(written.values()), sum(op.cost.flops for op in own)
        found[cost._replace(name=fusion.name if len(own) > 1 else cost.name, flops=flops, bytes=moved)] += 1
    return found


@functools.cache
def _process_trace() -> LaunchTrace:
    """Return this process's trace; what would touch the device as it is imported is imported before."""
    for module in ("transformers", "diffusers", "peft"):
        importlib.import_module(module)
    for family in FAMILIES:
        family_class(family)
    launches = LaunchTrace()
    if not torch.cuda.is_available():
        pretend(launches)
    return launches


Sizes = list[tuple[int, int]]  # of each kind of block: weights that can be swapped, their bytes


def walk(case: GpuCase, blocks: tuple[int, ...]) -> tuple[list[Operation], set[int], Sizes]:
    """Return the second step's operations, the storages that outlive it, and sizes; see ``device_processes``."""
    sizes = replace(FAMILIES[case.family], blocks=blocks, batch=case.batch)
    step, operations, living = _second_step(lambda: build(case, sizes, torch.device("cuda"), tiny=False))
    return operations, living, block_sizes(case.family, step.model)


def walk_rung(model: str, rung: Rung) -> Counter[Cost]:
    """Return what a step of a language model's rung costs; in a process of ``device_processes``."""
    eager = replace(rung, compiled=False)
    with kernels_of(rung):
        _, operations, living = _second_step(lambda: build_rung(model, eager, torch.device("cuda")))
    costs = fused(operations, living, COMPILED) if rung.compiled else Counter(op.cost for op in operations)
    if rung.tf32:
        costs = Counter({cost._replace(dtype="tf32") if cost.dtype == "fp32" else cost: n for cost, n in costs.items()})
    return costs


def _second_step(build_step: Callable[[], Any]) -> tuple[Any, list[Operation], set[int]]:
    """Return what is built, its second step's operations, and the storages that outlive it."""
    launches = _process_trace()
    launches.operations = []
    try:
        with tracing(launches):
            step = build_step()
            step.loss()
            launches.on = True
            step.loss()
    finally:
        launches.on = False
    return step, launches.operations, launches.living()


def block_sizes(family: str, transformer: Any) -> Sizes:
    """Return of each kind of block the weights that can be swapped, and their bytes with their scales."""
    blocks = family_class(family).blocks(transformer)
    first = [[*kind[0].parameters(), *kind[0].buffers()] for kind in kinds_of(blocks)]
    large = [[t for t in own if not t.requires_grad and t.ndim > 1 and t.nbytes >= 1 << 16] for own in first]
    return [(n, sum(t.nbytes for t in own)) for (_, n), own in zip(kind_sizes(blocks), large, strict=True)]


class Counted(NamedTuple):
    """A step's costs as it is (""), and with each fusion by its name; sizes."""

    costs: dict[str, Counter[Cost]]
    sizes: Sizes

    def of(self, case: GpuCase) -> Counter[Cost]:
        """Return the costs of ``case``: of what is swapped, each block goes up in forward and in backward."""
        fusion = COMPILED.name if case.compiled else ""
        costs, depth = Counter(self.costs[fusion]), FAMILIES[case.family].blocks
        kinds = [(number, weights) for number, (weights, _) in zip(depth, self.sizes, strict=True)]
        for share, (_, size) in zip(swapped_per_kind(kinds, case.swapped), self.sizes, strict=True):
            for phase in ("forward", "backward"):
                costs[Cost("copy_", "library/training/memory/block_swap.py", "link", phase, "", 0, size)] += share
        return costs


def count(case: GpuCase) -> Counted:
    """Return what a step of the published depth costs, from steps of few blocks; see ``device_processes``."""
    depth = FAMILIES[case.family].blocks
    few = [tuple(_FEW + (kind == more) for kind in range(len(depth))) for more in range(-1, len(depth))]
    walks = [walk(case, blocks) for blocks in few]

    def straight(fusion: Fusion | None) -> Counter[Cost]:
        first, *others = (
            fused(operations, living, fusion) if fusion else Counter(op.cost for op in operations)
            for operations, living, _ in walks
        )
        found = Counter(first)
        for blocks, other in zip(depth, others, strict=True):
            for cost in first | other:
                found[cost] += (blocks - _FEW) * (other[cost] - first[cost])
        return found

    costs = {"": straight(None)} | {COMPILED.name: straight(COMPILED)}
    return Counted(costs, walks[0][2])


def row(case: GpuCase, counted: Counted, card: str, efficiency: float, launch_us: float) -> dict[str, Any]:
    """Return what a table and the JSON say of ``case``; shares are those of ``card``."""
    costs = counted.of(case)
    every = {name: each.step(costs, efficiency) for name, each in CARDS.items()}
    seconds = {name: sum(parts.values()) for name, parts in every.items()}
    moved, link, launches = Counter[bool](), "link", sum(costs.values())
    for cost, n in costs.items():
        moved[cost.kind == link] += n * cost.bytes
    shares = {kind: s / seconds[card] for kind, s in every[card].items()} if seconds[card] < inf else {}
    return {
        "case": case.name(),
        "needed_tflop": needed_flops(costs) / 1e12,
        "done_tflop": sum(n * cost.flops for cost, n in costs.items()) / 1e12,
        "moved_gib": moved[False] / GIB,
        "link_gib": moved[True] / GIB,
        "launches": launches,
        "launch_s": launches * launch_us / 1e6,
        **{name: each if each < inf else None for name, each in seconds.items()},
        **shares,
    }


def ladder_rows(options: Any) -> Iterator[dict[str, Any]]:
    """Yield what each rung of the ladders needs."""
    card = CARDS[options.card]
    asked = [
        (model, rung) for model in LADDERS for rung in rungs(model) if options.only is None or options.only in model
    ]
    if not asked:
        raise UserError(f"--only: no ladder's model holds {options.only!r}; there are {', '.join(LADDERS)}")
    with device_processes(2) as pool:
        found = [(model, rung, pool.submit(walk_rung, model, rung)) for model, rung in asked]
        for model, rung, counted in found:
            costs = counted.result()
            tokens, launches = rung.batch * context_of(config_of(model, tiny=False)), sum(costs.values())
            seconds = sum(card.step(costs, options.efficiency).values())
            yield {
                "case": f"{model}, {rung.step}, {rung.who}",
                "done_tflop": sum(n * cost.flops for cost, n in costs.items()) / 1e12,
                "moved_gib": sum(n * cost.bytes for cost, n in costs.items()) / GIB,
                "launches": launches,
                "tokens_per_s": tokens / seconds,
                "mfu": tokens / seconds * flops_of(model) / (card.rates["bf16"] * 1e12),
                "tokens_per_s_of_host": tokens / (launches * options.launch_us / 1e6),
            }


def print_ladders(options: Any) -> None:
    """Print the table of :func:`ladder_rows`."""
    table = Table(
        {
            "case": "<44",
            "done_tflop": "10.1f",
            "moved_gib": "9.1f",
            "launches": "8d",
            "tokens_per_s": "12,.0f",
            "mfu": "5.0%",
            "tokens_per_s_of_host": "20,.0f",
        }
    )
    for each in ladder_rows(options):
        table.add(each)
    finish(table.rows, {}, options.json, "none: counted")


def needed_flops(costs: Counter[Cost]) -> float:
    """Return the FLOPs without recomputation: of blocks, and of the scores, one of five products in their backward."""
    return sum(
        n * cost.flops * (0.8 if cost.kind == "attention" and cost.phase == "backward" else 1.0)
        for cost, n in costs.items()
        if cost.phase != "recomputed"
    )


def countable() -> list[GpuCase]:
    """Return the cases of bench/gpu.py but graphs, every other block, and a budget, which is found as a step runs."""
    found = [case for case in cases([*FAMILIES]) if not (case.kept_mb or case.graph) and case.every == 1]
    return sorted(found, key=lambda case: [*FAMILIES].index(case.family))


def _eager(case: GpuCase) -> GpuCase:
    """Return the case that is walked for ``case``."""
    return replace(case, compiled=False, swapped=0)


def _chosen(only: str | None) -> list[GpuCase]:
    """Return the cases of the table."""
    every = {case.name(): case for case in countable()}
    if only:
        found = [each for name, each in every.items() if only in name]
    else:
        found = [each for each in every.values() if each.trainer == "tandem" and each.batch == 1]
    if not found:
        raise UserError(f"--only: no case's name holds {only!r}; leave it out to see the names")
    return found


@exit_on_user_error
def main() -> None:
    """Count the cases, and print what each card needs for them."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--only", help="the cases whose name holds this text (default: Tandem's of one image)")
    parser.add_argument("--card", choices=CARDS, default="H100", help="of the shares (%(default)s)")
    parser.add_argument("--efficiency", type=float, default=1.0, help="of published rates, that products reach")
    parser.add_argument("--launch-us", type=float, default=_LAUNCH_US, help="a launch's, of the host (%(default)s)")
    parser.add_argument("--measured", type=Path, help="JSON of bench/gpu.py, to stand beside the same cases")
    parser.add_argument("--ladder", action="store_true", help="count language models instead; --only names one")
    options = parser.parse_args()
    if options.ladder:
        print_ladders(options)
        return
    if options.measured and not options.measured.is_file():
        raise UserError(f"--measured: {str(options.measured)!r} does not exist; write it with bench/gpu.py --json")
    report = json.loads(options.measured.read_text()) if options.measured else {"rows": []}
    measured = {row["case"]: row["step_s"] for row in report["rows"] if "step_s" in row}
    chosen = _chosen(options.only)
    counts = {"needed_tflop": "12.0f", "done_tflop": "10.0f", "moved_gib": "9.0f", "link_gib": "8.1f", "launches": "8d"}
    seconds, shares = dict.fromkeys(CARDS, "7.3f"), dict.fromkeys(_KINDS, "9.0%") | {"link": "5.0%"}
    table = Table({"case": "<64", **counts, "launch_s": "8.2f", **seconds, **shares, "measured_s": "10.3f"})
    with device_processes(2) as pool:
        found = {case: pool.submit(count, case) for case in dict.fromkeys(map(_eager, chosen))}
        for case in chosen:
            own = row(case, found[_eager(case)].result(), options.card, options.efficiency, options.launch_us)
            table.add(own | ({"measured_s": measured[case.name()]} if case.name() in measured else {}))
    finish(table.rows, {}, options.json, "none: counted")


if __name__ == "__main__":
    main()
