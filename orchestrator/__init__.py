"""Rollout orchestrator: feeds a trainer with batches of exactly the asked size.

Importing this package starts nothing and imports nothing heavy; `orchestrator.trainer` needs only pyzmq,
msgspec and numpy, so that a trainer can use it without the rest.
"""

__version__ = "0.1.0"
