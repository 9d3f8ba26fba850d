"""The trackers with the real libraries: what was logged is what their own readers find, also over a resumed run.

The libraries are in a virtualenv of their own; the orchestrator of this checkout finds them there by PYTHONPATH.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.venvs import CHECKOUT, TRACK
from tests.integration.service_fixture import write_config

pytestmark = pytest.mark.adapters

READ_TENSORBOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "tensors": 0})
found.Reload()
tags = found.Tags()
print(json.dumps({
    "scalars": {tag: [[event.step, event.value] for event in found.Scalars(tag)] for tag in tags["scalars"]},
    "texts": {tag: found.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags["tensors"]},
}))
"""
READ_WANDB = """
import json, sys
from wandb.proto import wandb_internal_pb2 as pb

def records(data):
    # A header of seven bytes, then blocks of 32 KiB, in which every piece has a checksum, a length and a kind.
    place, block, whole = 7, 32768, b""
    while place + 7 <= len(data):
        left = block - place % block
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield whole
            whole = b""

found = {"history": [], "config": {}, "ids": []}
for path in sys.argv[1:]:
    for data in records(open(path, "rb").read()):
        record = pb.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            found["history"].append(row)
        elif kind == "run":
            found["ids"].append(record.run.run_id)
            found["config"].update({item.key: json.loads(item.value_json) for item in record.run.config.update})
print(json.dumps(found))
"""


@pytest.fixture(autouse=True)
def _library() -> None:
    if TRACK.missing():
        pytest.skip(TRACK.missing())


def packages() -> Path:
    (found,) = (TRACK.path / "lib").glob("python*/site-packages")
    return found


def run(*command: str | Path, **variables: str) -> str:
    """Run a program with the libraries; its output."""
    path = os.pathsep.join([str(CHECKOUT), str(packages())])
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, "PYTHONPATH": path, **variables},
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def config_of(tmp_path: Path, name: str, max_steps: int) -> Path:
    values: dict[str, Any] = {
        "run_dir": str(tmp_path / "run"),
        "max_steps": max_steps,
        "local": {},
        "batch": {"size": 16},
        "train": {"sampling": {"max_tokens": 4}, "env": [{"id": "builtin::reverse", "args": {"length": 2}}]},
        "eval": {"env": [{"id": "builtin::reverse@eval", "num_examples": 4, "interval": 2, "name": "held"}]},
        "dispatch": {"keep_equal_rewards": True},
        "trainer": {"bind": "tcp://127.0.0.1:0"},
        "http": {"port": 0},
        "log": {"format": "json"},
        "track": {"use": [name], "samples_interval": 2},
    }
    return write_config(tmp_path / "config.toml", values)


def run_twice(tmp_path: Path, name: str, **variables: str) -> list[dict[str, Any]]:
    """Two steps, then two more by a second process; the lines of metrics.jsonl."""
    for max_steps in (2, 4):
        config = config_of(tmp_path, name, max_steps)
        run(sys.executable, "-m", "orchestrator", "run", config, **variables)
    log = (tmp_path / "run" / "logs" / "orchestrator.log").read_text(encoding="utf-8")
    assert '"track.' not in log, [line for line in log.splitlines() if '"track.' in line]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_tensorboard_finds_every_step_once(tmp_path: Path) -> None:
    """Both processes wrote into the folder of the run; numbers, evaluations and the configuration are there."""
    lines = run_twice(tmp_path, "tensorboard")
    (folder,) = (tmp_path / "run" / "tensorboard").iterdir()
    found = json.loads(run(TRACK.python, "-c", READ_TENSORBOARD, folder))
    steps = {line["step"]: line for line in lines if line["kind"] == "step"}
    assert [step for step, _ in found["scalars"]["reward"]] == [1, 2, 3, 4]
    for step, value in found["scalars"]["reward"]:
        assert value == pytest.approx(steps[step]["reward"], abs=1e-6)
    evaluated = [line["step"] for line in lines if line["kind"] == "eval"]
    assert sorted(step for step, _ in found["scalars"]["eval/held/avg@1"]) == sorted(evaluated)
    assert '"batch"' in found["texts"]["config"]
    assert found["texts"]["samples"].startswith("|env|task|version|reward|group_mean|tokens|prompt|reply|")


WRITE_TENSORBOARD = """
import sys
from orchestrator.track.tensorboard import TensorboardTracker
for resumed, steps in ((False, (1, 2, 3)), (True, (2, 3))):
    tracker = TensorboardTracker(sys.argv[1])
    tracker.start({}, "one", resumed)
    for step in steps:
        tracker.log(step, {"reward": step + 10.0 * resumed})
    tracker.close()
"""


def test_tensorboard_forgets_steps_that_are_logged_again(tmp_path: Path) -> None:
    """Of a run that was killed before a step was acknowledged, or that was set back."""
    run(sys.executable, "-c", WRITE_TENSORBOARD, tmp_path)
    found = json.loads(run(TRACK.python, "-c", READ_TENSORBOARD, tmp_path / "one"))
    assert found["scalars"]["reward"] == [[1, 1.0], [2, 12.0], [3, 13.0]]


def test_wandb_offline_has_every_step_under_one_id(tmp_path: Path) -> None:
    """Each process leaves its part of the run, for `wandb sync` to join."""
    lines = run_twice(tmp_path, "wandb", WANDB_MODE="offline")
    parts = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(parts) == 2
    found = json.loads(run(TRACK.python, "-c", READ_WANDB, *parts))
    assert len(set(found["ids"])) == 1
    rewards = {row["step"]: row["reward"] for row in found["history"] if "reward" in row}
    assert rewards == {line["step"]: line["reward"] for line in lines if line["kind"] == "step"}
    evaluated = [row["step"] for row in found["history"] if "eval/held/avg@1" in row]
    assert sorted(evaluated) == sorted(line["step"] for line in lines if line["kind"] == "eval")
    assert found["config"]["batch"]["size"] == 16
    tables = [row["step"] for row in found["history"] if any(key.startswith("samples") for key in row)]
    assert tables == [1, 2, 4]


def test_wandb_without_its_server_keeps_nothing_from_ending(tmp_path: Path) -> None:
    """Nothing answers there; the run ends well, says that the tracker was left behind, and no process stays."""
    config = config_of(tmp_path, "wandb", 2)
    run(
        sys.executable,
        "-m",
        "orchestrator",
        "run",
        config,
        WANDB_MODE="online",
        WANDB_BASE_URL="http://127.0.0.1:9",
        WANDB_API_KEY="a" * 40,
    )
    log = (tmp_path / "run" / "logs" / "orchestrator.log").read_text(encoding="utf-8")
    assert "track.left_behind" in log or "track.off" in log
    assert len((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) >= 2
    while any(str(tmp_path).encode() in found for found in _command_lines()):
        time.sleep(0.1)


def _command_lines() -> Iterator[bytes]:
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield process.read_bytes()


def test_the_alert_rules_are_a_rule_file(tmp_path: Path) -> None:
    """Read as YAML they have the shape that Prometheus asks for, and the texts that our own tests look at."""
    read = "import json, sys, yaml; print(json.dumps(yaml.safe_load(open(sys.argv[1]))))"
    found = json.loads(run(TRACK.python, "-c", read, CHECKOUT / "deploy" / "prometheus" / "alerts.yml"))
    (group,) = found["groups"]
    assert group["name"] == "orchestrator"
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "remedy"}
