"""Forward and backward of a training step as one CUDA graph for each shape of batch.

A step of a transformer launches ten thousand kernels and more, one after the other from Python; a graph launches them
all with one call (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). It repeats the same kernels on the
same addresses, so:

    inputs      are copied into tensors that stay where they are; a step takes all that is random or comes from the
                host as its inputs (``tasks.image_step.FlowStep.inputs``)
    gradients   lie in one buffer a dtype, of which ``parameter.grad`` is a view (:class:`GradientBuffers`)
    memory      of all graphs is one pool: only one runs at a time, and nothing in the pool is needed between two of
                them. What a graph returns is copied out at once

The first batches of a shape run eagerly: kernels are chosen, blocks compiled, attention timed. Then the shape is
captured. **A capture is checked**: the same batch runs eagerly too, and loss and gradients of the first replay must
agree with it. So a capture costs about three steps' time. Graphs that are dropped, before sampling and validation to
give their memory back, are captured anew at the next batch of their shape. If anything goes wrong, the run goes on
eagerly, and says so.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from library.accelerator import release
from library.config.rules import conflicts_of_true
from library.config.schema import TrainConfig
from library.data.batches import TensorBatch
from library.errors import NotRestoredError, UserError, reason_of
from library.training.memory.budget import draws_random_numbers, is_out_of_memory

EAGER_STEPS = 3  # of a shape, before it is captured
MOST_GRAPHS = 32  # each keeps its kernels' arguments, tens of MiB for a large model
# Sums in the order in which threads come, and kernels chosen anew, change gradients in bf16 by less than 1 %; a wrong
# address gives something else altogether. Of a gradient that is nearly zero only noise differs.
TOLERANCE, NOISE = 0.05, 0.02
RARE = 8  # batches between two times that graphs are dropped: capturing such a shape again would not pay

Step = Callable[[], Tensor]


class Captured(NamedTuple):
    """A captured step: what runs it again, what it returned, what frees it, and its memory pool."""

    replay: Callable[[], None]
    output: Tensor
    reset: Callable[[], None]
    pool: Any


class Capture(Protocol):
    """What captures a step; :class:`CudaCapture` on a card."""

    def side_stream(self) -> AbstractContextManager[None]:
        """Return a context in which kernels run where they are captured."""
        ...

    def __call__(self, step: Step, pool: Any) -> Captured:
        """Capture ``step`` without running it; ``pool`` is that of other graphs, or None."""
        ...


class CudaCapture:
    """Captures on the current CUDA device."""

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Inside the block kernels run on the stream that is captured: libraries get their workspaces there."""
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):  # a capture that fails leaves its stream the current one
                yield
        finally:
            torch.cuda.current_stream().wait_stream(self._stream)

    def __call__(self, step: Step, pool: Any) -> Captured:
        """Capture ``step``."""
        graph, pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
        # thread_local: the data loader's thread pins memory meanwhile, which a capture forbids all threads otherwise
        with (
            self.side_stream(),
            torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            output = step()
        return Captured(graph.replay, output, graph.reset, pool)


class GradientBuffers:
    """Gradients whose addresses never change: ``parameter.grad`` becomes a view of one buffer a dtype.

    ``zero_grad`` may go on to set ``grad`` to None, which for an optimizer means that a parameter has no gradient in a
    step, so that no weight decay reaches it. :meth:`hold` puts the views back, for parameters that get a gradient.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self._buffers: list[Tensor] = []
        self._views: dict[nn.Parameter, Tensor] = {}
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            alike = [p for p in parameters if p.dtype == dtype]
            self._buffers.append(torch.zeros(sum(p.numel() for p in alike), dtype=dtype, device=alike[0].device))
            parts = self._buffers[-1].split([p.numel() for p in alike])
            self._views |= {p: part.view(p.shape) for p, part in zip(alike, parts, strict=True)}

    def hold(self, parameters: Sequence[nn.Parameter]) -> None:
        """Move gradients of ``parameters`` into the buffers; zeros where they have none."""
        if all(p.grad is None for p in self.parameters):
            for buffer in self._buffers:
                buffer.zero_()
        elif new := [self._views[p] for p in parameters if p.grad is None]:
            torch._foreach_zero_(new)
        own = [(self._views[p], p.grad) for p in parameters if p.grad is not None and p.grad is not self._views[p]]
        if own:
            torch._foreach_copy_([view for view, _ in own], [gradient for _, gradient in own])
        for parameter in parameters:
            parameter.grad = self._views[parameter]


@dataclass
class _Graph:
    """A shape's graph, the inputs that it reads, the parameters whose gradients it adds to, how often it has run."""

    captured: Captured
    inputs: list[Tensor]
    receivers: list[nn.Parameter]
    replays: int = 0


class StepGraphs:
    """Runs steps, as graphs where it can.

    Args:
        step: inputs and the loss's weight [] -> what the step returns, one tensor; adds to the gradients. Where inputs
            have the same shapes it computes the same, and it reads nothing else that changes its address.
        parameters: what gets gradients.
        capture: see :class:`Capture`.
        note: prints a line.
        required: a step that cannot be captured is an error.
    """

    def __init__(
        self,
        step: Callable[[Any, Tensor], Tensor],
        parameters: Sequence[nn.Parameter],
        capture: Capture,
        note: Callable[[str], None],
        required: bool = False,
    ) -> None:
        self._step, self._parameters, self._capture = step, parameters, capture
        self._note, self._required = note, required
        self.eager_steps = EAGER_STEPS
        self._seen: Counter[str] = Counter()
        self._graphs: dict[str, _Graph] = {}
        self._buffers: GradientBuffers | None = None
        self._weights: list[int] = []  # addresses of the parameters when they were captured
        self._is_full = self.is_off = False

    def __call__(self, inputs: TensorBatch, weight: Tensor) -> Tensor:
        """Return what the step returns.

        Raises:
            UserError: graphs are required and the step cannot be captured.
        """
        if self.is_off:
            return self._step(inputs, weight)
        key = repr(inputs.map_tensors(lambda tensor: (tuple(tensor.shape), tensor.dtype)))
        if self._graphs and self._weights != [p.data_ptr() for p in self._parameters]:
            self.drop()  # their weights lie elsewhere now
        if key in self._graphs:
            return self._replay(self._graphs[key], [*inputs.tensors(), weight])
        self._seen[key] += 1
        if self._seen[key] <= self.eager_steps or len(self._graphs) == MOST_GRAPHS:
            if self._seen[key] > self.eager_steps and not self._is_full:
                self._is_full = True
                self._note(f"cuda_graph: {MOST_GRAPHS} shapes of batches are captured; others run eagerly")
            return self._run_beside_graphs(inputs, weight)
        return self._run_and_capture(key, inputs, weight)

    def drop(self) -> None:
        """Drop all graphs, and give their memory back; shapes that are rare run eagerly first when they come again."""
        if not self._graphs:
            return
        while self._graphs:
            key, graph = self._graphs.popitem()
            graph.captured.reset()
            if graph.replays < RARE:
                del self._seen[key]
        del graph  # with its last tensors in the pool
        release()

    def _replay(self, graph: _Graph, given: list[Tensor]) -> Tensor:
        for dtype in dict.fromkeys(tensor.dtype for tensor in given):  # one launch each
            pairs = [pair for pair in zip(graph.inputs, given, strict=True) if pair[1].dtype == dtype]
            torch._foreach_copy_([to for to, _ in pairs], [one for _, one in pairs])
        assert self._buffers is not None
        self._buffers.hold(graph.receivers)
        graph.replays += 1
        graph.captured.replay()
        return graph.captured.output.clone()  # the next graph's kernels may lie over it

    def _run_beside_graphs(self, inputs: TensorBatch, weight: Tensor) -> Tensor:
        """Run a step eagerly; if memory is short while graphs hold some, without them."""
        if not self._graphs:
            return self._step(inputs, weight)
        before = self._gradients()
        try:
            return self._step(inputs, weight)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold the activations
        self._set_gradients(before)
        self._give_up("memory has no room for graphs beside steps of other shapes")
        return self._step(inputs, weight)

    def _run_and_capture(self, key: str, inputs: TensorBatch, weight: Tensor) -> Tensor:
        """Run a step eagerly and capture it; keep the graph if its first replay gives the same."""
        before, static = self._gradients(), inputs.map_tensors(torch.clone)
        tensors, output = [*static.tensors(), weight.clone()], None
        self._set_gradients({})
        release()  # what lies free was another stream's, which this one cannot use
        try:
            with self._capture.side_stream():
                output = self._step(static, tensors[-1])
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold the activations
        if output is None:
            self._set_gradients(before)
            self._give_up("memory is short")
            return self._step(inputs, weight)
        found = self._gradients()
        results = [output[0], *found.values()]
        # finite, and not all zero as of a batch that weighs nothing: else nothing could be compared
        is_telling = all_close(results, results) and any(map(torch.any, found.values()))
        if is_telling and (reason := self._try_capture(key, static, tensors, output, found)):
            self._give_up(reason)
        self._set_gradients(found)
        for parameter, gradient in before.items():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        return output

    def _try_capture(
        self, key: str, inputs: TensorBatch, tensors: list[Tensor], output: Tensor, found: dict[nn.Parameter, Tensor]
    ) -> str | None:
        """Capture the step of ``inputs``, all of whose ``tensors`` it reads, and replay it once.

        Return what went wrong, None if it gives the ``output`` and the gradients that were ``found``.
        """
        self._set_gradients({})
        try:
            if self._buffers is None:
                self._buffers = GradientBuffers(self._parameters)
            self._buffers.hold([*found])
            pool = next((graph.captured.pool for graph in self._graphs.values()), None)
            captured = self._capture(lambda: self._step(inputs, tensors[-1]), pool)
            self._graphs[key] = _Graph(captured, tensors, [*found])
            self._weights = [p.data_ptr() for p in self._parameters]
            replayed = self._replay(self._graphs[key], tensors)
            gradients = [p.grad for p in found if p.grad is not None]
            if not all_close([replayed[0], *gradients], [output[0], *found.values()]):
                return "the graph's loss or gradients are not those of the step"
        except NotRestoredError:
            raise
        except Exception as error:  # whatever a kernel, a compiler or the driver raises: there is another way
            traceback.clear_frames(error.__traceback__)
            # the end of a capture that has failed raises too, and hides why
            return "memory is short" if is_out_of_memory(error) else reason_of(error.__context__ or error)
        return None

    def _give_up(self, reason: str) -> None:
        """Go on without graphs, or end the run if they are required."""
        self.drop()
        self.is_off, self._buffers = True, None
        if self._required:
            raise UserError(f'cuda_graph: the step cannot be captured: {reason}; set cuda_graph = "auto"')
        self._note(f"cuda_graph: the step is not captured, the run goes on without: {reason}")

    def _gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return copies of the gradients that there are."""
        return {p: p.grad.clone() for p in self._parameters if p.grad is not None}

    def _set_gradients(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        """Let the parameters have these gradients, others none."""
        for parameter in self._parameters:
            parameter.grad = gradients.get(parameter)


def why_eager(config: TrainConfig, accelerator: Accelerator, model: nn.Module) -> str | None:
    """Return why a run's steps are not captured, with the option that says so; None where they can be."""
    if conflicts := conflicts_of_true(config, "cuda_graph"):
        return conflicts[0]
    if accelerator.device.type != "cuda" or torch.version.hip:
        return 'cuda_graph: needs an NVIDIA GPU; set cuda_graph = "auto"'
    if accelerator.num_processes > 1:
        return 'cuda_graph: several processes are not captured; start one, or set cuda_graph = "auto"'
    if draws_random_numbers(model):
        return 'cuda_graph: the model has dropout, which is not captured; set cuda_graph = "auto"'
    return None


def all_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return whether no tensor is off by more than :data:`TOLERANCE`; False where one is not finite.

    The error's norm counts beside the tensor's own; and :data:`NOISE` of the root mean square of all norms is no error.
    """
    errors = torch.stack([(one.double() - other.double()).norm() for one, other in zip(found, expected, strict=True)])
    norms = torch.stack([each.double().norm() for each in expected])
    usual = norms[1:].square().mean().sqrt()
    return bool((errors <= TOLERANCE * norms + NOISE * usual).all() & norms.isfinite().all())
