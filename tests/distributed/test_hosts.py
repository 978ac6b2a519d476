"""Two hosts: two network namespaces with a cable between them, where they may be made, and always two launches on
loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from metaphrase.configuration.options import RunOptions
from metaphrase.training.run import train

ADDRESSES = ("10.97.53.1", "10.97.53.2")


def ip(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of two network namespaces, each with an address of its own and no other way out than to the other."""
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command `ip` (iproute2)")
    names = [f"mp{os.getpid()}h{number}" for number in (0, 1)]
    cables = [f"{name}v" for name in names]
    try:
        commands = [("netns", "add", names[0]), ("netns", "add", names[1])]
        commands += [
            ("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        ]
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            commands += [("-n", name, "addr", "add", f"{address}/24", "dev", cable)]
            commands += [("-n", name, "link", "set", device, "up") for device in ("lo", cable)]
        for command in commands:
            if (done := ip(*command)).returncode:
                pytest.skip(f"network namespaces may not be made here: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def both(start: Callable[[int], subprocess.CompletedProcess]) -> None:
    """Start the two launches of one run; both must end well, and the first one speaks."""
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(start, (0, 1)))
    assert [result.returncode for result in results] == [0, 0], results[0].stdout + results[1].stdout
    assert "2 processes" in results[0].stdout and "processes" not in results[1].stdout


@pytest.fixture
def equals_one_process(still_options, assert_same_training) -> Callable[[RunOptions], None]:
    """Holds what was trained against the same run of one process."""

    def check(options: RunOptions) -> None:
        alone = still_options("alone", **{"batches.accumulation": 2})
        train(alone, recipe_name="tiny")
        assert_same_training(options.output, alone.output)

    return check


def accelerate_options(address: str, port: int, rank: int) -> tuple[str, ...]:
    where = ("--num_machines", "2", "--machine_rank", str(rank), "--main_process_ip", address)
    return (*where, "--main_process_port", str(port))


@pytest.mark.slow
def test_two_machines_meet_by_address_and_port(still_options, launch, free_port, equals_one_process):
    """As on two hosts, here both on loopback. Only the first one writes."""
    options, port = still_options("several"), free_port()
    both(lambda rank: launch(options, 2, machines=accelerate_options("127.0.0.1", port, rank), name=str(rank)))
    equals_one_process(options)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["cpu_two_processes", "fsdp2"])
def test_two_hosts_meet_over_a_network(still_options, launch, hosts, equals_one_process, config):
    """By address and port; each host sees only its own end of the cable."""
    options = still_options("several")
    both(
        lambda rank: launch(
            options,
            2,
            config=config,
            machines=accelerate_options(ADDRESSES[0], 29400, rank),
            before=("ip", "netns", "exec", hosts[rank]),
            environment={"GLOO_SOCKET_IFNAME": f"{hosts[rank]}v"},
            name=str(rank),
        )
    )
    equals_one_process(options)


@pytest.mark.slow
def test_two_hosts_meet_as_torchrun_does(still_options, launch, hosts, equals_one_process):
    """torchrun's own rendezvous (c10d): who is which is settled when they meet."""
    options = still_options("several")
    meeting = ("--nnodes", "2", "--nproc_per_node", "1", "--rdzv_id", "run", "--rdzv_backend", "c10d")
    meeting = (*meeting, "--rdzv_endpoint", f"{ADDRESSES[0]}:29400")

    def start(rank: int) -> subprocess.CompletedProcess:
        # both namespaces have this machine's name, by which torchrun would guess these two
        own = ("--rdzv_conf", f"is_host={'false' if rank else 'true'}", "--local_addr", ADDRESSES[rank])
        return launch(
            options,
            2,
            torchrun=(*meeting, *own),
            before=("ip", "netns", "exec", hosts[rank]),
            environment={"GLOO_SOCKET_IFNAME": f"{hosts[rank]}v"},
            name=str(rank),
        )

    both(start)
    equals_one_process(options)
