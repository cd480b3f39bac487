"""Real models, one idiom a file; each has `workload(size) -> Workload`."""
