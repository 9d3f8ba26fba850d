"""Errors that end a run, and the exit code of each.

OrchestratorError
├── ConfigError            exit 2, nothing was spawned
├── EnvError(env)
│   ├── EnvStartupError    exit 3, with the tail of the server's own log
│   ├── EnvLostError       restart budget used up, or all servers stay away, exit 4
│   └── EnvProtocolError   a server speaks another protocol or serves another environment, exit 3
├── TrainerLinkError       exit 5
├── JournalError           the run directory cannot be written or is in use, exit 6
├── StalledError           nothing that could be trained on came out for too long, exit 7
└── InferenceError         the inference servers cannot be used, exit 8
    ├── EngineError(url)       one call to one server failed; retried, fatal only at the start
    │   ├── EngineUnfitError   the server cannot be used as configured; waiting does not help
    │   └── EngineRefusedError its answers must not be trained on; it stays out, exit 2 where there is no other
    └── WeightUpdateError      a published version cannot be loaded; never fatal

A failed rollout is an outcome, not an exception.

A message names the object, what happened and the remedy. A user's mistake prints one line.
"""


class OrchestratorError(Exception):
    """An error with a message for the user and an exit code for the supervisor."""

    exit_code = 1


class ConfigError(OrchestratorError):
    """The configuration cannot be used; nothing was spawned."""

    exit_code = 2


class EnvError(OrchestratorError):
    """Something about one environment; the message starts with its name."""

    exit_code = 3

    def __init__(self, env: str, message: str) -> None:
        super().__init__(f'env "{env}": {message}')
        self.env = env
        self.what = message
        """The message without the name, for one that names it already."""


class EnvStartupError(EnvError):
    """An env server did not become ready."""


class EnvLostError(EnvError):
    """An env's servers keep dying and the restart budget is used up, or all of them stay away."""

    exit_code = 4


class EnvProtocolError(EnvError):
    """A server speaks another protocol version or serves something else than asked."""


class TrainerLinkError(OrchestratorError):
    """The trainer cannot be served."""

    exit_code = 5


class JournalError(OrchestratorError):
    """The run directory cannot be written, or another orchestrator uses it."""

    exit_code = 6


class StalledError(OrchestratorError):
    """Nothing that could be trained on came out for longer than the configuration allows."""

    exit_code = 7


class InferenceError(OrchestratorError):
    """The inference servers cannot be used; the message names the endpoint and what it said."""

    exit_code = 8
