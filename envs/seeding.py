"""The global random generators, seeded for as long as tasks are made, and on their own way again afterwards.

Many an environment shuffles or draws its tasks with the global `random` or `numpy.random`. Inside of `seeded` these
start from the same place in every process, so one index is one problem on every server and after every restart.
Afterwards they are seeded with a number that they drew before: what a rollout draws stays its own, and differs between
processes. (To save and restore numpy's state would cost ten times as much, and this is done for every request.)
"""

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def seeded(*parts: object) -> Iterator[None]:
    """Seed from the text of the parts; other threads that draw meanwhile draw from the same generators."""
    own, own_numpy = random.getrandbits(64), int(np.random.random_sample() * (1 << 32))
    text = "/".join(map(str, parts))
    random.seed(text)
    np.random.seed(zlib.crc32(text.encode("utf-8", "surrogatepass")))
    try:
        yield
    finally:
        random.seed(own)
        np.random.seed(own_numpy)
