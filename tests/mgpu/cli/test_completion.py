"""Completion of `kubectl mgpu` and `mgpu` on the command line."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from mgpu.cli import completion, completion_command
from mgpu.cli.completion_command import complete, completion_variable
from mgpu.cli.kubectl import plugin
from mgpu.cli.main import SUMMARIES, main
from mgpu.kube import kubeconfig as kubeconfig_file
from tests.mgpu.cli.served import served
from tests.scheduler.explained_cluster import fill


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("api"), fill) as kubeconfig:
        yield kubeconfig


@pytest.fixture(autouse=True)
def use_it(kubeconfig: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", kubeconfig)


def words(*line: str) -> list[str]:
    found = ShellComplete(plugin, {}, "kubectl mgpu", "").get_completions(list(line[:-1]), line[-1])
    return [str(item.value) for item in found]


def test_commands_and_options_are_completed() -> None:
    assert words("") == ["inspect", "explain", "top", "doctor", "completion"]
    assert words("ex") == ["explain"]
    assert words("top", "--request") == ["--request-timeout"]
    assert words("inspect", "-o", "") == ["table", "wide", "json", "yaml", "name"]
    assert words("top", "--sort=me") == ["memory"]


def test_completing_a_command_imports_no_command() -> None:
    code = "import sys; from mgpu.cli import main, completion_command as c; c.complete(main.main, ['']); "
    code += "print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    *lines, modules = done.stdout.splitlines()
    assert f"webhook\t{SUMMARIES['webhook']}" in lines
    assert not {"kubernetes", "flask", "webhook.main", "scheduler.main"} & set(modules.split())


def test_nodes_are_completed_without_those_of_the_line() -> None:
    assert words("inspect", "") == ["n1", "n2", "n3"]
    assert words("inspect", "n2", "n") == ["n1", "n3"]
    assert words("explain", "x", "--node", "n") == ["n1", "n2", "n3"]


def test_pods_types_and_objects_of_a_type_are_completed() -> None:
    assert words("explain", "t") == ["too-large", "two"]
    assert words("explain", "mt") == ["mtgpupod/"]
    assert words("explain", "mtgpupod/") == ["mtgpupod/notebook"]
    assert words("explain", "mtgpupod", "") == ["notebook"]
    assert words("explain", "pod/ho") == ["pod/holder"]
    assert words("explain", "job/") == []
    assert words("explain", "too-large", "") == []


def test_objects_are_those_of_the_namespace_and_the_kubeconfig_of_the_line(tmp_path: Path) -> None:
    assert words("explain", "-n", "other", "t") == []
    assert words("explain", "--kubeconfig", str(tmp_path / "none"), "t") == []


def test_namespaces_and_contexts_are_completed() -> None:
    assert "default" in words("explain", "-n", "")
    assert words("top", "--context", "mgpu") == ["mgpu-playground"]


@pytest.mark.parametrize("name", ["$(touch x)", "`x`", "a;x", "a b", "*", "--config=x", "a'b", "a\x1b[2J", "a\nb", ""])
def test_only_names_that_a_shell_takes_literally_are_completed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bash inserts a word as it is, so a hostile API server could write a command into the line of the user."""
    monkeypatch.setattr(completion, "_list_names", lambda *_: ["n1", name])
    assert words("inspect", "") == ["n1"]
    monkeypatch.setattr(kubeconfig_file, "context_names", lambda _: ["a:b/c@d", name])
    assert words("top", "--context", "") == ["a:b/c@d"]


def test_server_that_does_not_answer_gives_no_completion(
    tmp_path: Path, kubeconfig: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    server = next(line for line in Path(kubeconfig).read_text().splitlines() if "server:" in line)
    (tmp_path / "dead").write_text(Path(kubeconfig).read_text().replace(server, "    server: https://127.0.0.1:1"))
    for file in (tmp_path / "dead", tmp_path / "missing"):
        monkeypatch.setenv("KUBECONFIG", str(file))
        assert words("inspect", "") == []
    assert capfd.readouterr() == ("", "")


def test_kubectl_gets_a_line_for_each_word_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    complete(plugin, ["to"])
    assert capsys.readouterr().out == f"top\t{SUMMARIES['top']}\n:4\n"
    complete(plugin, ["inspect", "--kubeconfig", ""])
    assert capsys.readouterr().out == ":0\n"
    complete(plugin, [])
    assert capsys.readouterr().out.endswith("\n:4\n")


def test_program_for_kubectl_and_the_hidden_command_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mgpu.cli import kubectl

    monkeypatch.setattr(sys, "argv", ["kubectl_complete-mgpu", "inspect", "n1", ""])
    completion_command.main()
    monkeypatch.setattr(sys, "argv", ["kubectl-mgpu", "__complete", "inspect", "n1", ""])
    kubectl.main()
    assert capsys.readouterr().out == "n2\nn3\n:4\n" * 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_call_the_program_under_its_own_name(shell: str) -> None:
    for program, name in ((main, "mgpu"), (plugin, "kubectl mgpu")):
        script = CliRunner().invoke(program, ["completion", shell], prog_name=name)
        assert script.exit_code == 0
        dashed = name.replace(" ", "-")
        assert f"{completion_variable(dashed)}={shell}_complete" in script.stdout
        assert dashed in script.stdout


def test_script_for_kubectl_calls_the_plugin() -> None:
    script = CliRunner().invoke(plugin, ["completion", "kubectl"]).stdout
    assert script.startswith("#!/bin/sh\n")
    assert 'exec kubectl-mgpu __complete "$@"\n' in script
