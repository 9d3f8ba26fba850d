"""The service's side of the trainer link: `server` serves batches over ZMQ or a shared directory.

`desk` decides who gets what (no I/O), `ranks` knows who is there, `socket` is the ZMQ side, `versions` watches for
versions that appear as directories. The trainer's side, and what travels between the two, is `orchestrator.trainer`.
"""
