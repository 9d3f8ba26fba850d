"""Where ended groups go: `train_sink` makes batches of them, `eval_sink` results. Pure."""
