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


def test_what_cannot_be_saved_or_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"optimizer\.hook: a function"):
        write_state(tmp_path / "optimizer", {"hook": lambda: None})
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match="the saved state cannot be read"):
        read_state(tmp_path / "broken")
