"""Nodes on a network of their own that is cut: in silence, as a pulled cable is."""

from __future__ import annotations

import os
import shutil
import subprocess
import time

import pytest

from tests.deadpool.test_job import launch, wait_for_iteration
from tests.deadpool.test_membership import FLAGS, IMPATIENT, hold, wait_for_swap

ISOLATED = "tests/deadpool/isolated_pretrain.py"
HOST = "10.213.37.1"
"""And the node's digit."""


class Network:
    """A namespace for each node, and one with the bridge that joins them."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._hub = f"{prefix}hub"
        self._made: list[str] = []

    def is_possible(self) -> bool:
        """Whether this machine lets us; makes the hub."""
        try:
            self._add(self._hub)
        except subprocess.CalledProcessError:
            return False
        return True

    def build(self, num_nodes: int) -> None:
        self._ip(self._hub, "link", "add", "name", "bridge0", "type", "bridge")
        self._ip(self._hub, "link", "set", "bridge0", "up")
        for node in range(num_nodes):
            name = f"{self.prefix}{node}"
            self._add(name)
            self._ip(self._hub, *f"link add v{node} type veth peer name eth0 netns {name}".split())
            self._ip(self._hub, *f"link set v{node} master bridge0 up".split())
            self._ip(name, *f"addr add {HOST}{node}/24 dev eth0".split())
            for device in ("lo", "eth0"):
                self._ip(name, "link", "set", device, "up")

    def cut(self, node: int) -> None:
        self._ip(self._hub, "link", "set", f"v{node}", "down")

    def join(self, node: int) -> None:
        self._ip(self._hub, "link", "set", f"v{node}", "up")

    def remove(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "delete", name], check=True)

    def _add(self, name: str) -> None:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        self._made.append(name)

    def _ip(self, namespace: str, *words: str) -> None:
        subprocess.run(["ip", "-n", namespace, *words], check=True, capture_output=True)


@pytest.fixture
def network():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and `ip` (iproute2)")
    made = Network(f"dp{os.getpid()}x")
    try:
        if not made.is_possible():
            pytest.skip("this machine makes no network namespaces")
        made.build(3)
        yield made
    finally:
        made.remove()


@pytest.fixture
def run_isolated(run_job, network):
    def run(during):
        environ = {"TEST_NETWORK_PREFIX": network.prefix, "TEST_NETWORK_HOST": HOST}
        return run_job(
            launch(3, 1), [*FLAGS, *IMPATIENT], during=during, script=ISOLATED, environ=environ
        )

    return run


@pytest.mark.parametrize("victim", [0, 1], ids=["leader", "follower"])
def test_node_that_is_cut_off_is_replaced_and_ends_alone(run_isolated, network, peace, victim):
    unfailed = peace(launch(3, 1), FLAGS)

    def cut(pid, log_dir):
        before = hold(log_dir, 4)
        wait_for_iteration(log_dir, 3)
        network.cut(victim)
        before.unlink()

    job = run_isolated(cut)
    job.check_clean()
    assert [(s["nodes_lost"], s["spares_used"]) for s in job.swaps] == [([victim], [2])]
    assert "could not reach a majority of its job" in job.output
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters


def test_node_that_was_cut_off_and_is_back_is_told_so(run_isolated, network, peace):
    unfailed = peace(launch(3, 1), FLAGS)

    def cut_and_join(pid, log_dir):
        before, after = hold(log_dir, 4), hold(log_dir, 6)
        wait_for_iteration(log_dir, 3)
        network.cut(1)
        before.unlink()
        wait_for_swap(log_dir)
        network.join(1)
        after.unlink()

    job = run_isolated(cut_and_join)
    job.check_clean()
    assert [(s["nodes_lost"], s["spares_used"]) for s in job.swaps] == [([1], [2])]
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters


def test_short_cut_costs_nothing(run_isolated, network, peace):
    """Shorter than the heartbeat timeout: retransmissions mend it, nobody is suspected."""
    unfailed = peace(launch(3, 1), FLAGS)

    def cut_shortly(pid, log_dir):
        before = hold(log_dir, 4)
        wait_for_iteration(log_dir, 3)
        network.cut(0)
        before.unlink()
        time.sleep(0.7)
        network.join(0)

    job = run_isolated(cut_shortly)
    job.check_clean()
    assert job.records("events.jsonl") == []
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters
