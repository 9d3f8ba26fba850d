"""An environment of OpenEnv and its app: the last digit of a number."""

import random

from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Answer(Action):
    text: str


class Question(Observation):
    text: str = ""


class LastDigit(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, **_):
        self.number = str(random.Random(seed).randrange(1000, 10_000))
        return Question(text=f"Last digit of {self.number}")

    def step(self, action: Answer, **_) -> Question:
        return Question(text="", reward=float(action.text.strip() == self.number[-1]), done=True)

    @property
    def state(self) -> State:
        return State()


app = create_fastapi_app(LastDigit, Answer, Question, max_concurrent_envs=16)
