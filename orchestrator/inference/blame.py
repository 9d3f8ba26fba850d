"""Whether a failed rollout speaks against the endpoint that it ran on: decided here, by the kind of failure.

An environment's own exceptions, and requests that no server could answer, never do. Failures that do make the
endpoint suspect when they come in a row, and the kind also says what clears it again.
"""

from collections.abc import Mapping
from enum import StrEnum

from envs.errors import FailureKind


class Blame(StrEnum):
    """What a kind of failure says about the endpoint."""

    NOT_THE_ENDPOINT = "not_the_endpoint"  # the request, the policy or the environment
    NO_PROGRESS = "no_progress"  # it may just be full: counters that move clear it, or a probe
    NO_ANSWER = "no_answer"  # only a proper chat completion clears it, whatever its counters do
    NO_TOKEN_IDS = "no_token_ids"  # noqa: S105  # only a completion with token ids clears it


_BLAME: Mapping[str, Blame] = {
    FailureKind.CONNECTION: Blame.NO_ANSWER,
    FailureKind.OVERLOADED: Blame.NO_PROGRESS,
    FailureKind.SERVER_ERROR: Blame.NO_ANSWER,
    FailureKind.BAD_RESPONSE: Blame.NO_ANSWER,
    FailureKind.UNKNOWN_MODEL: Blame.NO_ANSWER,
    FailureKind.UNAUTHORIZED: Blame.NO_ANSWER,
    FailureKind.NO_TOKEN_IDS: Blame.NO_TOKEN_IDS,
    "timed_out": Blame.NO_PROGRESS,  # by the rollout's own deadline; slow tools look the same
    # Our own weight updates abort requests, and an engine that stops is seen by its health checks.
    FailureKind.ABORTED: Blame.NOT_THE_ENDPOINT,
    FailureKind.BAD_REQUEST: Blame.NOT_THE_ENDPOINT,
    FailureKind.NOT_TEXT: Blame.NOT_THE_ENDPOINT,
    FailureKind.CONTEXT_LENGTH: Blame.NOT_THE_ENDPOINT,
    FailureKind.EMPTY_COMPLETION: Blame.NOT_THE_ENDPOINT,
}


def blame(kind: str) -> Blame:
    """What a failure of this kind says; kinds that are not known here are an environment's own."""
    return _BLAME.get(kind, Blame.NOT_THE_ENDPOINT)
