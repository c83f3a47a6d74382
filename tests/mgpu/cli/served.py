"""A playground API server for tests of commands."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mgpu.kube import Api
from playground.apiserver import ApiServer, User, running, self_signed, write_kubeconfig

ON_A_TERMINAL = {"TTY_COMPATIBLE": "1", "TERM": "dumb"}
"""The environment in which a command takes its output for a terminal of 80 columns without colours."""


@contextmanager
def served(folder: Path, *fill: Callable[[Api], object]) -> Iterator[str]:
    """Run an API server, create its objects with `fill`, and yield an administrator's kubeconfig."""
    tls, kubeconfig = self_signed(folder), folder / "kubeconfig"
    with running(ApiServer(tokens={"admin": User("admin", ("system:masters",))}), tls=tls) as url:
        write_kubeconfig(kubeconfig, url, Path(tls[0]).read_bytes(), "admin")
        api = Api.connect(str(kubeconfig))
        for step in fill:
            step(api)
        api.close()
        yield str(kubeconfig)
