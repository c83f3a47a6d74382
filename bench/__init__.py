"""Benchmarks. `make bench` runs most of them, and `python -m bench.<section>` runs one."""
