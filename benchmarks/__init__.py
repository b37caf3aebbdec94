"""Benchmarks: every comparison in one launch, exact counts beside ratios. See README.md in this folder."""
