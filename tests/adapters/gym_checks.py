"""Checks of the reasoning-gym adapter inside the library's virtualenv; prints what was found as one line of JSON.

`answers` scores a right answer of every dataset: the stored one, and for the five that store none an example of their
own or one that is worked out here. `composite` compares our tasks with the library's own composite. `questions` has
the questions of a dataset, for comparing processes. `slow` plays a composite with a part that never comes to an end.
"""

import asyncio
import collections
import functools
import json
import sys
import threading
from typing import Any

import reasoning_gym  # type: ignore[import-not-found]  # in its virtualenv

from envs.adapters.reasoning_gym_tasks import ProceduralTasks, build_sources, datasets, right_answer

Pieces = tuple[int, ...]


def tasks_of(name: str, split: str = "train", **config: Any) -> ProceduralTasks:
    return ProceduralTasks(*build_sources(name, config), split=split, seed=0)


def answers() -> dict[str, float]:
    """The score of a right answer, by dataset; -1 where none is known."""
    easy: dict[str, dict[str, Any]] = {"rush_hour": {"max_moves": 12}, "knight_swap": {"max_steps": 12}}
    worked_out = {"boxnet": boxnet, "rush_hour": rush_hour, "propositional_logic": propositional_logic}
    scores = {}
    for name in sorted(datasets()):
        if name == "composite":
            continue
        problem = tasks_of(name, **easy.get(name, {}))[3].problem()
        answer = right_answer(problem.entry)
        if name in worked_out:
            answer = worked_out[name](problem.entry["metadata"])
        scores[name] = -1.0 if answer is None else problem.score(answer)[0]
    return scores


def boxnet(metadata: dict[str, Any]) -> str:
    """Carry each box to its target, one square after the other."""
    plan = []
    state = metadata["initial_state"]
    targets = {
        item[7:]: square for square, items in state.items() for item in items if item.startswith("target_")
    }
    for square, items in state.items():
        for box in [item for item in items if item.startswith("box_")]:
            here, there = ([float(part) for part in place.split("_")] for place in (square, targets[box[4:]]))
            for axis in (0, 1):
                while here[axis] != there[axis]:
                    agent = f"Agent[{here[0]}, {here[1]}]"
                    here[axis] += 1 if there[axis] > here[axis] else -1
                    plan.append({agent: f"move({box}, square[{here[0]}, {here[1]}])"})
            plan.append({f"Agent[{here[0]}, {here[1]}]": f"move({box}, target_{box[4:]})"})
    return json.dumps(plan)


def propositional_logic(metadata: dict[str, Any]) -> str:
    """All premises at once follow from the premises."""
    premises: list[str] = metadata["premises"]
    return functools.reduce(lambda one, other: f"({one} ∧ {other})", premises)


def rush_hour(metadata: dict[str, Any]) -> str:
    """Breadth first over the positions of all cars."""
    board = metadata["board_config"]
    labels = sorted(set(board) - {"o", "x"})
    cells = {label: [at for at, mark in enumerate(board) if mark == label] for label in labels}
    strides = [cells[label][1] - cells[label][0] for label in labels]
    sizes = [len(cells[label]) for label in labels]
    walls = {at for at, mark in enumerate(board) if mark == "x"}
    start: Pieces = tuple(cells[label][0] for label in labels)
    came: dict[Pieces, tuple[Pieces, str] | None] = {start: None}
    queue = collections.deque([start])
    while queue:
        state = queue.popleft()
        if state[0] == 16:  # the red car is at the exit
            moves = []
            while (step := came[state]) is not None:
                state, move = step
                moves.append(move)
            return " ".join(reversed(moves))
        taken = walls | {
            at + stride * place
            for at, stride, size in zip(state, strides, sizes, strict=True)
            for place in range(size)
        }
        for car, (at, stride, size) in enumerate(zip(state, strides, sizes, strict=True)):
            for direction in (-1, 1):
                front = at - stride if direction < 0 else at + stride * size
                inside = 0 <= front < 36 and (stride == 6 or front // 6 == at // 6)
                if inside and front not in taken:
                    after = (*state[:car], at + stride * direction, *state[car + 1 :])
                    if after not in came:
                        came[after] = (state, f"{chr(ord('A') + car)}{direction:+d}")
                        queue.append(after)
    raise ValueError("cannot be solved")


def composite() -> list[list[str]]:
    """Questions of our composite and of the library's, of the same block."""
    parts = [
        {"name": "chain_sum", "weight": 3.0, "config": {"min_terms": 3}},
        {"name": "leg_counting", "weight": 1.0, "config": {}},
        {"name": "spell_backward", "weight": 0.5, "config": {}},
    ]
    ours = tasks_of("composite", datasets=parts)
    specs = [reasoning_gym.composite.DatasetSpec(**part) for part in parts]
    theirs = reasoning_gym.create_dataset("composite", seed=0, size=256, datasets=specs)
    return [
        [ours[index]["question"] for index in range(256)],
        [theirs[index]["question"] for index in range(256)],
    ]


def questions(name: str) -> list[str]:
    found = tasks_of(name)
    return [found[index]["question"] for index in range(300)]


def slow() -> dict[str, Any]:
    """Tasks of a quick part that are generated while the other part is at one for ever, and scored meanwhile."""
    from envs.adapters.reasoning_gym import ReasoningGym

    released, begun = threading.Event(), threading.Event()
    kind = datasets()["leg_counting"][0]
    generate = kind.__getitem__

    def forever(self: Any, place: int) -> Any:
        begun.set()
        released.wait(60)
        return generate(self, place)

    environment = ReasoningGym("composite", datasets=[{"name": "chain_sum"}, {"name": "leg_counting"}])
    kind.__getitem__ = forever
    tasks = environment.tasks("train")
    by_source: dict[Any, list[Any]] = {}
    for index in range(40):
        by_source.setdefault(tasks[index].source, []).append(tasks[index])
    quick, stuck = (by_source[source] for source in environment._sources)

    class Answers:
        """A model that says nothing worth."""

        async def chat(self, messages: Any) -> Any:
            return type("Reply", (), {"text": "1"})

        def rollout(self, reward: float, metrics: Any) -> float:
            return reward

    async def play() -> int:
        async with asyncio.TaskGroup() as group:
            for task in stuck:
                group.create_task(environment.rollout(task, Answers()))  # type: ignore[arg-type]  # all that it needs
            await asyncio.to_thread(begun.wait, 60)
            done = 0
            for task in quick:
                await asyncio.wait_for(environment.rollout(task, Answers()), 50)  # type: ignore[arg-type]  # as above
                done += 1
            waiting = not released.is_set()
            released.set()
        assert waiting
        return done

    return {"quick": len(quick), "done": asyncio.run(play()), "stuck": len(stuck)}


if __name__ == "__main__":
    found = globals()[sys.argv[1]](*sys.argv[2:])
    # The library prints now and then: what was found has a line of its own.
    print(f"\n{json.dumps(found)}")
