"""A process that records a run and says what is durable, until it is killed: `python -m tests.support.journal_victim RUN_DIR SEED`.

Tasks of two envs are handed out in order and finish out of order, batches of three groups are formed, two ranks
acknowledge, now and then a queued group is evicted and its task asked again. After a restart it goes on from what the
journal recovers: it holds the positions of queued groups and asks the other unresolved tasks again first. Every line
on stdout is printed after the journal has called it durable, but for "evicting", which is printed before.
"""

import asyncio
import random
import sys
from pathlib import Path

from orchestrator.groups.group import Batch, Group
from orchestrator.journal import Journal
from tests.support.journal_groups import make_group
from tests.support.journal_opening import open_journal

ENVS = ("math", "code")
GROUPS_PER_BATCH = 3
TASKS_PER_ENV = 150
"""Where the run ends by itself."""


class Victim:
    def __init__(self, journal: Journal, rng: random.Random) -> None:
        self.journal = journal
        self.rng = rng
        self.evicted: list[Group] = []
        recovered = journal.recover(world_size=2)
        self.queue: list[Group] = list(recovered.groups)
        self.step = recovered.last_step
        self.resolved = {env: resolved_positions(*recovered.resolved.get(env, (0, []))) for env in ENVS}
        held = {(group.env, group.task.position) for group in self.queue}
        self.todo = {
            env: [p for p in range(TASKS_PER_ENV) if p not in self.resolved[env] and (env, p) not in held]
            for env in ENVS
        }
        for batch in recovered.batches:
            if batch.step not in recovered.acknowledged:
                self.train(batch.step, set(recovered.acks.get(batch.step, ())))

    def finish_task(self) -> None:
        """One of the next few tasks of an env finishes, usually with a group."""
        env = self.rng.choice([env for env in ENVS if self.todo[env]])
        position = self.todo[env].pop(self.rng.randrange(min(5, len(self.todo[env]))))
        if self.rng.random() < 0.1:
            self.resolved[env].add(position)
            self.journal.record_task(env, position, "filtered")
            self.journal.when_durable(lambda: say("task", env, position))
        else:
            group = make_group(position, env)
            self.journal.record_group(group)
            self.queue.append(group)
            if self.rng.random() < 0.2:
                self.journal.when_durable(lambda: self.say_recorded(group))
        low = next((p for p in range(TASKS_PER_ENV) if p not in self.resolved[env]), TASKS_PER_ENV)
        if self.rng.random() < 0.2:
            self.journal.prune(env, low)

    def say_recorded(self, group: Group) -> None:
        """Unless it was evicted before it was durable, which has been said."""
        if not any(group is evicted for evicted in self.evicted):
            say("task", group.env, group.task.position)

    def evict(self) -> None:
        """A queued group is too old: its task is open again, and asked again."""
        group = self.queue.pop(self.rng.randrange(len(self.queue)))
        say("evicting", group.env, group.task.position)
        self.evicted.append(group)
        self.journal.evict_group(group, "stale")
        self.todo[group.env] = sorted([*self.todo[group.env], group.task.position])

    def form_batch(self) -> None:
        self.step += 1
        chosen = sorted(self.rng.sample(range(min(6, len(self.queue))), GROUPS_PER_BATCH), reverse=True)
        batch = Batch(self.step, self.step - 1, tuple(self.queue.pop(index) for index in chosen))
        for group in batch.groups:
            self.resolved[group.env].add(group.task.position)

        def durable() -> None:
            say("batch", batch.step, *(group.id for group in batch.groups))
            self.train(batch.step, set())

        self.journal.record_batch(batch, durable)

    def train(self, step: int, acked: set[int]) -> None:
        for rank in {0, 1} - acked:
            self.journal.record_ack(step, rank, world_size=2)
            self.journal.when_durable(lambda rank=rank: say("ack", step, rank))  # type: ignore[misc] # binds the loop's value
        if self.rng.random() < 0.9:
            self.journal.record_acknowledged(step)


def resolved_positions(low: int, above: list[int]) -> set[int]:
    return {*range(low), *above}


def say(*words: object) -> None:
    print(*words, flush=True)


async def main(run_dir: Path, seed: int) -> None:
    async with open_journal(run_dir, commit_interval_s=0.002, keep_batches=2) as journal:
        victim = Victim(journal, random.Random(seed))
        say("started")
        while any(victim.todo.values()):
            for _ in range(victim.rng.randrange(1, 6)):
                if any(victim.todo.values()):
                    victim.finish_task()
            if victim.queue and victim.rng.random() < 0.1:
                victim.evict()
            while len(victim.queue) >= 6:
                victim.form_batch()
            if victim.rng.random() < 0.5:
                await journal.flush()
            await asyncio.sleep(0)
        await journal.flush()
        wal = run_dir / "journal" / "journal.sqlite3-wal"
        say("finished", wal.stat().st_size)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
