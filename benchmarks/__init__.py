"""Benchmarks: one command prints every figure, with its peer or bare limit beside it where there is one."""
