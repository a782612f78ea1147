"""What is computed from a run's events; `dbench.metrics` is the front door."""
