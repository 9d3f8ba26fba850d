"""Servers that are forked from a template: the same as spawned ones, and there without it too."""

import asyncio
import os
import re
import signal
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog.testing

from orchestrator.env_servers.env import Env
from orchestrator.env_servers.templates import Templates
from tests.integration.env_servers import ROOT, alive, children, request, result, spec, supervised, until
from tests.support.env_specs import server_pids


@pytest.fixture(autouse=True)
async def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Every test ends with the processes that it began with."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = children()
    yield
    await until(lambda: children() <= before)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def template_of(env: Env, server: str) -> int:
    """The parent of a server's keeper: a template, or this process where the server was spawned."""
    return parent(parent(server_pids(env)[server]))


def wary_interpreter(tmp_path: Path, code: str) -> str:
    """An interpreter that runs a line of shell first where it is to be a template."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\ncase "$*" in *--template*) {code};; esac\nexec {sys.executable} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


async def test_servers_of_several_envs_are_forked_from_one_template(tmp_path: Path) -> None:
    """What they import is imported once; the template ends with the last of them."""
    templates = Templates()
    async with Env(spec(tmp_path, workers=2, templates=templates)) as one:
        async with Env(spec(tmp_path, "Narrow", templates=templates)) as other:
            pids = {template_of(one, "quick-0"), template_of(one, "quick-1"), template_of(other, "narrow-0")}
            assert len(pids) == 1
            assert pids <= children()
        [pid] = pids
        assert alive(pid)
        assert result(await one.run_rollout(request(3))).rollouts[0].reward == 3.0
    await until(lambda: not alive(pid))


async def test_a_template_that_dies_takes_no_server_along_and_is_replaced(tmp_path: Path) -> None:
    """Its servers go on; one that ends comes back by itself, and the next from another template."""
    templates = Templates()
    with structlog.testing.capture_logs() as logs:
        async with supervised(Env(spec(tmp_path, workers=2, templates=templates))) as env:
            server, first = server_pids(env)["quick-0"], template_of(env, "quick-0")
            os.kill(first, signal.SIGKILL)
            await until(lambda: any(entry["event"] == "env.template_lost" for entry in logs))
            assert result(await env.run_rollout(request(3))).rollouts[0].reward == 3.0
            assert server_pids(env)["quick-0"] == server
            for restarts, spawned in ((1, True), (2, False)):
                os.kill(server_pids(env)["quick-0"], signal.SIGKILL)
                await until(lambda number=restarts: env.restarts == number and env.ready_servers == 2)  # type: ignore[misc]
                assert (template_of(env, "quick-0") == os.getpid()) is spawned
                await until(lambda: all(one.ready.done() for one in templates._templates.values()))
            assert template_of(env, "quick-0") in children() - {first}
    [lost] = [entry for entry in logs if entry["event"] == "env.template_lost"]
    assert lost["why"] == "was ended by SIGKILL"
    assert lost["effect"] == "servers that run go on; the next are forked from another one"
    # Of a server whose template is gone, nobody knows how it ended; of the others everybody does.
    assert {entry["exit_code"] for entry in logs if entry["event"] == "env.server_lost"} == {-9}


@pytest.mark.parametrize("code", ["echo it cannot >&2; exit 3", "export PYTHONSTARTTHREAD=1"])
async def test_without_a_usable_template_servers_are_spawned(code: str, tmp_path: Path) -> None:
    """A template that does not start, and one whose interpreter begins with a thread; the log says which it is."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, threading\n"
        "if os.environ.get('PYTHONSTARTTHREAD'):\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True, name='restless').start()\n"
    )
    python = wary_interpreter(tmp_path, code)
    with structlog.testing.capture_logs() as logs:
        async with Env(spec(tmp_path, workers=2, python=python, module_dirs=(tmp_path,))) as env:
            assert {template_of(env, f"quick-{number}") for number in range(2)} == {os.getpid()}
            assert result(await env.run_rollout(request(3))).rollouts[0].reward == 3.0
    [lost] = [entry for entry in logs if entry["event"] == "env.template_lost"]
    assert ("it cannot" if "exit" in code else "there are other threads in this process") in lost["said"]
    assert lost["effect"].endswith("each imports for itself")


async def test_a_forked_server_finds_what_a_spawned_one_finds(tmp_path: Path) -> None:
    """Variables, search path, signals, limits, descriptors, session, arguments and threads."""
    seen = []
    for code in ("true", "exit 3"):
        folder = tmp_path / code.replace(" ", "_")
        folder.mkdir()
        python = wary_interpreter(folder, code)
        async with Env(spec(tmp_path, "Inside", python=python, args={"file": str(folder / "seen")})) as env:
            assert (template_of(env, "inside-0") == os.getpid()) is (code == "exit 3")
            pid = server_pids(env)["inside-0"]
            told: dict[str, Any] = msgspec.json.decode((folder / "seen").read_bytes())
            assert told.pop("session") == parent(pid)
            seen.append(told)
    for told in seen:
        # The directory with our package is one of the run's own; the shell of the interpreter sets `_`.
        library = told["environ"]["PYTHONPATH"].split(os.pathsep)[0]
        told["environ"] = {
            name: value.replace(library, "lib") for name, value in told["environ"].items() if name not in "_"
        }
        told["path"] = [entry.replace(library, "lib") for entry in told["path"]]
        told["files"] = [re.sub(r"\d+", "", file) for file in told["files"]]  # pipes have numbers
    assert seen[0] == seen[1]


async def test_forked_servers_do_not_share_their_chance(tmp_path: Path) -> None:
    """The global generators of random and numpy go on differently in each, though the template has both, as with older numpy."""
    (tmp_path / "sitecustomize.py").write_text("import random, numpy.random\n")
    async with Env(spec(tmp_path, "Lottery", workers=3, module_dirs=(tmp_path,))) as env:
        answers = await asyncio.gather(*(env.run_rollout(request(index)) for index in range(3)))
        held = [msgspec.msgpack.decode(result(one).transcript)[0]["messages"][0] for one in answers]
        assert len({template_of(env, f"lottery-{number}") for number in range(3)}) == 1
    for what in ("pid", "random", "numpy"):
        assert len({said[what] for said in held}) == 3, what
