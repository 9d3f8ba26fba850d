"""Environments made of a dataset and a configuration, without Python: `dataset::<file>`.

`rows` reads files, `splits` shares them out, `template` writes prompts, `scoring` names the scorers, `environment`
joins them. Code and mathematics of a reply are judged in other processes: `confined` and `aside`.
`read_rows` is for environments of your own that only need the rows.
"""

from envs.dataset.rows import read_rows
from envs.dataset.scoring import Score, Scorer

__all__ = ["Score", "Scorer", "read_rows"]
