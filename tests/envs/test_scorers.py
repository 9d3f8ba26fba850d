"""What replies are worth by each scorer that needs no library, and which rows each refuses."""

import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from envs.dataset.answers import last_number
from envs.dataset.aside import Aside, AsideError
from envs.dataset.choice import pick
from envs.dataset.scoring import SCORERS, Score, Scorer, build_scorer
from envs.errors import EnvironmentLoadError, RolloutFailure
from tests.support.chat_endpoint import chat_endpoint, completion, status

confines = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can limit files and network")


def scorer(name: str, **options: Any) -> Scorer:
    return build_scorer({"name": name, **options}, shown="test")


@asynccontextmanager
async def opened(made: Scorer) -> AsyncIterator[Scorer]:
    """A scorer between its setup and its end."""
    await made.setup()
    try:
        yield made
    finally:
        await made.close()


async def score(made: Scorer, reply: str, **row: Any) -> Score:
    assert made.check(row) == ""
    async with opened(made):
        return await made.score(reply, row)


@pytest.mark.parametrize(
    ("options", "reply", "answer", "reward"),
    [
        ({}, " Paris \n", "Paris", 1.0),
        ({}, "paris", "Paris", 0.0),
        ({"ignore_case": True}, "paris", "Paris", 1.0),
        ({}, "a  b", "a b", 0.0),
        ({"ignore_space": True}, "a\n b", "a b", 1.0),
        ({}, "7", 7, 1.0),
        ({}, "b", ["a", "b"], 1.0),
        ({}, "c", ["a", "b"], 0.0),
    ],
)
async def test_exact(options: dict[str, Any], reply: str, answer: Any, reward: float) -> None:
    """The same text, or one of a list; case and space count unless told otherwise."""
    assert (await score(scorer("exact", **options), reply, answer=answer)).reward == reward


@pytest.mark.parametrize(
    ("options", "reply", "answer", "reward"),
    [
        ({}, "so 40 + 2 = 42.", 42, 1.0),
        ({}, "it is 1,234.50", "1234.5", 1.0),
        ({}, "-3", "3", 0.0),
        ({}, "\u22123", "-3", 1.0),
        ({}, "1/3", "0.333", 0.0),
        ({"tolerance": 0.001}, "1/3", "0.333", 1.0),
        ({"relative_tolerance": 0.1}, "95", "100", 1.0),
        ({"relative_tolerance": 0.1}, "89", "100", 0.0),
        ({}, "6.02e23", "602000000000000000000000", 1.0),
        ({}, "0.1 + 0.2 = 0.3", "0.30", 1.0),
        ({}, "42", "They sell 48 clips.\n#### 42", 1.0),
        ({}, "$72", "72", 1.0),
        ({}, "50%", "50", 1.0),
    ],
)
async def test_numeric(options: dict[str, Any], reply: str, answer: Any, reward: float) -> None:
    """The last number of both counts, exactly unless there is a tolerance."""
    assert (await score(scorer("numeric", **options), reply, answer=answer)).reward == reward


async def test_a_reply_without_a_number_is_not_answered() -> None:
    """A metric tells it from a wrong number."""
    assert await score(scorer("numeric"), "no idea", answer=1) == Score(0.0, answered=False)
    assert scorer("numeric").check({"answer": "none"}) == "no number in column \"answer\": 'none'"


@pytest.mark.parametrize("text", ["1e999999999", "9" * 5000, "1/0", "a1", "x.5.", ""])
def test_what_is_no_number_that_anybody_means_is_none(text: str) -> None:
    """And costs no time."""
    assert last_number(text) is None


@pytest.mark.parametrize(
    ("reply", "place"),
    [
        ("B", 1),
        ("(b)", 1),
        ("**C**.", 2),
        ("The answer is B.", 1),
        ("I think the answer is (C), as A is wrong.", 2),
        ("Answer: \\boxed{A}", 0),
        ("First I thought.\nB", 1),
        ("B) green", 1),
        ("green", 1),
        ("Reasons.\nGreen.", 1),
        ("A good question!", None),
        ("the answer is E", None),
        ("", None),
        ("no idea", None),
    ],
)
def test_a_reply_picks_by_letter_or_by_text(reply: str, place: int | None) -> None:
    """Alone, in the last line, or announced; an article is no answer."""
    assert pick(reply, ["red", "green", "blue"]) == place


@pytest.mark.timeout(20)
@pytest.mark.parametrize("between", [" ", "*", "\\", " is "])
def test_a_reply_that_announces_and_never_says_is_read_at_once(between: str) -> None:
    """A policy that repeats itself must not hold up the server that reads it; it took minutes."""
    assert pick(f"The answer{between * 100_000}7", ["red", "green", "blue"]) is None


@pytest.mark.parametrize("answer", ["B", "b", 1, "green", "(B)"])
async def test_the_answer_of_a_choice_is_a_letter_a_number_or_a_text(answer: Any) -> None:
    """Numbers count from 0."""
    row = {"choices": ["red", "green"], "answer": answer}
    assert (await score(scorer("choice"), "B", **row)).reward == 1.0
    assert (await score(scorer("choice"), "A", **row)).reward == 0.0
    assert (await score(scorer("choice"), "?", **row)).answered is False


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"choices": "red", "answer": "A"}, "is not a list of 2 to 26 choices"),
        ({"choices": ["red", "blue"], "answer": "C"}, "names none of the 2 choices: 'C'"),
        ({"choices": ["red", "blue"], "answer": 2}, "names none of the 2 choices: 2"),
        ({"choices": ["red", "blue"], "answer": True}, "names none of the 2 choices: True"),
    ],
)
def test_a_row_without_a_right_choice_is_refused(row: dict[str, Any], says: str) -> None:
    """Before the run."""
    assert says in scorer("choice").check(row)


async def test_regex() -> None:
    """One pattern for all rows or one per row, anywhere or over the whole reply."""
    assert (await score(scorer("regex", pattern=r"\b\d{3}\b"), "it is 123")).reward == 1.0
    assert (await score(scorer("regex", pattern=r"\d{3}", full=True), "it is 123")).reward == 0.0
    assert (await score(scorer("regex", column="wanted"), "it is 123", wanted="^it")).reward == 1.0
    assert "not a regular expression" in scorer("regex", column="wanted").check({"wanted": "("})
    for options in ({}, {"pattern": "a", "column": "b"}, {"pattern": "("}):
        with pytest.raises(EnvironmentLoadError, match='scorer "regex"'):
            scorer("regex", **options)


async def test_a_pattern_that_would_take_for_ever_is_stopped() -> None:
    """In a process of its own, so that nothing else waits for it; the next reply is scored again."""
    async with opened(scorer("regex", pattern=r"^(a|a)*$", timeout_s=2.0)) as made:
        assert await made.score("a" * 60 + "b", {}) == Score(0.0, metrics={"timed_out": 1.0})
        assert (await made.score("aaa", {})).reward == 1.0


async def test_what_runs_aside_gets_none_of_our_variables_and_tells_what_it_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A helper serves one call after the other; its end is told too."""
    monkeypatch.setenv("SOME_KEY", "secret")
    for function, arguments, expected in (
        ("os:getenv", ("SOME_KEY", "none"), "none"),
        ("operator:add", (1, 2), 3),
    ):
        aside = Aside(function, most=1, timeout_s=30)
        assert await aside.call(*arguments) == expected
        assert await aside.call(*arguments) == expected
        await aside.aclose()
    failing = Aside("operator:truediv", most=1, timeout_s=30)
    with pytest.raises(AsideError, match="ZeroDivisionError"):
        await failing.call(1, 0)
    assert await failing.call(1, 2) == 0.5
    await failing.aclose()
    with pytest.raises(AsideError, match="no module nowhere_at_all"):
        await Aside("nowhere_at_all:f", most=1, timeout_s=30).call()
    with pytest.raises(AsideError, match="ended"):
        await Aside("os:_exit", most=1, timeout_s=30).call(1)


CODE = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."


@confines
async def test_unit_tests_pay_for_all_or_for_a_share() -> None:
    """The code is the reply's last block; a test is Python that raises or does not."""
    tests = ["assert double(2) == 4", "assert double('a') == 'aa'", "assert double(1) == 3"]
    assert await score(scorer("unit_tests"), CODE, tests=tests) == Score(0.0, metrics={"passed": 2 / 3})
    assert (await score(scorer("unit_tests", partial=True), CODE, tests=tests)).reward == pytest.approx(2 / 3)
    assert (await score(scorer("unit_tests"), CODE, tests="\n".join(tests[:2]))).reward == 1.0
    assert (await score(scorer("unit_tests"), "", tests=tests)).answered is False


@confines
@pytest.mark.parametrize(
    "tests",
    [
        [{"input": "2\n", "output": "4"}, {"input": "5", "output": "10\n"}],
        {"inputs": ["2\n", "5"], "outputs": ["4", "10"]},
        '{"inputs": ["2\\n", "5"], "outputs": ["4", "10"]}',
    ],
)
async def test_a_program_is_tested_by_what_it_prints(tests: Any) -> None:
    """In the forms that datasets of programming tasks have."""
    program = "print(2 * int(input()))   "
    assert (await score(scorer("unit_tests"), program, tests=tests)).reward == 1.0
    once = "import sys\nprint(4)\nsys.exit(int(input()) == 5)"
    assert (await score(scorer("unit_tests"), once, tests=tests)).metrics == {"passed": 0.5}


@confines
@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "print('passed')",
        "raise KeyboardInterrupt",
        "def f(:",
        "import sys\nclass Yes:\n    def __eq__(self, other): return True\n",
    ],
)
async def test_code_that_only_ends_well_passes_nothing(code: str) -> None:
    """Neither an exit code nor what is printed says that a test passed."""
    assert (await score(scorer("unit_tests"), code, tests=["assert f(1) == 2"])).reward == 0.0


FORBIDDEN = {
    "network": "import socket; socket.socket()",
    "local sockets": "import socket; socket.socket(socket.AF_UNIX)",
    "processes": "import os; os.fork()",
    "programs": "import subprocess; subprocess.run(['true'])",
    "signals": "import os; os.kill(os.getppid(), 0)",
    "reading": "open('/etc/hostname').read()",
    "our variables": "import os; open(f'/proc/{os.getppid()}/environ').read()",
    "home": "import os; os.listdir('/root')",
    "writing": "open('/tmp/unit_tests_must_not_write_here', 'w')",
    "linking": "import os; os.symlink('/etc', '/tmp/unit_tests_must_not_link_here')",
}


@confines
@pytest.mark.parametrize("what", FORBIDDEN)
async def test_code_reaches_nothing_outside_its_folder(what: str) -> None:
    """The kernel says no: a PermissionError, and nothing else."""
    code = (
        f"try:\n    {FORBIDDEN[what]}\n    said = 'allowed'\nexcept PermissionError:\n    said = 'refused'\n"
    )
    assert (await score(scorer("unit_tests"), code, tests=["assert said == 'refused', said"])).reward == 1.0


@confines
@pytest.mark.parametrize(
    "code",
    [
        "open('mine', 'w').write('x'); import os; os.mkdir('folder'); os.rename('mine', 'folder/mine')",
        "import threading; t = threading.Thread(target=print); t.start(); t.join()",
        "import asyncio; asyncio.run(asyncio.sleep(0))",
        "import numpy; numpy.ones((50, 50)) @ numpy.ones((50, 50))",
        "import tempfile; tempfile.TemporaryFile().write(b'x')",
        "import signal; signal.signal(signal.SIGUSR1, print); signal.raise_signal(signal.SIGUSR1)",
        "import json, re, math, random, decimal, datetime, collections, heapq, bisect, functools, pickle",
    ],
)
async def test_code_may_do_what_code_does(code: str) -> None:
    """Its folder, threads, libraries."""
    assert (await score(scorer("unit_tests"), code, tests=["assert True"])).reward == 1.0


@confines
@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"timeout_s": 0.7}, "while True: pass"),
        ({"timeout_s": 0.7}, "import time; time.sleep(1000)"),
        ({"memory_mb": 256}, "x = bytearray(512 * 1024 * 1024)"),
        ({"file_mb": 1}, "open('big', 'wb').write(bytes(2 * 1024 * 1024))"),
        ({}, "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (2 ** 40, 2 ** 40))"),
    ],
)
async def test_code_beyond_its_limits_passes_nothing(options: dict[str, Any], code: str) -> None:
    """Time, memory and file size are limited, and nobody can raise a limit."""
    assert (await score(scorer("unit_tests", **options), code, tests=["assert True"])).reward == 0.0


@confines
async def test_code_has_none_of_our_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of judges and of inference servers are there."""
    monkeypatch.setenv("SOME_KEY", "secret")
    tests = [
        "import os; assert 'SOME_KEY' not in os.environ",
        "import os; assert not os.path.exists('job.json')",
    ]
    assert (await score(scorer("unit_tests"), "pass", tests=tests)).reward == 1.0


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ([], "there are no tests"),
        ("", "a test is Python in a text"),
        ([{"input": "x"}], "a test is Python in a text, or a table"),
        ({"inputs": ["x"], "outputs": []}, "lists of the same length"),
        (["assert ("], "test 0 is not Python"),
    ],
)
def test_rows_with_tests_that_cannot_run_are_refused(tests: Any, says: str) -> None:
    """Before the run, where a test that can never pass would look like a weak policy."""
    assert says in scorer("unit_tests", confined=sys.platform == "linux").check({"tests": tests})


JUDGE = {"model": "strict", "prompt": "Is {reply} right for {question}? From 0 to 10.", "best": 10.0}


async def test_a_judge_is_asked_and_its_last_number_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """At an endpoint of its own, with its own key, and never for token ids."""
    monkeypatch.setenv("JUDGE_KEY_OF_TEST", "secret")
    async with chat_endpoint() as endpoint:
        endpoint.script(completion("<think>9? no</think>Of 10 points I give 7." + "<think>" * 100_000))
        made = scorer(
            "judge", base_url=endpoint.base_url, system="Be fair.", api_key_env="JUDGE_KEY_OF_TEST", **JUDGE
        )
        assert await score(made, "4", question="2+2") == Score(0.7)
    (asked,) = endpoint.requests
    assert asked == {
        "model": "strict",
        "temperature": 0.0,
        "messages": [
            {"role": "system", "content": "Be fair."},
            {"role": "user", "content": "Is 4 right for 2+2? From 0 to 10."},
        ],
    }
    assert endpoint.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("answer", "kind", "retryable"),
    [
        (completion("no number"), "judge_unreadable", True),
        (completion("11"), "judge_unreadable", True),
        (status(400), "judge_bad_request", False),
        (status(401), "judge_unauthorized", False),
    ],
)
async def test_a_judge_that_fails_is_a_failed_rollout_of_a_kind_of_its_own(
    answer: Any, kind: str, retryable: bool
) -> None:
    """Never a zero, and the policy's servers are not to blame."""
    async with chat_endpoint() as endpoint:
        endpoint.script(answer)
        with pytest.raises(RolloutFailure) as caught:
            await score(scorer("judge", base_url=endpoint.base_url, **JUDGE), "4", question="2+2")
    assert (caught.value.kind, caught.value.retryable) == (kind, retryable)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"base_url": "localhost"}, "is not like http"),
        ({"prompt": "no place for it"}, "must show the judge the {reply}"),
        ({"best": 0.0}, "best must be positive"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "variable NOT_SET_ANYWHERE is not set"),
        ({"prompt": "{"}, "prompt: "),
    ],
)
def test_a_judge_that_cannot_be_asked_is_a_mistake_of_the_configuration(
    options: dict[str, Any], says: str
) -> None:
    """Told before the run."""
    with pytest.raises(EnvironmentLoadError, match=re.escape(says)):
        scorer("judge", **{"base_url": "http://127.0.0.1:1/v1", **JUDGE, **options})


@pytest.mark.parametrize(
    ("name", "options", "library", "extra"),
    [("math", {}, "math_verify", "math"), ("json_schema", {"schema": {}}, "jsonschema", "json-schema")],
)
def test_a_missing_library_names_the_extra_to_install(
    name: str, options: dict[str, Any], library: str, extra: str
) -> None:
    """Those of mathematics and of schemas are no dependencies."""
    if find_spec(library) is not None:
        pytest.skip(f"{library} is installed here")
    with pytest.raises(EnvironmentLoadError, match=rf"pip install 'rollout-orchestrator\[{extra}\]'"):
        scorer(name, **options)


def test_every_scorer_is_there() -> None:
    """The table names classes."""
    for target in SCORERS.values():
        module, _, name = target.partition(":")
        assert issubclass(getattr(__import__(module, fromlist=[name]), name), Scorer)
