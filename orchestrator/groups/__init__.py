"""Groups and batches: what is scored, queued, recorded and trained on. Pure."""
