"""The batch buffer: finished groups wait in it until an exact batch can be made of them.

`buffer` is the way in; `queue` holds the groups, `rules` and `even` say what makes a batch, `oldest_first`, `token_budget` and
`splitting` choose, `subset_sum` and `quotas` are the arithmetic. All of it is synchronous and pure.
"""

from orchestrator.buffer.buffer import BatchBuffer

__all__ = ["BatchBuffer"]
