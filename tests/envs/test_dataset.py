"""Environments of a file and a configuration: what is asked, which rows are in which split, which mistakes are told."""

import asyncio
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from envs import Environment, EnvironmentLoadError, Model, ModelSettings, Rollout
from envs.dataset import read_rows
from envs.dataset.splits import share_out
from envs.dataset.template import Template, TemplateError
from envs.loader import load_environment
from tests.support.chat_only import ChatOnly

ROWS: list[dict[str, Any]] = [
    {"question": "1 + 1?", "answer": "2", "kind": "easy"},
    {"question": "2 + 3?", "answer": "5", "kind": "easy"},
    {"question": "12 * 12?", "answer": "144", "kind": "hard"},
]


class Script(ChatOnly):
    """A `ChatClient` that gives prepared answers and keeps what it was asked."""

    def __init__(self, *answers: str | dict[str, Any]) -> None:
        self._answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    async def chat(self, base_url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        self.asked.append(msgspec.json.decode(body))
        answer = self._answers.pop(0)
        message = {"content": answer} if isinstance(answer, str) else answer
        choice = {
            "message": {"role": "assistant", **message},
            "finish_reason": "stop",
            "token_ids": [7],
            "logprobs": {"content": [{"logprob": -1.0}]},
        }
        return msgspec.json.encode({"choices": [choice], "prompt_token_ids": [1, 2]})


def written(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> Path:
    """A file of JSON lines; what is text already is written as it is."""
    path = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def dataset(path: Path, **args: Any) -> Environment:
    return load_environment(f"dataset::{path}", {"prompt": "{question}", "scorer": "exact", **args})


def asked_of(environment: Environment, split: str = "train") -> list[str]:
    """The questions of a split, in order."""
    tasks: Any = environment.tasks(split)
    return [tasks[index]["question"] for index in range(len(tasks))]


async def attempt(environment: Environment, *answers: Any, index: int = 0) -> tuple[Rollout, Script]:
    script = Script(*answers)
    model = Model(ModelSettings("m"), client=script, base_url="local")
    await environment.setup()
    try:
        rollout = await environment.rollout(environment.tasks("train")[index], model)
    finally:
        await environment.close()
    rollout.check()
    return rollout, script


async def test_a_row_becomes_a_prompt_and_its_answer_a_reward(tmp_path: Path) -> None:
    """The template is filled with the row's columns, the system text stands before it, the scorer decides."""
    environment = dataset(written(tmp_path, ROWS), prompt="{kind}: {question}", system="Say a number.")
    right, script = await attempt(environment, " 144\n", index=2)
    assert script.asked[0]["messages"] == [
        {"role": "system", "content": "Say a number."},
        {"role": "user", "content": "hard: 12 * 12?"},
    ]
    assert (right.reward, right.metrics) == (1.0, {"answered": 1.0})
    wrong, _ = await attempt(dataset(written(tmp_path, ROWS)), "145", index=2)
    assert wrong.reward == 0.0


async def test_a_pattern_takes_the_answer_out_of_the_reply(tmp_path: Path) -> None:
    """Its last match counts; a reply without one is not answered."""
    environment = dataset(written(tmp_path, ROWS), reply_pattern="<answer>(.*?)</answer>")
    right, _ = await attempt(environment, "<answer>3</answer> no, <answer>\n2 </answer>.")
    assert (right.reward, right.metrics["answered"]) == (1.0, 1.0)
    none, _ = await attempt(dataset(written(tmp_path, ROWS), reply_pattern="<answer>(.*?)</answer>"), "2")
    assert (none.reward, none.metrics["answered"]) == (0.0, 0.0)


async def test_a_pattern_that_would_search_for_ever_holds_nobody_up(tmp_path: Path) -> None:
    """The loop goes on meanwhile, and the reply counts as not answered, with a metric that says why."""
    environment = dataset(written(tmp_path, ROWS), reply_pattern="(?:a+)+b")
    woken = asyncio.Event()
    attempted = asyncio.ensure_future(attempt(environment, "a" * 60))
    asyncio.get_running_loop().call_later(0.1, woken.set)
    await woken.wait()
    assert not attempted.done()
    late, _ = await attempted
    assert (late.reward, late.metrics["answered"], late.metrics["timed_out"]) == (0.0, 0.0, 1.0)


async def test_a_group_that_took_no_part_in_the_match_is_no_answer(tmp_path: Path) -> None:
    """The match is there, but nothing of it is what counts."""
    none, _ = await attempt(dataset(written(tmp_path, ROWS), reply_pattern="x|<(.)>"), "x")
    assert (none.reward, none.metrics["answered"], none.metrics["timed_out"]) == (0.0, 0.0, 0.0)


async def test_a_column_may_hold_the_whole_conversation(tmp_path: Path) -> None:
    """As datasets of other trainers have it, with the answer inside another column."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = written(tmp_path, [{"prompt": messages, "reward_model": {"ground_truth": "4"}}])
    scorer = {"name": "exact", "answer": "reward_model.ground_truth"}
    environment = load_environment(f"dataset::{path}", {"messages": "prompt", "scorer": scorer})
    rollout, script = await attempt(environment, "4")
    assert script.asked[0]["messages"] == messages
    assert rollout.reward == 1.0


def shout(text: str) -> str:
    """A text in capitals."""
    return text.upper()


class Counter:
    """Counts, anew in every rollout."""

    def __init__(self) -> None:
        self._count = 0

    def count(self) -> int:
        """One more."""
        self._count += 1
        return self._count


async def test_tools_are_named_in_the_configuration(tmp_path: Path) -> None:
    """A function is a tool; of a class every rollout has an object of its own."""
    tools = ["tests.envs.test_dataset:shout", "tests.envs.test_dataset:Counter"]
    environment = dataset(written(tmp_path, ROWS), tools=tools, max_turns=3)
    calls = [
        {"id": "a", "type": "function", "function": {"name": "shout", "arguments": '{"text": "x"}'}},
        {"id": "b", "type": "function", "function": {"name": "count", "arguments": "{}"}},
    ]
    for _ in range(2):
        rollout, script = await attempt(environment, {"content": "", "tool_calls": calls}, "2")
        said = [message["content"] for message in script.asked[1]["messages"] if message["role"] == "tool"]
        assert said == ["X", "1"]
        assert (rollout.reward, rollout.metrics["tool_calls"]) == (1.0, 2.0)


def test_without_splits_every_split_is_the_whole_file(tmp_path: Path) -> None:
    """So that train and eval name a file each."""
    environment = dataset(written(tmp_path, ROWS))
    assert (
        asked_of(environment, "train") == asked_of(environment, "eval") == [row["question"] for row in ROWS]
    )


def test_a_split_may_be_a_file_or_the_value_of_a_column(tmp_path: Path) -> None:
    """Rows stay in the order of the file."""
    other = written(tmp_path, ROWS[2:], "other.jsonl")
    by_file = dataset(written(tmp_path, ROWS[:2]), split_files={"eval": str(other)})
    assert asked_of(by_file, "train") == ["1 + 1?", "2 + 3?"]
    assert asked_of(by_file, "eval") == ["12 * 12?"]
    by_column = dataset(written(tmp_path, ROWS), split_column="kind")
    assert asked_of(by_column, "easy") == ["1 + 1?", "2 + 3?"]
    with pytest.raises(EnvironmentLoadError, match='no split "train"; there are: easy, hard'):
        by_column.tasks("train")


def test_shares_are_exact_disjoint_and_the_same_in_every_process(tmp_path: Path) -> None:
    """Every row is in one split; another seed gives another choice."""
    rows = [{"question": str(number), "answer": "x"} for number in range(200)]
    path = written(tmp_path, rows)
    shares = {"train": 0.9, "eval": 0.1}
    environment = dataset(path, split_shares=shares)
    train, held_back = asked_of(environment, "train"), asked_of(environment, "eval")
    assert (len(train), len(held_back)) == (180, 20)
    assert sorted(train + held_back, key=int) == [row["question"] for row in rows]
    assert train == sorted(train, key=int)
    # Fixed: a resumed run, and a server elsewhere, must have the same rows in each split.
    assert held_back[:5] == asked_of(dataset(path, split_shares=shares), "eval")[:5] == SHARED_OUT
    assert asked_of(dataset(path, split_shares=shares, split_seed=1), "eval") != held_back


SHARED_OUT = ["3", "20", "30", "49", "50"]


@pytest.mark.parametrize("count", [1, 2, 3, 10, 97])
def test_every_row_is_in_exactly_one_split(count: int) -> None:
    """Whatever the shares sum to."""
    numbers = share_out(count, {"a": 2.0, "b": 1.0, "c": 0.5}, seed=3)
    assert sorted(number for split in numbers.values() for number in split) == list(range(count))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "has no rows"),
        (["", ""], "has no rows"),
        (['{"question": 1,'], "1 row cannot be used: line 1: not JSON"),
        (["[1]"], "line 1: not a JSON object"),
        (
            [*ROWS, "", {"qestion": "?", "answer": "2"}],
            'line 5: no column "question" (did you mean "qestion"?)',
        ),
        ([*ROWS, {"question": "?"}], 'line 4: no column "answer" (there are: question)'),
        ([{"question": "?", "answer": None}], 'line 1: column "answer" is empty'),
        ([{"question": "?", "answer": {}}], 'line 1: column "answer" is neither a text'),
        (["{}", "x", "[]", "{}", "1", "{}", "{}"], "7 rows cannot be used: line 1: "),
        (["{}", "x", "[]", "{}", "1", "{}", "{}"], "line 5: not a JSON object; and 2 more"),
    ],
)
def test_bad_rows_are_named_by_their_line_when_the_environment_is_made(
    tmp_path: Path, rows: list[Any], says: str
) -> None:
    """The first few of them at once, in one line."""
    with pytest.raises(EnvironmentLoadError) as caught:
        dataset(written(tmp_path, rows))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_utf8_is_named_by_its_line(tmp_path: Path) -> None:
    """Files of other encodings exist."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "?", "answer": "x"}\n{"question": "\xff", "answer": "x"}\n')
    with pytest.raises(EnvironmentLoadError, match="line 2: not JSON"):
        dataset(path)


def test_a_byte_order_mark_and_a_missing_last_line_end_do_no_harm(tmp_path: Path) -> None:
    """Editors leave both behind."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "a", "answer": 1}\r\n\r\n{"question": "b", "answer": 2}')
    assert asked_of(dataset(path)) == ["a", "b"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"prompt": ""}, "prompt is missing, for instance"),
        ({"messages": "question"}, "both prompt and messages"),
        ({"prompt": "", "messages": "question"}, "is not a list of messages"),
        ({"prompt": "{}"}, "names no column"),
        ({"prompt": "{question"}, "braces that are meant are doubled"),
        ({"prompt": "{question!r}"}, "has a format"),
        ({"prompt": "{missing}"}, 'no column "missing"'),
        ({"scorer": "exakt"}, 'no scorer "exakt"; did you mean "exact"?'),
        ({"scorer": {}}, "scorer has no name"),
        (
            {"scorer": {"name": "exact", "ignore_cas": True}},
            'no option "ignore_cas"; did you mean "ignore_case"',
        ),
        ({"scorer": {"name": "numeric", "tolerance": "x"}}, "Expected `float`, got `str` - at `tolerance`"),
        ({"scorer": "tests.envs.test_dataset:Script"}, "not a subclass of envs.dataset.Scorer"),
        ({"promt": "x"}, 'has no option "promt"; did you mean "prompt"?'),
        ({"prompt": 3}, "args do not fit: Expected `str`, got `int` - at `prompt`"),
        ({"split_column": "kind", "split_shares": {"train": 1.0}}, "give one of split_files"),
        ({"split_shares": {"train": -1.0}}, "must not be negative"),
        ({"split_files": {"eval": "nowhere.jsonl"}}, "there is no nowhere.jsonl in"),
        ({"reply_pattern": "("}, "reply_pattern is not a regular expression: missing )"),
        ({"reply_pattern": "(a)(b)"}, "reply_pattern has 2 groups"),
        ({"tools": ["nowhere_at_all:f"]}, "tools: tool"),
        ({"tools": ["tests.envs.test_dataset:ROWS"]}, "tools: "),
    ],
)
def test_a_mistake_in_the_args_is_one_line(tmp_path: Path, args: dict[str, Any], says: str) -> None:
    """With the nearest name where there is one."""
    with pytest.raises(EnvironmentLoadError) as caught:
        dataset(written(tmp_path, ROWS), **args)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where it was looked for; other kinds of files are named as well."""
    written(tmp_path, ROWS)
    (tmp_path / "rows.csv").write_text("a,b\n")
    monkeypatch.chdir(tmp_path)
    assert len(asked_of(dataset(Path("rows.jsonl")))) == 3
    with pytest.raises(EnvironmentLoadError, match=r'no row.jsonl in .*; did you mean "rows.jsonl"'):
        dataset(Path("row.jsonl"))
    with pytest.raises(EnvironmentLoadError, match=r"JSON lines .* and .parquet can be read, not .csv"):
        dataset(Path("rows.csv"))
    with pytest.raises(EnvironmentLoadError, match="is a folder, and neither"):
        dataset(Path())


@pytest.mark.skipif(find_spec("pyarrow") is not None, reason="pyarrow is installed here")
def test_a_parquet_file_without_its_library_names_the_extra(tmp_path: Path) -> None:
    """JSON lines need none."""
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(EnvironmentLoadError, match=r"pip install 'rollout-orchestrator\[dataset\]'"):
        dataset(tmp_path / "rows.parquet")


def test_a_file_is_found_where_modules_of_the_configuration_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory comes first."""
    beside, here = tmp_path / "beside", tmp_path / "here"
    beside.mkdir()
    here.mkdir()
    written(beside, ROWS)
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", str(beside))
    assert len(asked_of(dataset(Path("rows.jsonl")))) == 3
    written(here, ROWS[:1])
    assert len(asked_of(dataset(Path("rows.jsonl")))) == 1


def test_rows_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    """Only where they begin is kept; in any order, with characters of any width."""
    rows = [{"text": "ä€𝄞" * number, "number": number} for number in range(50)]
    found = read_rows(written(tmp_path, [*rows[:10], "", *rows[10:]]))
    assert [found[number]["number"] for number in (49, 0, 10, 9)] == [49, 0, 10, 9]
    assert found[49] == rows[49]
    assert (found.place(9), found.place(10)) == ("line 10", "line 12")
    assert len(found) == 50
    with pytest.raises(IndexError):
        found[50]


def test_a_file_that_changed_says_so(tmp_path: Path) -> None:
    """Instead of handing out half a row."""
    path = written(tmp_path, ROWS)
    found = read_rows(path)
    path.write_text("x" * 1000)
    with pytest.raises(RuntimeError, match=r"changed while it was used: line 1"):
        found[0]


def test_a_template_writes_columns_of_every_kind() -> None:
    """Text as it is, lists as lettered lines, the rest as JSON; doubled braces are braces."""
    template = Template("{{{q}}} {n} {inner.deep}\n{choices}")
    assert template.columns == ["q", "n", "inner.deep", "choices"]
    row = {"q": "{x}", "n": 3, "inner": {"deep": True}, "choices": ["one", 2]}
    assert template.render(row) == "{{x}} 3 true\nA. one\nB. 2"
    with pytest.raises(TemplateError):
        Template("{a:>3}")
