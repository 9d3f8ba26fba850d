"""The global random generators, seeded for as long as tasks are made, and put back afterwards.

Many an environment shuffles or draws its tasks with the global `random` or `numpy.random`. Inside of `seeded` these
start from the same place in every process, so one index is one problem on every server and after every restart.
Outside they are as they were: what a rollout draws stays its own, and differs between processes.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def seeded(*parts: object) -> Iterator[None]:
    """Seed from the text of the parts; other threads that draw meanwhile draw from the same generators."""
    before, before_numpy = random.getstate(), np.random.get_state()
    text = "/".join(map(str, parts))
    random.seed(text)
    np.random.seed(random.Random(text).getrandbits(32))
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(before_numpy)
