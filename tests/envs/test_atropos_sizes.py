"""Groups of several sizes on one instance of an Atropos environment."""

import asyncio
from types import SimpleNamespace

from envs.adapters.atropos_record import OneSize


async def test_a_group_of_another_size_gets_its_turn_though_others_never_cease() -> None:
    """An evaluation on the servers of a training run, say: as many groups as there is room for always run there."""
    config = SimpleNamespace(group_size=0)
    sizes = OneSize(config)
    ended: list[int] = []

    async def run(count: int) -> None:
        async with sizes.of(count):
            await asyncio.sleep(0.01)
            assert config.group_size == count
            ended.append(count)

    async def stream(offset_s: float) -> None:
        await asyncio.sleep(offset_s)
        for _ in range(20):
            await run(8)

    async with asyncio.TaskGroup() as tasks:
        for offset_s in (0.0, 0.005):
            tasks.create_task(stream(offset_s))
        await asyncio.sleep(0.02)
        tasks.create_task(run(1))
    assert ended.index(1) < 20
