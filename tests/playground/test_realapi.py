"""How the programs of a real API server are started."""

from pathlib import Path

import pytest

from playground.apiserver import User
from playground.processes import StartError
from playground.realapi import FEATURE_GATES, RUNTIME_CONFIG, real_api_server

FLAGS = {
    "--feature-gates": (FEATURE_GATES, "DRAConsumableCapacity=true,DRADeviceTaints=true"),
    "--runtime-config": (RUNTIME_CONFIG, "resource.k8s.io/v1alpha3=true"),
}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("is_set", [True, False])
def test_flag_comes_from_the_environment(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_set: bool
) -> None:
    variable, value = FLAGS[flag]
    monkeypatch.setenv(variable, value if is_set else "")
    for name, script in {"etcd": "exec sleep 60", "kube-apiserver": f'echo "$@" >{tmp_path}/flags'}.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    folder = tmp_path / "api"
    folder.mkdir()
    with pytest.raises(StartError), real_api_server(tmp_path, folder, {"t": User("admin")}):
        pass
    flags = (tmp_path / "flags").read_text().split()
    assert [one for one in flags if one.startswith(flag)] == [f"{flag}={value}"][:is_set]
