"""Runs of the benchmark as objects and as lines of JSON, and the file that keeps one line for each run.

`python -m bench` appends to the file. `bench.comparison` reads what a run of another commit prints, and
`docs/pictures/performance.py` draws runs.
"""

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from bench.rows import Options, Row

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Measured:
    """The rows of one section. `skipped` says why there are none."""

    section: str
    rows: tuple[Row, ...] = ()
    skipped: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the benchmark.

    Attributes:
        dirty: Whether the checkout had changes that are not in the commit.
    """

    commit: str
    dirty: bool
    ended: str
    machine: str
    python: str
    quick: bool
    sections: tuple[Measured, ...]


def new_run(options: Options, sections: tuple[Measured, ...]) -> Run:
    """Return a run of this checkout on this machine, which ends now."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    commit, dirty = _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--untracked-files=no"))
    return Run(commit, dirty, now, machine(), platform.python_version(), options.quick, sections)


def machine() -> str:
    """Return the number and the model of the processors that this process may use, and the operating system."""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} × {_processor()}, {platform.system()} {platform.release()}"


def history_file() -> Path:
    """Return MGPU_BENCH_HISTORY, or a file of this checkout that git ignores."""
    return Path(os.environ.get("MGPU_BENCH_HISTORY") or ROOT / "bench" / "history.jsonl")


def append(file: Path, run: Run) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as lines:
        lines.write(to_json(run) + b"\n")


def read(file: Path) -> list[Run]:
    """Return the runs of a file, the oldest first."""
    return [from_json(line) for line in file.read_bytes().splitlines()]


def to_json(run: Run) -> bytes:
    return orjson.dumps(asdict(run))


def from_json(line: bytes | str) -> Run:
    raw: dict[str, Any] = orjson.loads(line)
    sections = tuple(Measured(**{**one, "rows": tuple(Row(**row) for row in one["rows"])}) for one in raw["sections"])
    return Run(**{**raw, "sections": sections})


def _git(*arguments: str) -> str:
    """Return what git says of this checkout, or nothing if it is not a checkout."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
