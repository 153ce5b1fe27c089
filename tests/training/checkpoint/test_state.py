"""Training states on disk: whole or not there, and refused where they do not belong."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from library.config.run_schema import SavingConfig
from library.errors import UserError
from library.training.checkpoint.state import (
    OutputNames,
    Position,
    load_training_state,
    newest_state,
    read_position,
    read_state,
    resolve_resume,
    save_training_state,
    write_state,
)


def _parts() -> dict[str, torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    return {"optimizer": optimizer}


def load(
    folder: Path,
    weights: dict[str, torch.Tensor],
    parts: dict[str, torch.optim.Optimizer],
    base: str,
    settings: dict[str, object] | None = None,
) -> Position:
    """Look at a state, and put it back into ``weights`` and ``parts``, as a run does."""
    resolve_resume(str(folder), SavingConfig(output_dir=str(folder.parent), output_name="x"), print)

    def copy(saved: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in saved.items():
            weights[name].copy_(tensor)

    shapes = {name: tensor.shape for name, tensor in weights.items()}
    return load_training_state(folder, shapes, copy, parts, base, settings)


def _states() -> dict[str, object]:
    return {name: part.state_dict() for name, part in _parts().items()}


def test_a_state_gives_back_weights_optimizer_and_position(tmp_path: Path) -> None:
    weights, parts = {"a": torch.randn(2, 3), "b": torch.randn(4).bfloat16()}, _parts()
    position = Position(step=7, epoch=2, batches=4, loss_ema=0.5, val_loss_before=1.25)
    states = {name: part.state_dict() for name, part in parts.items()}
    save_training_state(tmp_path / "x-state", weights, states, position, "base1")

    fresh = {"a": torch.zeros(2, 3), "b": torch.zeros(4).bfloat16()}
    weight = torch.nn.Parameter(torch.zeros(3))
    other = {"optimizer": torch.optim.AdamW([weight], lr=0.5)}
    assert load(tmp_path / "x-state", fresh, other, "base1") == position
    assert torch.equal(fresh["a"], weights["a"])
    assert torch.equal(fresh["b"], weights["b"])
    assert other["optimizer"].param_groups[0]["lr"] == 0.1
    assert torch.equal(
        other["optimizer"].state[weight]["exp_avg"], next(iter(parts["optimizer"].state.values()))["exp_avg"]
    )


def test_saving_again_replaces_the_state_and_leaves_nothing_else(tmp_path: Path) -> None:
    for step in (1, 2):
        save_training_state(tmp_path / "x-state", {"a": torch.ones(1)}, _states(), Position(step=step), "base")
    assert load(tmp_path / "x-state", {"a": torch.zeros(1)}, _parts(), "base").step == 2
    assert [p.name for p in tmp_path.iterdir()] == ["x-state"]


def test_a_state_that_does_not_belong_is_refused_by_name(tmp_path: Path) -> None:
    save_training_state(tmp_path / "x-state", {"a": torch.ones(1)}, _states(), Position(), "base")
    with pytest.raises(UserError, match="trained on another base model"):
        load(tmp_path / "x-state", {"a": torch.ones(1)}, _parts(), "other")
    with pytest.raises(UserError, match=r"not those of this run \(2 tensors differ, first a\)"):
        load(tmp_path / "x-state", {"b": torch.ones(1)}, _parts(), "base")
    with pytest.raises(UserError, match=r"not those of this run \(1 tensors differ, first a\)"):
        load(tmp_path / "x-state", {"a": torch.ones(2)}, _parts(), "base")
    with pytest.raises(
        UserError, match="is not a training state .no such folder.; give a folder that save_state wrote"
    ):
        load(tmp_path / "no-state", {}, {}, "base")


def test_a_folder_that_is_not_a_state_of_this_version_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises(UserError) as caught:
            read_position(state, {})
        with pytest.raises(UserError, match="nothing was changed"):  # resume = "auto" does not begin anew over it
            newest_state(tmp_path, "x")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    state = tmp_path / "x-state"
    state.mkdir()
    (state / "train_state.json").write_text('{"current_epoch": 1, "current_step": 3}')  # as sd-scripts writes
    assert "is not a training state of Tandem (it has no position.json); give a folder" in refusal()
    save_training_state(state, {"a": torch.ones(1)}, _states(), Position(step=3), "base")
    (state / "weights.safetensors").rename(state / "lora.safetensors")  # as Tandem wrote it before 2026-11
    assert "of another version of Tandem (it has no weights.safetensors); resume it with the version" in refusal()


def test_a_changed_setting_that_the_state_would_win_over_is_refused(tmp_path: Path) -> None:
    settings = {"learning_rate": 1e-4, "optimizer_type": "AdamW"}
    weights = {"a": torch.ones(1)}
    save_training_state(tmp_path / "x-state", weights, _states(), Position(step=3), "base", settings)
    assert read_position(tmp_path / "x-state", settings, "base") == Position(step=3)
    with pytest.raises(
        UserError, match="was trained with learning_rate = 0.0001, now it is 0.0005; .*network_weights, init_from"
    ):
        load(tmp_path / "x-state", weights, _parts(), "base", settings | {"learning_rate": 5e-4})
    with pytest.raises(UserError, match='optimizer_type = "AdamW", now it is "Lion"'):
        read_position(tmp_path / "x-state", settings | {"optimizer_type": "Lion"})


def test_a_damaged_state_is_refused_by_name(tmp_path: Path) -> None:
    def saved() -> Path:
        save_training_state(tmp_path / "x-state", {"a": torch.ones(1)}, _states(), Position(), "base")
        return tmp_path / "x-state"

    def refusal(parts: dict[str, torch.optim.Optimizer] | None = None) -> str:
        with pytest.raises(UserError) as caught:
            load(tmp_path / "x-state", {"a": torch.ones(1)}, parts or _parts(), "base")
        return str(caught.value)

    draw = random.Random(0)
    for name in ("weights.safetensors", "position.json", "optimizer.json", "optimizer.safetensors", "checksums.json"):
        whole = (saved() / name).read_bytes()
        for place in {0, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(30))}:
            changed = bytearray(whole)
            changed[place] ^= 1 << draw.randrange(8)
            (tmp_path / "x-state" / name).write_bytes(changed)
            assert re.search(rf"{name} (is damaged|cannot be read).*; resume from another state", refusal()), place
        (saved() / name).unlink()
        assert name in refusal()
    saved()
    two = torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(2)])
    assert "the saved optimizer does not fit this run" in refusal({"optimizer": two})


def test_names_follow_kohyas_pattern(tmp_path: Path) -> None:
    names = OutputNames(tmp_path, "cat")
    assert names.weights(names.stem(step=100)).name == "cat-step00000100.safetensors"
    assert names.weights(names.stem(epoch=2)).name == "cat-000002.safetensors"
    assert names.state(names.stem()).name == "cat-state"


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
