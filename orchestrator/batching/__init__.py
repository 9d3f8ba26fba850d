"""The parts of the batch buffer: storage, which groups come next, and the arithmetic behind it.

`orchestrator.buffer` is the only user; all of it is synchronous and pure.
"""
