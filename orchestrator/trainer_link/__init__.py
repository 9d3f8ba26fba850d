"""The service's end of the trainer link; what a trainer imports is `orchestrator.trainer`.

`server` serves batches over ZMQ (`socket`) or a shared directory (`files`), `leases` decides who gets what (no I/O), `held` has the batches, `ranks`
knows who is there, `announcements` and `publications` hear of versions, `encoding` and `partition` turn a batch into a rank's
bytes, `versions` watches for versions that appear as directories, `thinning` keeps a stranger from filling the log.
"""
