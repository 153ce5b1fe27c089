"""QuantizedLinear under DDP and FSDP2, two processes on gloo, against one process."""

from __future__ import annotations

import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from library.precision.linear import QuantizedLinear, ddp_ignored_names
from networks.adapters.lora import LoRALinear
from tests.precision.layers import quantize

WORLD, WIDTH = 2, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)  # FSDP2 groups need a dtype that gloo knows beside fp8
        self.linears = nn.ModuleList()
        for granularity in ("cast", "row", "block64"):
            weight = torch.randn(WIDTH, WIDTH, generator=random) * 0.1
            base = QuantizedLinear(quantize(weight, granularity), torch.randn(WIDTH, generator=random))
            lora = LoRALinear(base, rank=4, alpha=4.0)
            lora.initialise(random)
            nn.init.normal_(lora.lora_B.weight, generator=random)
            self.linears.append(lora)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora_" in name)

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = x + linear(self.norm(x))
        return x


def batch() -> Tensor:
    return torch.randn(WORLD * 3, WIDTH, generator=torch.Generator().manual_seed(9))


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model(x).square().mean().backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            gradient = parameter.grad
            found[name.removeprefix("module.")] = (
                gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            )
    return found


def work(rank: int, folder: str) -> None:
    """Both kinds in one process: starting it takes longer than everything else."""
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", store, datetime.timedelta(seconds=60), WORLD, rank)
    try:
        for kind in ("ddp", "fsdp2"):
            model: nn.Module = Block()
            if kind == "ddp":
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ddp_ignored_names(model))
                model = DistributedDataParallel(model)
            else:
                fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (WORLD,)))
            found = gradients(model, batch().chunk(WORLD)[rank])
            if rank == 0:
                torch.save(found, Path(folder) / f"{kind}.pt")
    finally:
        dist.destroy_process_group()


def test_two_processes_under_ddp_and_fsdp2_give_the_gradients_of_one(tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    torch.multiprocessing.start_processes(work, (str(tmp_path),), nprocs=WORLD, start_method="forkserver")
    expected = gradients(Block(), batch())
    for kind in ("ddp", "fsdp2"):
        found = torch.load(tmp_path / f"{kind}.pt")
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            # fp32 means over two halves instead of the whole
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
