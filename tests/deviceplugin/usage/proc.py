"""A folder like /proc for tests."""

from pathlib import Path


def uid(n: int) -> str:
    """The UID of the pod number n."""
    return f"{n:08x}-0000-4000-8000-000000000000"


def container_id(n: int) -> str:
    return f"{n:064x}"


def path_of(pod: int, container: int) -> str:
    return f"/kubepods/burstable/pod{uid(pod)}/{container_id(container)}"


class Proc:
    """The processes of a host as an agent in a container sees them with `hostPID`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("1", "/init.scope")
        self.write("self", path_of(0xA6E27, 0xA6E27))

    def write(self, name: str, cgroup: str, started: int = 0) -> None:
        at = self.folder / name
        at.mkdir(parents=True, exist_ok=True)
        (at / "cgroup").write_text(f"0::{cgroup}\n")
        (at / "stat").write_text(f"{name} (a) b) R{' 1' * 18} {started}{' 0' * 30}\n")

    def run(self, pid: int, pod: int, container: int, started: int = 0) -> None:
        self.write(str(pid), path_of(pod, container), started)

    def end(self, pid: int) -> None:
        for file in (self.folder / str(pid)).iterdir():
            file.unlink()
        (self.folder / str(pid)).rmdir()
