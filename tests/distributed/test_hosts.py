"""Two hosts: two network namespaces with a cable between them, where they may be made, and always two launches on
loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from metaphrase.training.run import train

ADDRESSES = ("10.97.53.1", "10.97.53.2")
MEETING = [("--rdzv_conf", f"is_host={first}") for first in ("true", "false")]
"""The first host keeps the meeting place: torchrun would guess it from the host's name, which both share here."""


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


def two_launches(
    launch, options, port: int, address: str, *, before=((), ()), environment=({}, {}), more=((), ())
) -> list:
    """One process a machine; both must end well."""

    def machine(rank: int) -> subprocess.CompletedProcess:
        where = ("--num_machines", "2", "--machine_rank", str(rank), "--main_process_ip", address)
        where = (*where, "--main_process_port", str(port), *more[rank])
        return launch(options, 2, machines=where, before=before[rank], environment=environment[rank], name=str(rank))

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(machine, (0, 1)))
    assert [result.returncode for result in results] == [0, 0], results[0].stdout + results[1].stdout
    assert "2 processes" in results[0].stdout and "processes" not in results[1].stdout  # the first one speaks
    return results


@pytest.mark.slow
def test_two_machines_meet_by_address_and_port(still_options, launch, free_port, assert_same_training):
    """As on two hosts, here both on loopback. Only the first one writes."""
    options = still_options("several")
    two_launches(launch, options, free_port(), "127.0.0.1")
    alone = still_options("alone", **{"batches.accumulation": 2})
    train(alone, recipe_name="tiny")
    assert_same_training(options.output, alone.output)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "rendezvous"), [("cpu_two_processes", "c10d"), ("fsdp2", "static")])
def test_two_hosts_meet_over_a_network(still_options, launch, hosts, assert_same_training, config, rendezvous):
    """torchrun's rendezvous (c10d), and the fixed one of Accelerate; each host sees only its own end of the cable."""
    options = still_options("several")
    launched = two_launches(
        lambda *given, **named: launch(*given, config=config, **named),
        options,
        29400,
        ADDRESSES[0],
        before=[("ip", "netns", "exec", name) for name in hosts],
        environment=[{"GLOO_SOCKET_IFNAME": f"{name}v", "TP_SOCKET_IFNAME": f"{name}v"} for name in hosts],
        more=[("--rdzv_backend", rendezvous, *(c10d if rendezvous == "c10d" else ())) for c10d in MEETING],
    )
    assert len(launched) == 2
    alone = still_options("alone", **{"batches.accumulation": 2})
    train(alone, recipe_name="tiny")
    assert_same_training(options.output, alone.output)
