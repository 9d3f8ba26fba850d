"""What people and machines see of a run: `progress` in a terminal, `metrics` for Prometheus, `http`. All read the status."""
