"""Bridges to trainers that speak another protocol: each is a client of the public trainer link, and nothing else of ours.

`intake` takes batches ahead and acknowledges those that the foreign trainer is done with; `atropos` serves them over HTTP as
Atropos does, `prime_rl` writes them to files as prime-rl's orchestrator does. A batch is acknowledged to the
orchestrator only when the foreign trainer is done with it, and what it was given is known after a restart: a bridge may be killed
at any time. `orchestrator bridge` starts them.
"""
