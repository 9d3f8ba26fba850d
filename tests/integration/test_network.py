"""The whole service while the network between its hosts fails: it waits or goes on, says why, and recovers by itself.

The hosts are network namespaces (`tests.support.network`), so these tests need root. Each ends with the proofs of the
crash tests: no step missing or different, no group twice, no task skipped, no rollout trained on whose lease had ended.
`make test-network` runs the long partitions too, with the timeouts that a run has by default.
"""

import asyncio
import os
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.env_servers import until
from tests.integration.network_world import LINKS, network_world
from tests.support.network import missing

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
    pytest.mark.timeout(600),
]

LONG_S = [float(text) for text in os.environ.get("NETWORK_S", "").split()]
"""Lengths of the long partitions."""

IMPATIENT: dict[str, Any] = {
    "patience": {"silence_timeout_s": 2.0, "rollout_timeout_s": 3.0},
    "inference": {"health_interval_s": 0.3, "update_timeout_s": 20.0},
}
"""Timeouts in proportion to partitions of a few seconds."""

_ENV = ("server", "room", "older_group", "share", "suspects", "minimum")
SAID = {
    ("orchestrator", "chat"): (_ENV, 'env "chat"'),
    ("orchestrator", "ranked"): (_ENV, 'env "ranked"'),
    ("orchestrator", "engine"): (("endpoint", "weights"), "inference server"),
    ("orchestrator", "trainer"): (("trainer", "queue", "acknowledgement", "ranks"), "the trainer"),
    ("chat", "engine"): ((*_ENV, "backoff"), 'env "chat"'),
}
"""Which wait the status tells of while a link is cut, and whom it names."""

ONE_WAY = LINKS if LONG_S else (("orchestrator", "ranked"),)
"""Links that are cut in one direction at a time; all of them with `make test-network`."""


async def test_a_run_recovers_from_a_partition_of_each_link_in_turn(tmp_path: Path) -> None:
    """Nothing passes between two hosts for longer than the timeouts, and the status names what is missing; then all goes on."""
    async with network_world(tmp_path, **IMPATIENT) as (world, command):
        for link in LINKS:
            with world.network.cut(*link):
                await world.says(command, *SAID[link])
                await asyncio.sleep(3.0)  # longer than the timeouts; nothing announces that they are over
            await world.trained(command, world.record().last_step + 3)


async def test_connections_to_a_host_that_is_gone_are_given_up_by_both_sides(tmp_path: Path) -> None:
    """Without a reset, and with something unacknowledged, TCP alone would hold on to them for a quarter of an hour."""
    ours = [
        ("orchestrator", "trainer"),
        ("trainer", "orchestrator"),
        ("orchestrator", "ranked"),
        ("ranked", "orchestrator"),
        ("orchestrator", "engine"),
        ("chat", "engine"),
    ]  # an inference server's own side is its affair
    async with network_world(tmp_path) as (world, _), AsyncExitStack() as cuts:
        network = world.network
        assert network["orchestrator"].connected_to(network["trainer"])
        for one, other in ours:
            cuts.enter_context(network.cut(one, other))
        await until(lambda: not any(network[one].connected_to(network[other]) for one, other in ours))


@pytest.mark.parametrize("link", ONE_WAY, ids="-".join)
async def test_a_link_that_carries_one_direction_only_is_given_up_and_made_anew(
    tmp_path: Path, link: tuple[str, str]
) -> None:
    """Requests go through and answers do not, then the other way round: what was under way is asked again."""
    async with network_world(tmp_path, **IMPATIENT) as (world, command):
        for source, towards in (link, link[::-1]):
            lost = len(command.events("env.server_lost"))
            with world.network.cut(source, towards, one_way=True):
                if link[1] in world.elsewhere:
                    await command.wait_event("env.server_lost", lost + 1)
                else:
                    await world.says(command, *SAID[link])
            if link[1] in world.elsewhere:
                # The others are quick to train three steps without it.
                await command.wait_event("env.server_restarted", lost + 1)
            await world.trained(command, world.record().last_step + 3)


async def test_rollouts_whose_lease_ends_are_cancelled_and_never_trained_on(tmp_path: Path) -> None:
    """Also where they do not let themselves be stopped and bring a result: they are asked again, on a lease of their own."""
    patience = {"silence_timeout_s": 2.0}
    async with network_world(tmp_path, long_s=8.0, patience=patience) as (world, command):
        long_ones, stopped = world.long_ones(), world.stopped()
        await until(lambda: world.long_ones() > long_ones)
        with world.network.cut("orchestrator", "ranked"):
            await until(lambda: world.stopped() > stopped)
        await world.trained(command, world.record().last_step + 3)


async def test_a_run_goes_on_while_packets_are_lost_late_and_out_of_order(tmp_path: Path) -> None:
    """Five percent are lost at random; then every packet is held for up to 60 ms, and many overtake others."""
    async with network_world(tmp_path) as (world, command):
        with world.network.losing(0.05):
            await world.trained(command, world.record().last_step + 8)
        lost = world.network.dropped
        assert lost > 0
        with world.network.delaying(0.0, 0.06):
            await world.trained(command, world.record().last_step + 8)
        assert world.network.overtaken > 0
        assert not command.events("env.server_lost")
        assert not command.events("trainer.rank_lost")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seconds", LONG_S)
async def test_a_run_with_its_usual_timeouts_recovers_from_a_long_partition_of_each_link(
    tmp_path: Path, seconds: float
) -> None:
    """Writes down how long after the network was back the trainer had three further batches."""
    async with network_world(tmp_path) as (world, command):
        for link in LINKS:
            cut = time.monotonic()
            with world.network.cut(*link):
                await asyncio.sleep(seconds)
                await world.says(command, *SAID[link])
                cut_s = time.monotonic() - cut
            healed = time.monotonic()
            await world.trained(command, world.record().last_step + 3)
            took_s = time.monotonic() - healed
            sys.stdout.write(
                f"{'-'.join(link)} cut for {cut_s:.1f} s: three further batches in {took_s:.1f} s\n"
            )
