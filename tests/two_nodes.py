"""Two machines on one: each has its network, name and launcher; a cable goes between, and they know the other's name.

Where network namespaces cannot be made (no root, no ``ip``), the two launchers share the machine's loopback; they
still know of each other by the rendezvous alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.processes import free_ports, run_command
from tests.runs import ROOT


@dataclass(frozen=True)
class Node:
    """How to start something there, and where it is found."""

    inside: tuple[str, ...]  # comes before the command
    name: str
    address: str
    interface: str


@contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[Node, Node]]:
    """Make the nodes; they are gone after the block. ``folder`` is for what they need to know."""
    sleepers: list[subprocess.Popen[bytes]] = []
    try:
        loopback = Node((), "localhost", "127.0.0.1", "lo")
        yield _namespaces(sleepers, folder / "hosts") or (loopback, loopback)
    finally:
        for sleeper in sleepers:  # namespaces live as long as somebody is in them
            sleeper.kill()
            sleeper.wait()


def _namespaces(sleepers: list[subprocess.Popen[bytes]], hosts: Path) -> tuple[Node, Node] | None:
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        return None
    nodes = []
    hosts.write_text("127.0.0.1 localhost\n10.77.0.1 node1\n10.77.0.2 node2\n")
    for number in (1, 2):
        set_up = f"mount --bind {hosts} /etc/hosts && hostname node{number} && ip link set lo up && echo ready"
        begin = ["unshare", "--net", "--uts", "--mount", "sh", "-c", f"{set_up}; exec sleep 600"]
        sleeper = subprocess.Popen(begin, stdout=subprocess.PIPE, cwd=hosts.parent)
        sleepers.append(sleeper)
        assert sleeper.stdout is not None
        if sleeper.stdout.readline() != b"ready\n":
            return None
        inside = ("nsenter", "--target", str(sleeper.pid), "--net", "--uts", "--mount", "--wd")
        nodes.append(Node(inside, f"node{number}", f"10.77.0.{number}", f"cable{number}"))
    first, second = (str(sleeper.pid) for sleeper in sleepers)
    cable = f"ip link add cable1 netns {first} type veth peer name cable2 netns {second}".split()
    steps = [cable]
    for node in nodes:
        steps.append([*node.inside, "ip", "address", "add", f"{node.address}/24", "dev", node.interface])
        steps.append([*node.inside, "ip", "link", "set", node.interface, "up"])
    if any(subprocess.run(step, capture_output=True).returncode for step in steps):
        return None
    return nodes[0], nodes[1]


def run_on_nodes(
    nodes: Sequence[Node],
    script: str,
    flags: Sequence[str],
    cwd: Path,
    processes: int = 1,
    environment: Mapping[str, str] | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``script`` with ``processes`` on each node, a launcher a node; return what each launcher ended with."""
    (port,) = free_ports()

    def launch(node: Node) -> subprocess.CompletedProcess[str]:
        launcher = f"-m torch.distributed.run --nnodes {len(nodes)} --nproc-per-node {processes}"
        meeting = f"--rdzv-backend c10d --rdzv-id job --rdzv-endpoint {nodes[0].name}:{port}"
        own = f"--local-addr {node.address}"
        command = [*node.inside, sys.executable, *f"{launcher} {meeting} {own}".split(), str(ROOT / script), *flags]
        settings = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": node.interface, **(environment or {})}
        return run_command(command, cwd, settings)

    with ThreadPoolExecutor(len(nodes)) as launchers:
        return list(launchers.map(launch, nodes))
