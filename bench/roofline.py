"""What a training step costs a card at least, counted operation by operation without one: a roofline of every case.

A step of a full-size model, as a run takes it (``bench/card_step.py``), is traced on fake tensors
(``library.training.memory.trace``). Of every operation that reaches the device the trace notes the FLOPs of its
products and the bytes that it must read and write. A card of published rates then needs at least

    sum over operations of max(FLOPs / rate of their dtype, bytes / memory bandwidth)

the roofline of Williams et al. 2009 (doi 10.1145/1498765.1498785), taken for each operation, since one ends before the
next begins. Copies from the host run beside the computation of their pass, so a pass takes the longer of the two.

*Predicted* is the longer of two times: what the kernels take at the rates that an H200 has reached (``ACHIEVED``), and
what the host takes to launch them (``_LAUNCH_SECONDS``). A captured step launches its graph, the copies of its inputs
and the optimizer; it takes as long as its kernels.

*FLOPs* are those done (``torch.utils.flop_counter``: attention's backward has 5 products to forward's 2, as it computes
the scores again). *Bytes*: each input and output once, as far as it is touched: views cost nothing, a broadcast tensor
is read by its own size, a tensor that is changed in place is read and written. No cache is assumed, which is too much
for small tensors; no tile is read twice, which is too little for products. Rates are those of data sheets, which no
product reaches. A fused optimizer counts as one launch.

*Few blocks stand for all.* Blocks of a kind are alike, so a step of few blocks is traced, then one with two more of
each kind, and counts go on in a straight line. They grow by two because blocks are checkpointed in pairs, but for the
last ones (``library.nn.checkpointing.neighbours``). A compiled case is traced as dynamo leaves it, then all operations
are fused that are neither product nor attention (:func:`fused`): a perfect compiler's, of which Inductor falls short.

    python bench/roofline.py [--only row] [--card H100] [--measured gpu.json] [--json PATH]
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from bench.card_step import Step, StepCase, published_depths
from bench.gpu import FASTEST, FLUX, FP8
from bench.measure import Table, benchmark_parser, finish
from library.errors import UserError, exit_on_user_error
from library.files import read_json
from library.models.family_by_name import family_class
from library.nn.checkpointing import ALONE
from library.training.memory import fake_cuda
from library.training.memory.budget import GIB
from library.training.memory.fake_cuda import pretend
from library.training.memory.trace import MemoryTrace, device_processes, tracing

Piece = tuple[int, int, int]  # of a storage: offset, elements


class Cost(NamedTuple):
    """An operation's FLOPs and bytes."""

    name: str
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


_KINDS = ("products", "attention", "traffic")
PUBLISHED = dict.fromkeys(_KINDS, 1.0)  # shares of the rates of data sheets
# Of an H200 (docs/benchmarks.md): bf16 and fp8 products of 8192 a side, cuDNN's attention with its backward, and the
# sum of a step's kernels less these two, eager and compiled, beside the bytes that are counted.
ACHIEVED = {"products": 0.8, "attention": 0.55, "traffic": 0.4}


@dataclass(frozen=True)
class Card:
    """Published rates: dense TFLOP/s by dtype (fp32: not on tensor cores), GB/s of memory and of the link one way."""

    name: str
    rates: dict[str, float]
    memory: float
    link: float

    def seconds(self, cost: Cost, shares: Mapping[str, float] = PUBLISHED) -> float:
        """Return what an operation takes at ``shares`` of the rates; infinite where the card has no such product."""
        if cost.kind == "link":
            return cost.bytes / (self.link * 1e9)
        rate = self.rates.get(cost.dtype, 0.0) * shares[cost.kind] * 1e12
        computing = (cost.flops / rate if rate else inf) if cost.flops else 0.0
        return max(computing, cost.bytes / (self.memory * 1e9 * (shares["traffic"] if cost.kind == "traffic" else 1)))

    def step(self, costs: Counter[Cost], shares: Mapping[str, float] = PUBLISHED) -> dict[str, float]:
        """Return the seconds of a step by kind; of the link's those that its pass does not hide."""
        found = dict.fromkeys((*_KINDS, "link"), 0.0)
        for forward in (True, False):
            seconds = dict.fromkeys(found, 0.0)
            for cost, n in costs.items():
                if (cost.phase == "forward") == forward:
                    seconds[cost.kind] += n * self.seconds(cost, shares)
            seconds["link"] = max(0.0, seconds["link"] - sum(seconds[kind] for kind in _KINDS))
            found = {kind: found[kind] + seconds[kind] for kind in found}
        return found


# Products sum in fp32. The sheets of Hopper state rates with sparsity, twice these; PCIe is stated for both directions.
# A100: https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/
#       nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
# 4090: https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf (appendix A)
# 5090: https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
# H100: https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
# H200: https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446
CARDS = {
    "A100": Card("A100 80GB SXM", {"bf16": 312, "fp32": 19.5}, 2039, 32),
    "4090": Card("RTX 4090", {"bf16": 165.2, "fp8": 330.3, "fp32": 82.6}, 1008, 32),
    "5090": Card("RTX 5090", {"bf16": 209.5, "fp8": 419, "fp32": 104.8}, 1792, 64),
    "H100": Card("H100 SXM", {"bf16": 989.4, "fp8": 1978.9, "fp32": 67}, 3350, 64),
    "H200": Card("H200", {"bf16": 989.4, "fp8": 1978.9, "fp32": 67}, 4800, 64),
}
# Of the host of an H200: FLUX.1's step took 0.936 s, compiled 0.561 s (docs/benchmarks.md), for 17,507 and 10,587
# operations as they are counted here. A simple operation alone takes 9.3e-6; the rest is Python, autograd and dynamo.
_LAUNCH_SECONDS = 53e-6
_MORE = 2  # blocks, of which a pair is made
_DTYPES = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8", torch.bfloat16: "bf16", torch.float16: "bf16"}
_COLUMNS = {"case": "<36", "done_tflop": "10.0f", "moved_gib": "9.0f", "launches": "8d", "host_s": "6.2f"}
_COLUMNS |= {"kernels_s": "9.2f", "predicted_s": "11.2f", **dict.fromkeys(CARDS, "7.3f")}
_COLUMNS |= {**dict.fromkeys(_KINDS, "9.0%"), "measured_s": "10.3f"}
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

    def living_storages(self) -> set[int]:
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
        phase, stand_in = _caller()
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
        self.operations.append(Operation(Cost(name, kind, phase, dtype, flops, moved), reads, writes))

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


def _caller() -> tuple[str, str]:
    """Return the phase of the step, and which function of the fake device stands in for a kernel."""
    stand_in, again, updating = "", False, False
    frame: Any = sys._getframe(3)
    while frame is not None:
        path = frame.f_code.co_filename
        again |= path.endswith("torch/utils/checkpoint.py")
        updating |= "/torch/optim/" in path or path.endswith("training/parallel/gradients.py")  # clipping
        if path == fake_cuda.__file__:
            stand_in = stand_in or frame.f_code.co_qualname
        frame = frame.f_back
    backward = torch._C._current_graph_task_id() != -1
    return "update" if updating else "forward" if not backward else "recomputed" if again else "backward", stand_in


def _can_fuse(op: Operation) -> bool:
    return op.cost.kind == "traffic" and op.cost.phase != "update"


def fused(operations: Sequence[Operation], living: set[int]) -> Counter[Cost]:
    """Return the costs as a perfect compiler makes them: what stays within a kernel moves no bytes.

    Operations that are neither product nor attention are one kernel, as long as each reads what another wrote and no
    other operation read it. The kernel runs where its last operation did. That is right as long as none outside has
    read what it writes, so a group is closed by the first that does. It writes what is read outside, and what lives
    when the step is over.
    """
    groups, owner = dict[int, list[int]](), dict[int, int]()  # a group's operations; whose an open storage is
    readers = defaultdict[int, set[int]](set)
    for index, op in enumerate(operations):
        for storage, *_ in op.reads:
            readers[storage].add(index)
        sources = {owner[storage] for storage, *_ in op.reads if storage in owner}
        if _can_fuse(op):
            groups[index] = [*itertools.chain(*(groups.pop(each) for each in sources)), index]
            owner = {storage: index if group in sources else group for storage, group in owner.items()}
            owner |= {storage: index for storage, *_ in op.writes}
        else:
            owner = {storage: group for storage, group in owner.items() if group not in sources | {index}}
    grouped = set(itertools.chain(*groups.values()))
    found = Counter(op.cost for index, op in enumerate(operations) if index not in grouped)
    for group in groups.values():
        members = [operations[i] for i in sorted(group)]
        read, written, made = dict[Piece, int](), dict[Piece, int](), set[int]()
        for op in members:
            read |= {each: size for each, size in op.reads.items() if each[0] not in made}
            seen = {storage: storage in living or readers[storage] - set(group) for storage, *_ in op.writes}
            written |= {each: size for each, size in op.writes.items() if seen[each[0]]}
            made |= seen.keys()
        name = "fused" if len(members) > 1 else members[0].cost.name
        found[members[0].cost._replace(name=name, bytes=sum(read.values()) + sum(written.values()))] += 1
    return found


@functools.cache
def _process_trace() -> LaunchTrace:
    """Return this process's trace; what would touch the device as it is imported is imported before."""
    for module in ("transformers", "diffusers", "peft"):
        importlib.import_module(module)
    for case in cases():
        family_class(case.family)
    launches = LaunchTrace()
    if not torch.cuda.is_available():
        pretend(launches)
    return launches


def walk(case: StepCase, blocks: tuple[int, ...]) -> tuple[list[Operation], set[int], int]:
    """Return the second step's operations, the storages that outlive it, and how often its update calls the device.

    One call changes many tensors (foreach), which fake tensors take apart. See ``device_processes``.
    """
    launches = _process_trace()
    launches.operations, launches.on = [], False
    with tracing(launches):
        step = Step(replace(case, graph=False, backend="eager"), torch.device("cuda"), depth=blocks)
        step.loss()
        launches.on = True
        step.backward()
        step.update()
    operations = launches.operations
    calls = sum(1 for _ in itertools.groupby(op.cost.name for op in operations if op.cost.phase == "update"))
    return operations, launches.living_storages(), calls


class Counted(NamedTuple):
    """A step's costs, and how often the host launches something: of a captured one its inputs' copies and the graph."""

    costs: Counter[Cost]
    launches: int


def count(case: StepCase) -> Counted:
    """Return what a step of the published depth costs, from steps of few blocks; see ``device_processes``."""
    depth = published_depths(case.family)
    kinds = [kind for kind, n in enumerate(depth) if n > ALONE + _MORE]  # of others there are few
    few = list(depth)
    for kind in kinds:
        last = ALONE if kind == kinds[-1] else 1
        few[kind] = last + (depth[kind] - last) % _MORE
    numbers = [few, *([n + _MORE * (i == kind) for i, n in enumerate(few)] for kind in kinds)]
    walks = [walk(case, tuple(blocks)) for blocks in numbers]
    first, *others = (
        fused(operations, living) if case.compiled else Counter(op.cost for op in operations)
        for operations, living, _ in walks
    )
    found = Counter(first)
    for kind, other in zip(kinds, others, strict=True):
        for cost in first | other:
            found[cost] += (depth[kind] - few[kind]) // _MORE * (other[cost] - first[cost])
    inputs = sum(n for cost, n in found.items() if cost.kind == "link")
    launches = inputs + 1 if case.graph else sum(n for cost, n in found.items() if cost.phase != "update")
    return Counted(found, launches + walks[0][2])


def row(case: StepCase, counted: Counted, card: str) -> dict[str, Any]:
    """Return what a table and the JSON say of ``case``; prediction and shares are those of ``card``."""
    costs = counted.costs
    every = {name: each.step(costs) for name, each in CARDS.items()}
    seconds = {name: sum(parts.values()) for name, parts in every.items()}
    host = counted.launches * _LAUNCH_SECONDS
    kernels = sum(CARDS[card].step(costs, ACHIEVED).values())
    predicted = {"kernels_s": kernels, "predicted_s": max(host, kernels)} if kernels < inf else {}
    parts = {kind: every[card][kind] / seconds[card] for kind in _KINDS} if seconds[card] < inf else {}
    return {
        "case": case.name(),
        "done_tflop": sum(n * cost.flops for cost, n in costs.items()) / 1e12,
        "moved_gib": sum(n * cost.bytes for cost, n in costs.items() if cost.kind != "link") / GIB,
        "launches": counted.launches,
        "host_s": host,
        **predicted,
        **{name: each if each < inf else None for name, each in seconds.items()},
        **parts,
    }


def cases() -> list[StepCase]:
    """Return the steps of bench/gpu.py that are counted."""
    ways: list[dict[str, bool]] = [{}, {"compiled": True}, {"compiled": True, "graph": True}]
    found = [replace(case, **changes) for case in (FLUX, FP8) for changes in ways]
    return found + [each for case in FASTEST for each in (replace(case, graph=False), case)]


@exit_on_user_error
def main() -> None:
    """Count the cases, and print what each card needs for them."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--only", default="", help="the cases whose name holds this text (default: all)")
    parser.add_argument("--card", choices=CARDS, default="H100", help="of prediction and shares (%(default)s)")
    parser.add_argument("--measured", type=Path, help="JSON of bench/gpu.py, whose step times are listed beside")
    options = parser.parse_args()
    every = [case for case in cases() if options.only in case.name()]
    if not every:
        raise UserError(f"--only: no case's name holds {options.only!r}; leave it out to see the names")
    rows = read_json(options.measured)["rows"] if options.measured else []
    measured = {row["case"]: {"measured_s": row["step_s"]} for row in rows if "step_s" in row}
    table = Table(_COLUMNS)
    with device_processes(2) as pool:
        found = {case: pool.submit(count, case) for case in every}
        for case in every:
            table.add(row(case, found[case].result(), options.card) | measured.get(case.name(), {}))
    finish(table.rows, {}, options.json, "none: counted")


if __name__ == "__main__":
    main()
