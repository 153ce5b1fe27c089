"""State on disk gives back exactly what was written, without pickle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from library.errors import UserError
from library.training.checkpoint.state import read_state, write_state


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    shared = torch.arange(6.0).view(2, 3)
    tree = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": shared, "view": shared[:, 1]}, 7: {}},
        "param_groups": [{"betas": (0.9, 0.99), "lr": 1e-4, "d": float("inf"), "params": [0, 7], "fused": None}],
        "bf16": torch.randn(4).bfloat16(),
        "flag": True,
    }
    write_state(tmp_path / "optimizer", tree)
    back = read_state(tmp_path / "optimizer")
    assert list(back["state"]) == [0, 7]
    assert back["param_groups"] == tree["param_groups"]
    assert isinstance(back["param_groups"][0]["betas"], tuple)
    assert torch.equal(back["state"][0]["view"], shared[:, 1])
    assert back["bf16"].dtype == torch.bfloat16
    assert torch.equal(back["bf16"], tree["bf16"])
    assert back["flag"] is True


def test_an_optimizer_goes_on_from_its_saved_state_bit_for_bit(tmp_path: Path) -> None:
    def train(steps: range, optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter) -> None:
        for i in steps:
            optimizer.zero_grad()
            ((weight - i) ** 2).sum().backward()
            optimizer.step()

    straight = torch.nn.Parameter(torch.ones(5))
    train(range(6), torch.optim.AdamW([straight], lr=0.1), straight)

    first = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.AdamW([first], lr=0.1)
    train(range(3), optimizer, first)
    write_state(tmp_path / "optimizer", optimizer.state_dict())

    second = torch.nn.Parameter(first.detach().clone())
    resumed = torch.optim.AdamW([second], lr=0.5)
    resumed.load_state_dict(read_state(tmp_path / "optimizer"))
    train(range(3, 6), resumed, second)
    assert torch.equal(second, straight)


def test_what_cannot_be_saved_or_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"optimizer\.hook: a function"):
        write_state(tmp_path / "optimizer", {"hook": lambda: None})
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match="the saved state cannot be read"):
        read_state(tmp_path / "broken")
