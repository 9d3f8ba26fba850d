"""Unit tests of the code in a reply, in a process of its own with limits on time, memory, files and network.

A row's tests are Python (one text or a list of texts, each a test: asserts, or anything that raises) or pairs of
input and output for a program that reads and prints (a list of `{"input", "output"}`, or `{"inputs", "outputs"}`);
either may be JSON in a text. `envs.dataset.confined` is the program that limits itself and runs the code.
At most `processes` of them run at once, on threads, so that nothing here holds the loop.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from envs.dataset import confined
from envs.dataset.rows import Row
from envs.dataset.scoring import NO_ANSWER, Score, Scorer
from envs.dataset.template import find
from envs.errors import RolloutFailure

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_MEGABYTE = 1024 * 1024
_PROBE_S = 60.0


class Pair(NamedTuple):
    """What a program is given and what it must print."""

    input: str
    output: str


class UnitTests(Scorer):
    """`partial` pays for the share of the tests that pass; without it all must. `timeout_s` is that of all together."""

    def __init__(
        self,
        tests: str = "tests",
        partial: bool = False,
        timeout_s: float = 10.0,
        memory_mb: int = 1024,
        file_mb: int = 16,
        confined: bool = True,
        processes: int = 0,
    ) -> None:
        if timeout_s <= 0 or memory_mb < 64 or file_mb < 1 or processes < 0:
            raise ValueError("timeout_s must be positive, memory_mb at least 64, file_mb at least 1")
        self.columns = [tests]
        self._tests = tests
        self._partial = partial
        self._timeout_s = timeout_s
        self._memory_bytes = memory_mb * _MEGABYTE
        self._file_bytes = file_mb * _MEGABYTE
        self._confined = confined
        self._threads = ThreadPoolExecutor(processes or os.cpu_count() or 1, thread_name_prefix="unit-tests")
        self._probe()

    def check(self, row: Row) -> str:
        try:
            tests = _read_tests(find(row, self._tests))
        except ValueError as error:
            return f'column "{self._tests}": {error}'
        for number, test in enumerate(tests):
            try:
                if isinstance(test, str):
                    compile(test, f"test {number}", "exec")
            except (SyntaxError, ValueError) as error:
                return f'column "{self._tests}": test {number} is not Python: {error}'
        return ""

    async def score(self, reply: str, row: Row) -> Score:
        blocks = _FENCED.findall(reply) or [reply]
        if not blocks[-1].strip():
            return NO_ANSWER
        tests = _read_tests(find(row, self._tests))
        loop = asyncio.get_running_loop()
        passed = await loop.run_in_executor(self._threads, self._run, blocks[-1], tests, self._timeout_s)
        share = passed / len(tests)
        return Score(share if self._partial else float(passed == len(tests)), metrics={"passed": share})

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _probe(self) -> None:
        """See that the limits can be put on here; ValueError with the remedy where they cannot."""
        try:
            passed = self._run("x = 1", ["assert x == 1"], timeout_s=_PROBE_S)
        except RolloutFailure as failure:
            raise ValueError(
                f"{failure.message}; run the env server where it can be, or set confined = false, which limits time"
                " and memory alone"
            ) from None
        if passed != 1:
            raise ValueError("nothing runs within these limits; raise memory_mb")

    def _run(self, code: str, tests: "list[str | Pair]", timeout_s: float) -> int:
        """How many tests pass."""
        texts = [test for test in tests if isinstance(test, str)]
        passed = 0
        if texts:
            mark = secrets.token_hex(16)
            said, _ = self._start(code, {"tests": texts, "mark": mark}, stdin="", timeout_s=timeout_s)
            passed += len({line for line in said.splitlines() if line.startswith(f"{mark} ")})
        pairs = [test for test in tests if isinstance(test, Pair)]
        for pair in pairs:
            share_s = timeout_s / len(pairs)
            said, exit_code = self._start(code, {"tests": None}, stdin=pair.input, timeout_s=share_s)
            passed += exit_code == 0 and _same_lines(said, pair.output)
        return passed

    def _start(self, code: str, job: dict[str, Any], *, stdin: str, timeout_s: float) -> tuple[str, int]:
        """Run one process to its end, or to the end of its time; what it wrote, and its exit code."""
        limits = {
            "cpu_s": int(timeout_s) + 1,
            "memory_bytes": self._memory_bytes,
            "file_bytes": self._file_bytes,
        }
        job |= {"limits": limits, "confined": self._confined}
        with (
            tempfile.TemporaryDirectory(prefix="unit-tests-", ignore_cleanup_errors=True) as folder,
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as said,
            tempfile.TemporaryFile() as errors,
        ):
            (Path(folder) / "solution.py").write_text(code, encoding="utf-8", errors="replace")
            (Path(folder) / "job.json").write_text(json.dumps(job), encoding="utf-8")
            given.write(stdin.encode("utf-8", "replace"))
            given.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", confined.__file__],
                stdin=given,
                stdout=said,
                stderr=errors,
                cwd=folder,
                env=_environ(folder),
                start_new_session=True,
            )
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                # The whole session: without confinement the code may have started processes of its own.
                _kill(process)
            if process.returncode == confined.EXIT_UNCONFINED:
                errors.seek(0)
                raise RolloutFailure(
                    "unconfined", errors.read(500).decode(errors="replace").strip(), retryable=False
                )
            said.seek(0)
            return said.read(self._file_bytes).decode(errors="replace"), process.returncode


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environ(folder: str) -> dict[str, str]:
    """Nothing of ours: our variables hold keys. One thread for libraries of numbers, whose pools take memory."""
    return {
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PATH": "/usr/bin:/bin",
        "PYTHONHASHSEED": "0",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


def _same_lines(said: str, wanted: str) -> bool:
    """Whether two texts are the same but for space at the ends of lines and of the whole."""
    return [line.rstrip() for line in said.strip().splitlines()] == [
        line.rstrip() for line in wanted.strip().splitlines()
    ]


def _read_tests(value: Any) -> "list[str | Pair]":
    """The tests of a row, whichever form they have; ValueError for none of them."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        with contextlib.suppress(ValueError):  # Python may begin with a bracket too
            value = json.loads(value)
    if isinstance(value, dict):
        inputs, outputs = value.get("inputs"), value.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("a table of tests needs inputs and outputs, lists of the same length")
        value = [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]
    tests: list[str | Pair] = []
    for test in value if isinstance(value, list) else [value]:
        if isinstance(test, str) and test.strip():
            tests.append(test)
        elif (
            isinstance(test, dict)
            and isinstance(test.get("input"), str)
            and isinstance(test.get("output"), str)
        ):
            tests.append(Pair(test["input"], test["output"]))
        else:
            raise ValueError("a test is Python in a text, or a table with the texts input and output")
    if not tests:
        raise ValueError("there are no tests")
    return tests
