"""`env try --check`: whether an environment has the same tasks in two processes.

Two processes load it as its servers would, one after the other has started, and say the digests of its first tasks.
A group's rollouts may run on either of two servers, or before and after a restart, so an index must be one task.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from envs.server_spec import ServerSpec
from orchestrator.cli.env import UsageError
from orchestrator.env_servers.child_servers import hash_seed

Listed = list[tuple[int, str]]


def check_tasks(id: str, args: dict[str, Any], split: str, count: int, console: Console) -> bool:  # noqa: A002  as in the configuration
    """Compare the first tasks in two processes and print what differs; whether nothing does."""
    spec = ServerSpec(name="check", id=id, bind="", args=args, splits=[split], capacity=count)
    one, other = _list_twice(spec)
    if len(one) != len(other):
        console.print(f"split {escape(split)} has {len(one)} of the first {count} tasks, then {len(other)}")
        return False
    differing = [place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a[0] != b[0]]
    if not differing:
        console.print(f"the first {len(one)} tasks of split {escape(split)} are the same in two processes")
        return True
    shown = ", ".join(map(str, differing[:20])) + (", …" if len(differing) > 20 else "")
    console.print(f"{len(differing)} of the first {len(one)} tasks of split {escape(split)} differ: {shown}")
    first = differing[0]
    console.print(f"task {first} in one process:   {escape(one[first][1])}")
    console.print(f"task {first} in the other one: {escape(other[first][1])}")
    console.print(
        "groups whose rollouts disagree are dropped; draw from a generator that is seeded by the index, keep ids of the"
        " moment out of tasks, or override Environment.identity"
    )
    return False


def _list_twice(spec: ServerSpec) -> tuple[Listed, Listed]:
    line = msgspec.json.encode(spec) + b"\n"
    path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))
    environ = {**os.environ, "PYTHONHASHSEED": hash_seed(), "PYTHONPATH": path}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "envs.task_digests"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
        )
        for _ in range(2)
    ]
    said = [process.communicate(line) for process in processes]
    for process, (_, error) in zip(processes, said, strict=True):
        if process.returncode:
            raise UsageError(
                _last_line(error.decode(errors="replace")) or "the environment could not be loaded"
            )
    one, other = (msgspec.json.decode(out, type=Listed) for out, _ in said)
    return one, other


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
