"""Which task comes next: the stream of each training environment, and what an evaluation still has to try. Pure."""
