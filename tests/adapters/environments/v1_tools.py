"""A verifiers v1 taskset whose tool keeps state; played by the library's own chat program."""

# Its library is only in a virtualenv of its own.
# mypy: ignore-errors

from typing import Any

import verifiers.v1 as vf


class Account(vf.State):
    balance: int = 100


class Bank(vf.Toolset[vf.ToolsetConfig, Account]):
    @vf.tool
    async def deposit(self, amount: int) -> str:
        """Put money into the account."""
        self.state.balance += amount
        return f"balance {self.state.balance}"


class BankTask(vf.Task[vf.TaskData, Account, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: Any) -> list[vf.Toolset]:
        return [Bank(vf.ToolsetConfig())]

    @vf.reward
    async def balance(self, trace: Any) -> float:
        return float(trace.state.balance)


class BankTaskset(vf.Taskset[BankTask, vf.TasksetConfig]):
    def load(self) -> Any:
        yield BankTask(vf.TaskData(prompt="Deposit 5."), self.config.task)


__all__ = ["BankTaskset"]

if __name__ == "__main__":
    Bank.run()
