"""Runs the benchmarks of `make bench`, one section after the other."""

from importlib import import_module

SECTIONS = [
    "bench.placement",
    "bench.hard",
    "bench.slices",
    "bench.cutting",
    "bench.admission",
    "bench.filter",
    "bench.binding",
    "bench.tenants",
    "bench.startup",
    "bench.learning",
    "bench.page",
    "bench.allocate",
    "bench.starts",
    "bench.endtoend",
]

if __name__ == "__main__":
    for section in SECTIONS:
        print(f"\n== {section} ==", flush=True)
        import_module(section).main()
