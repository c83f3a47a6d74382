"""Benchmarks: `make bench`, or `python -m bench.<section>` for one."""
