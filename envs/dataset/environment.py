"""Environments without Python: `dataset::<file>`, with a prompt template, splits and a scorer from the configuration.

The file is JSON lines, Parquet, or a folder that Hugging Face's `save_to_disk` wrote. Every row is checked when the
environment is made, so that a run with a bad row does not start. A task is one row; a rollout is one turn, or a
loop with tools, and one score.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.dataset import arrow
from envs.dataset.patterns import ReplyPattern
from envs.dataset.rows import Row, Rows, check_columns, find_file, open_rows
from envs.dataset.scoring import NO_ANSWER, Score, build_scorer
from envs.dataset.splits import Int64s, group_by_value, share_out
from envs.dataset.template import Template, TemplateError, find
from envs.environment import Environment, Task
from envs.errors import EnvironmentLoadError
from envs.importing import ImportReferenceError, import_attribute, nearest
from envs.model import Model
from envs.rollout import Rollout
from envs.signatures import ArgumentsError, Signature, SignatureError
from envs.tools import Tool, chat_with_tools, tools_of

_HOW = 'for instance prompt = "{question}", with the columns of a row in braces'


class RowTasks(Sequence[Row]):
    """The rows of one split, as tasks."""

    repeatable = True

    def __init__(self, rows: Rows, numbers: Int64s | None = None) -> None:
        self._rows = rows
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._rows) if self._numbers is None else len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index if self._numbers is None else int(self._numbers[index])]


class DatasetEnvironment(Environment):
    """One dataset. `path` is the id's; the rest are its `args`, told of in docs/environments.md."""

    def __init__(
        self,
        path: str,
        *,
        scorer: str | dict[str, Any],
        prompt: str = "",
        messages: str = "",
        system: str = "",
        reply_pattern: str = "",
        tools: list[str] | None = None,
        max_turns: int = 10,
        split_files: dict[str, str] | None = None,
        split_column: str = "",
        split_shares: dict[str, float] | None = None,
        split_seed: int = 0,
    ) -> None:
        self._shown = f"dataset::{path}"
        if bool(prompt) == bool(messages):
            said = "both prompt and messages are given" if prompt else f"prompt is missing, {_HOW}"
            raise EnvironmentLoadError(f"{self._shown}: {said}")
        if sum(map(bool, (split_files, split_column, split_shares))) > 1:
            raise EnvironmentLoadError(
                f"{self._shown}: give one of split_files, split_column and split_shares"
            )
        if split_shares and (min(split_shares.values()) < 0 or not sum(split_shares.values()) > 0):
            raise EnvironmentLoadError(f"{self._shown}: split_shares must not be negative, nor all 0")
        self._prompt = self._template("prompt", prompt)
        self._system = self._template("system", system)
        self._messages = messages
        self._reply = self._pattern(reply_pattern) if reply_pattern else None
        self._tools = [self._tool(name) for name in tools or ()]
        self._max_turns = max_turns
        self._scorer = build_scorer(scorer, shown=self._shown)
        named = [*self._prompt.columns, *self._system.columns, *self._scorer.columns]
        self._columns = list(dict.fromkeys([*named, *filter(None, (messages, split_column))]))
        self._splits: dict[str, RowTasks] = {}
        self._every: RowTasks | None = None
        self._open(find_file(path), split_files or {}, split_column, split_shares or {}, split_seed)

    def tasks(self, split: str) -> RowTasks:
        found = self._splits.get(split, self._every)
        if found is None:
            raise EnvironmentLoadError(
                f'{self._shown} has no split "{split}"; {nearest(split, self._splits)} (write @split behind the id)'
            )
        if not len(found):
            raise EnvironmentLoadError(f'{self._shown}: split "{split}" has no rows')
        return found

    async def rollout(self, task: Task, model: Model) -> Rollout:
        metrics: dict[str, float] = {}
        stop_reason = None
        if self._tools:
            tools = [tool for make in self._tools for tool in make()]
            chat = await chat_with_tools(model, self.conversation(task), tools, max_turns=self._max_turns)
            said, metrics, stop_reason = chat.text, chat.metrics, chat.stop_reason
        else:
            said = (await model.chat(self.conversation(task))).text
        score = await self._score(said, task)
        metrics |= {"answered": float(score.answered), **score.metrics}
        return model.rollout(score.reward, metrics=metrics, stop_reason=stop_reason)

    def conversation(self, row: Row) -> list[dict[str, Any]]:
        """What the policy is asked."""
        if self._messages:
            said = [dict(message) for message in find(row, self._messages)]
        else:
            said = [{"role": "user", "content": self._prompt.render(row)}]
        system = self._system.render(row)
        return [{"role": "system", "content": system}, *said] if system else said

    async def setup(self) -> None:
        await self._scorer.setup()

    async def close(self) -> None:
        if self._reply is not None:
            await self._reply.aclose()
        await self._scorer.close()

    async def _score(self, said: str, task: Task) -> Score:
        """Of what counts of a reply: all of it, or what the pattern finds."""
        if self._reply is None:
            return await self._scorer.score(said, task)
        try:
            answer = await self._reply.last_in(said)
        except TimeoutError:
            return NO_ANSWER._replace(metrics={"timed_out": 1.0})
        score = NO_ANSWER if answer is None else await self._scorer.score(answer, task)
        return score._replace(metrics={"timed_out": 0.0, **score.metrics})

    def _open(
        self, path: Path, files: Mapping[str, str], column: str, shares: Mapping[str, float], seed: int
    ) -> None:
        """Read and check every row that there is, and say which are in which split."""
        if files:
            for split, name in files.items():
                self._splits[split] = RowTasks(self._rows(find_file(name)))
            # A split that is not named is in the id's own file.
            self._every = RowTasks(self._rows(path)) if not path.is_dir() else None
            return
        saved = arrow.saved_splits(path) if path.is_dir() else None
        if saved is not None:
            if column or shares:
                raise EnvironmentLoadError(f"{self._shown} has splits of its own: {', '.join(saved)}")
            self._splits = {split: RowTasks(self._rows(folder)) for split, folder in saved.items()}
            return
        rows = self._rows(path)
        numbers: dict[str, Int64s] | None = None
        if column:
            numbers = group_by_value([find(rows[number], column) for number in range(len(rows))])
        elif shares:
            numbers = share_out(len(rows), shares, seed=seed)
        if numbers is None:
            self._every = RowTasks(rows)
        else:
            self._splits = {split: RowTasks(rows, of_split) for split, of_split in numbers.items()}

    def _rows(self, path: Path) -> Rows:
        shown = self._shown if str(path) in self._shown else f"{self._shown} ({path})"
        if path.is_dir() and arrow.is_saved(path):
            return arrow.open_saved(path, check=self._check, shown=shown)
        return open_rows(path, check=self._check, shown=shown)

    def _check(self, row: Row) -> str:
        problem = check_columns(row, self._columns)
        if not problem and self._messages and not _are_messages(find(row, self._messages)):
            problem = f'column "{self._messages}" is not a list of messages with role and content (text only)'
        return problem or self._scorer.check(row)

    def _template(self, what: str, text: str) -> Template:
        try:
            return Template(text)
        except TemplateError as error:
            raise EnvironmentLoadError(f"{self._shown}: {what}: {error}") from None

    def _tool(self, name: str) -> Callable[[], list[Tool]]:
        """Makes the tools of one rollout: a function's, or the methods of a new object of a class."""
        try:
            found = import_attribute(name, what="tool")
            made = tools_of(found() if isinstance(found, type) else found)
        except (ImportReferenceError, SignatureError, TypeError, ValueError) as error:
            raise EnvironmentLoadError(f"{self._shown}: tools: {error}") from error.__cause__
        return (lambda: tools_of(found())) if isinstance(found, type) else (lambda: made)

    def _pattern(self, pattern: str) -> ReplyPattern:
        try:
            return ReplyPattern(pattern)
        except ValueError as error:
            raise EnvironmentLoadError(f"{self._shown}: reply_pattern {error}") from None


class DatasetLoader:
    """Any file: the name is its path."""

    def names(self) -> list[str]:
        return ["<file>"]

    def about(self, name: str) -> str:
        return "rows of JSON lines, Parquet or a Hugging Face folder; prompt, splits and scorer are args"

    def load(self, name: str, args: Mapping[str, Any]) -> Environment:
        signature = Signature(DatasetEnvironment)
        options = [option for option in signature.names if option != "path"]
        unknown = next((option for option in args if option not in options), None)
        if unknown is not None:
            raise EnvironmentLoadError(
                f'dataset::{name} has no option "{unknown}"; {nearest(unknown, options)}'
            )
        if "scorer" not in args:
            from envs.dataset.scoring import SCORERS

            raise EnvironmentLoadError(f"dataset::{name}: scorer is missing; there are: {', '.join(SCORERS)}")
        try:
            return DatasetEnvironment(**signature.read({**args, "path": name}))
        except ArgumentsError as error:
            raise EnvironmentLoadError(f"dataset::{name}: args do not fit: {error}") from None


LOADER = DatasetLoader()


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in value
        )
    )
