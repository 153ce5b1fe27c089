"""Training least in the leading directions of inputs: directions against numpy, steps against a plain A = Z M."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from library.training.optim.preconditioning import Directions, InputPreconditioner, leading_directions

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.0),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.0, fused=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def decaying_inputs(features: int, rows: int, seed: int) -> Tensor:
    """Return [rows, features] whose second moment has eigenvalues that fall by a third each, in random directions."""
    drawn = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(features, features, generator=drawn))[0]
    scales = (2 / 3) ** (0.5 * torch.arange(features, dtype=torch.float32))
    return torch.randn(rows, features, generator=drawn) * scales @ rotation


@pytest.mark.parametrize(("features", "count"), [(24, 6), (24, 64), (96, 8)])
def test_directions_are_the_leading_eigenvectors(features: int, count: int) -> None:
    model = nn.Sequential(nn.Linear(features, 3))
    inputs = decaying_inputs(features, 400, seed=features).view(4, 100, features)

    def run() -> None:
        for batch in inputs:
            model(batch)

    basis, lost = leading_directions(model, ["0"], run, count, seed=1)["0"]
    size = min(count, features // 2)
    assert basis.shape == (features, size)
    assert lost.shape == (size,)
    rows = inputs.reshape(-1, features).double().numpy()
    values, vectors = np.linalg.eigh(rows.T @ rows)
    values, vectors = values[::-1], vectors[:, ::-1]
    rest, damping = values[size:].mean(), 0.01 * values.mean()
    expected = 1 - np.sqrt((rest + damping) / (values[:size] + damping))
    # a sketch has the large ones nearly, the last less well: Tropp et al. bound the error by the tail
    np.testing.assert_allclose(lost[: size * 3 // 4], expected[: size * 3 // 4], atol=2e-3)
    overlap = np.abs(np.sum(basis.double().numpy() * vectors[:, :size], axis=0))
    assert (overlap[: size * 3 // 4] > 0.99).all()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_that_of_z_with_a_equal_to_z_m(name: str) -> None:
    """The same losses and weights as where Z is trained and A computed from it, by autograd and in float64."""
    drawn = torch.Generator().manual_seed(3)
    start, up, inputs, target = (
        torch.randn(*shape, generator=drawn, dtype=torch.float64) for shape in [(4, 10), (7, 4), (30, 10), (30, 7)]
    )
    basis = torch.linalg.qr(torch.randn(10, 3, generator=drawn, dtype=torch.float64))[0]
    lost = torch.tensor([0.9, 0.5, 0.2], dtype=torch.float64)
    whole = torch.eye(10, dtype=torch.float64) - basis * lost @ basis.t()

    def train(other: nn.Parameter, down: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(20):
            loss = (inputs @ down().t() @ other.t() - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    z, up_of_z = nn.Parameter(start.clone()), nn.Parameter(up.clone())
    expected = train(up_of_z, lambda: z @ whole, OPTIMIZERS[name]([z, up_of_z]))
    a, up_of_a = nn.Parameter(start.clone()), nn.Parameter(up.clone())
    optimizer = OPTIMIZERS[name]([a, up_of_a])
    preconditioner = InputPreconditioner({"layer": a}, 3)
    preconditioner.attach(optimizer)
    preconditioner.set({"layer": Directions(basis, lost)}, start=True)
    found = train(up_of_a, lambda: a, optimizer)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    torch.testing.assert_close(a.detach(), (z @ whole).detach(), rtol=1e-8, atol=1e-9)


def test_layers_of_several_shapes_and_without_gradients() -> None:
    drawn = torch.Generator().manual_seed(4)
    shapes = {"first": (4, 10), "second": (4, 10), "third": (2, 6), "idle": (4, 10)}
    downs = {name: nn.Parameter(torch.randn(shape, generator=drawn)) for name, shape in shapes.items()}
    before = {name: down.detach().clone() for name, down in downs.items()}
    found = {}
    for name, (_, features) in shapes.items():
        basis = torch.linalg.qr(torch.randn(features, 3, generator=drawn))[0]
        found[name] = Directions(basis, torch.ones(3))
    optimizer = torch.optim.AdamW(downs.values(), lr=0.1, weight_decay=0.0)
    preconditioner = InputPreconditioner(downs, 3)
    preconditioner.attach(optimizer)
    preconditioner.set(found, start=False)
    for name, down in downs.items():
        if name != "idle":
            down.grad = torch.randn(down.shape, generator=drawn)
    optimizer.step()
    for name, down in downs.items():
        step = down.detach() - before[name]
        assert (name == "idle") == (float(step.abs().max()) == 0)
        # lost wholly, a direction is not moved along
        torch.testing.assert_close(step @ found[name].basis, torch.zeros(shapes[name][0], 3), atol=1e-6, rtol=0)


def test_a_skipped_step_changes_no_bit_and_a_state_holds_the_directions() -> None:
    down = nn.Parameter(torch.randn(4, 10))
    optimizer = torch.optim.AdamW([down], lr=0.1, fused=True)
    preconditioner = InputPreconditioner({"layer": down}, 3)
    preconditioner.attach(optimizer)
    basis = torch.linalg.qr(torch.randn(10, 3))[0]
    preconditioner.set({"layer": Directions(basis, torch.tensor([0.9, 0.5, 0.1]))}, start=True)
    before = down.detach().clone()
    down.grad = torch.full_like(down, torch.nan)
    optimizer.found_inf = torch.ones(())  # as the engine says it of a step that is not finite
    optimizer.step()
    assert torch.equal(down.detach(), before)

    other = InputPreconditioner({"layer": nn.Parameter(torch.zeros(4, 10))}, 3)
    other.load_state_dict(preconditioner.state_dict())
    for mine, theirs in zip(preconditioner.state_dict().values(), other.state_dict().values(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_inputs_of_low_rank_and_layers_that_are_never_called() -> None:
    """Inputs that span three directions lose these; a layer without inputs, or with a NaN, loses nothing."""
    model = nn.ModuleDict({name: nn.Linear(20, 2) for name in ("low", "idle", "nan")})
    inputs = torch.randn(50, 3) @ torch.randn(3, 20)

    def run() -> None:
        model["low"](inputs)
        model["nan"](inputs * torch.nan)

    found = leading_directions(model, model, run, 6, seed=1)
    basis, lost = found["low"]
    assert lost[:3].min() > 0.7
    assert lost[3:].max() < 0.05
    torch.testing.assert_close(inputs @ basis[:, :3] @ basis[:, :3].t(), inputs, rtol=1e-4, atol=1e-4)
    assert found["idle"].lost.count_nonzero() == found["nan"].lost.count_nonzero() == 0
