"""How a rollout fails, and how an environment fails to load.

A failure is data for the service: `kind` is what it counts by, `retryable` says whether another attempt
may succeed. Messages name the endpoint or the environment, what happened and the remedy, and never hold a
secret. An environment may raise `RolloutFailure` itself to say that a failure is worth another attempt;
any other exception that leaves `Environment.rollout` is a failure of kind "error".
"""

import asyncio
from enum import StrEnum

from envs.addresses import shown_url as shown_url  # beside the messages that show one
from envs.places import describe, readable_traceback


class FailureKind(StrEnum):
    """Failures that `Model` and its HTTP client raise."""

    CONNECTION = "connection"
    """The endpoint could not be reached or broke the connection."""
    OVERLOADED = "overloaded"
    """The endpoint kept answering 429 or 503."""
    SERVER_ERROR = "server_error"
    """The endpoint kept answering 5xx."""
    BAD_REQUEST = "bad_request"
    """The endpoint refused the request; asking again gives the same."""
    CONTEXT_LENGTH = "context_length"
    """The prompt does not fit the model's context."""
    UNKNOWN_MODEL = "unknown_model"
    """The endpoint does not serve the model, or not this path."""
    UNAUTHORIZED = "unauthorized"
    """The endpoint wants another API key."""
    BAD_RESPONSE = "bad_response"
    """The answer is not a chat completion."""
    NO_TOKEN_IDS = "no_token_ids"  # noqa: S105  not a password
    """A training endpoint returned no token ids, or not one log-probability per token."""
    ABORTED = "aborted"
    """The engine ended the request early, for new weights or because it stops."""
    NOT_TEXT = "not_text"
    """The conversation holds an image or anything else that is not text."""
    EMPTY_COMPLETION = "empty_completion"
    """The policy sampled no token in the whole rollout."""


class RolloutFailure(Exception):  # noqa: N818  an outcome that is counted, not a programming error
    """A rollout that cannot be finished; ends as one failed rollout of this kind."""

    def __init__(self, kind: str, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.kind = str(kind)
        self.message = message
        self.retryable = retryable


class NoExceptionError(Exception):
    """Stands for what an environment raised that is no Exception (SystemExit, KeyboardInterrupt, …): its cause."""


def stopped_by_caller(error: BaseException) -> bool:
    """Whether it is the cancellation of the running task that somebody asked for, and not the environment's own."""
    current = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and current is not None and current.cancelling() > 0


class EnvironmentLoadError(ValueError):
    """An environment id that cannot be loaded; the message is one line for the user."""


class EnvironmentRaisedError(EnvironmentLoadError):
    """An environment's own code raised while it was loaded; the message says in which step, what and where.

    `traceback` has the author's frames.
    """

    def __init__(self, step: str, error: BaseException, package: str = "") -> None:
        super().__init__(f"{step} raised {describe(error, package)}")
        self.traceback = readable_traceback(error, package)
