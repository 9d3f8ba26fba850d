"""What an environment author needs: the SDK, the server that hosts an environment, and its wire format.

Importing this package stays light (numpy and msgspec): the HTTP client, the server and the adapters are
imported by those who use them.
"""

from envs.environment import Environment, Task, Tasks, is_group_scored
from envs.errors import EnvironmentLoadError, FailureKind, RolloutFailure
from envs.model import Model, ModelSettings, Reply
from envs.rollout import InvalidRolloutError, Rollout, Sequence
from envs.tools import ToolChat, chat_with_tools

__all__ = [
    "Environment",
    "EnvironmentLoadError",
    "FailureKind",
    "InvalidRolloutError",
    "Model",
    "ModelSettings",
    "Reply",
    "Rollout",
    "RolloutFailure",
    "Sequence",
    "Task",
    "Tasks",
    "ToolChat",
    "chat_with_tools",
    "is_group_scored",
]
