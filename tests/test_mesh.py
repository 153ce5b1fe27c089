"""Which process is where in the mesh, and its data-parallel rank."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from accelerate import Accelerator

from library.accelerator import dp_rank_and_size, model_parallel_rank_and_size


@pytest.mark.parametrize("sizes", [{"dp": 3}, {"dp": 2, "shard": 2}, {"dp": 3, "tp": 2}, {"pp": 2, "dp": 3}])
def test_processes_that_compute_one_batch_together_have_one_dp_rank(sizes: dict[str, int]) -> None:
    mesh = torch.arange(torch.Size(sizes.values()).numel()).reshape(*sizes.values())  # what torch's meshes are made of
    for process in mesh.flatten().tolist():
        place = dict(zip(sizes, (mesh == process).nonzero()[0].tolist(), strict=True))
        dp, shard, pp, tp = (place.get(key, 0) for key in ("dp", "shard", "pp", "tp"))
        shards, tps = sizes.get("shard", 1), sizes.get("tp", 1)
        one = cast(Accelerator, SimpleNamespace(mesh_sizes=sizes, process_index=process, num_processes=mesh.numel()))
        assert dp_rank_and_size(one) == (dp * shards + shard, sizes["dp"] * shards)
        assert model_parallel_rank_and_size(one) == (pp * tps + tp, sizes.get("pp", 1) * tps)
