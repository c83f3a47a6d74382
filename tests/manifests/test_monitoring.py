"""Alert rules and the dashboard name existing metrics, and each alert fires exactly when it should."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import deviceplugin.metrics
import scheduler.metrics
import webhook.admission_metrics
from mgpu.serving.metrics import render_metrics
from tests.manifests.rendered import MANIFESTS, kustomization, of_kind, rendered
from tests.metrics import named_in, series

FOLDER = MANIFESTS / "monitoring"
RULES = FOLDER / "rules.yaml"
CASES: dict[str, Any] = yaml.load((Path(__file__).parent / "alerts.yaml").read_text(), yaml.BaseLoader)


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return list(group["rules"])


def expressions() -> Iterator[str]:
    """Of the rules and of the dashboard's panels and variables."""
    yield from (rule["expr"] for rule in rules())
    dashboard = json.loads((FOLDER / "grafana.json").read_text())
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ()))
    yield from (variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query")


def minutes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([mh])", text)
    assert match, text
    return int(match[1]) * (60 if match[2] == "h" else 1)


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if not found:
        pytest.skip("promtool (Prometheus) is not installed")
    return found


def checked(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_rules_and_dashboard_name_is_there() -> None:
    known = series()
    named = {name for expression in expressions() for name in named_in(expression)}
    assert len(named) > 25
    assert named - known == set()


def test_the_operators_rules_are_the_plain_ones() -> None:
    wrapped = yaml.safe_load((FOLDER / "prometheus-rule.yaml").read_text())
    assert wrapped["spec"] == yaml.safe_load(RULES.read_text())


def test_the_component_watches_every_part(tmp_path: Path) -> None:
    documents = rendered(kustomization(tmp_path, MANIFESTS / "overlays" / "second-scheduler", [FOLDER]))
    (monitor,) = of_kind(documents, "PodMonitor")
    (dashboard,) = (d for d in of_kind(documents, "ConfigMap") if d["metadata"]["name"] == "mgpu-grafana")
    assert json.loads(dashboard["data"]["mgpu.json"])["uid"] == "mgpu"
    (port,) = (endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"])
    workloads = list(of_kind(documents, "Deployment", "DaemonSet"))
    assert len(workloads) == 3
    for workload in workloads:
        template = workload["spec"]["template"]
        assert template["metadata"]["labels"].items() >= monitor["spec"]["selector"]["matchLabels"].items()
        containers = [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]
        assert port in {named.get("name") for container in containers for named in container.get("ports", ())}


def test_every_alert_has_a_case_and_says_what_to_do() -> None:
    assert [rule["alert"] for rule in rules()] == list(CASES)
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_the_rules_are_prometheus_own(promtool: str) -> None:
    assert "SUCCESS" in checked(promtool, "check", "rules", RULES)


def test_the_dashboards_expressions_can_be_evaluated(promtool: str, tmp_path: Path) -> None:
    values = {"$__rate_interval": "5m", "$model": ".*", "$node": "n1"}
    filled = [re.sub(r"\$\w+", lambda match: values[match[0]], text) for text in expressions()]
    own = [text for text in filled if not text.startswith("label_values(")]  # a function of Grafana's
    rows = [{"record": f"x:{i}", "expr": text} for i, text in enumerate(own)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rows}]}))
    checked(promtool, "check", "rules", path)


def test_alerts_fire_when_they_should_and_not_otherwise(promtool: str, tmp_path: Path) -> None:
    waits = {rule["alert"]: rule.get("for", "0m") for rule in rules()}
    tests = []
    for alert, case in CASES.items():
        firing = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
        after = minutes(case["after"])
        at = {after: True, **({minutes(waits[alert]) - 1: False} if minutes(waits[alert]) else {})}
        tests.append(_test(f"{alert} fires", case["fires"], firing, at))
        tests.append(_test(f"{alert} is quiet", case["quiet"], firing, {after: False}))
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    assert "SUCCESS" in checked(promtool, "test", "rules", path)


def _test(name: str, given: dict[str, str], expression: str, at: dict[int, bool]) -> dict[str, Any]:
    """at: minute → whether it fires."""
    one = [{"labels": "{}", "value": 1}]
    evals = [{"expr": expression, "eval_time": f"{m}m", "exp_samples": one if fires else []} for m, fires in at.items()]
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in given.items()],
        "promql_expr_test": evals,
    }


def test_the_pages_are_as_prometheus_wants_it(promtool: str) -> None:
    for registry in (scheduler.metrics.REGISTRY, deviceplugin.metrics.REGISTRY, webhook.admission_metrics.REGISTRY):
        own = "\n".join(line for line in render_metrics(registry).decode().splitlines() if "process_" not in line)
        command = [promtool, "check", "metrics"]
        done = subprocess.run(command, input=f"{own}\n", capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
