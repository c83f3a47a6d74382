"""`mgpu simulate` with ResourceClaims: where they go, what holds cards already, and which input is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mgpu.cli.main import main
from tests.builders import pod, share
from tests.playground.simulate.simulation import run, served, simulated

API = "resource.k8s.io/v1"
ROOT = Path(__file__).parents[3]
DOCUMENTED = re.findall(
    r"^```\n\$ mgpu (simulate examples/\S+)\n(.*?)^```", (ROOT / "docs/dra.md").read_text(), re.MULTILINE | re.DOTALL
)
NUMA = "gpu.mgpu.io/numa"


def exactly(**fields: Any) -> dict[str, Any]:
    """Return a request for 30 percent and 8 GiB of a card, except for these fields."""
    base = {"deviceClassName": "mgpu", "capacity": {"requests": {"cores": "30", "memory": "8Gi"}}}
    return {key: value for key, value in {**base, **fields}.items() if value is not None}


def template(name: str = "t", *requests: dict[str, Any], **devices: Any) -> dict[str, Any]:
    rows = list(requests) or [{"name": "gpu", "exactly": exactly()}]
    spec = {"spec": {"devices": {"requests": rows, **devices}}}
    return {"apiVersion": API, "kind": "ResourceClaimTemplate", "metadata": {"name": name}, "spec": spec}


def claim(name: str = "c", card: int | None = None, node: str = "n1", **meta: Any) -> dict[str, Any]:
    """Return a claim for 30 percent and 8 GiB, which is allocated if a card is given."""
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly()}]}}
    raw = {"apiVersion": API, "kind": "ResourceClaim", "metadata": {"name": name, **meta}, "spec": spec}
    if card is None:
        return raw
    place = {"request": "gpu", "driver": "gpu.mgpu.io", "pool": node, "device": f"card-{card}"}
    result = {**place, "consumedCapacity": {"cores": "30", "memory": "8Gi"}}
    return {**raw, "status": {"allocation": {"devices": {"results": [result]}}}}


def device_class(name: str, expression: str) -> dict[str, Any]:
    spec = {"selectors": [{"cel": {"expression": expression}}]}
    return {"apiVersion": API, "kind": "DeviceClass", "metadata": {"name": name}, "spec": spec}


def user(name: str, *, of: str = "t", named: str = "", request: str = "", node: str = "") -> dict[str, Any]:
    """Return a pod that uses a claim from the template `of`, or the claim `named`."""
    source = {"resourceClaimName": named} if named else {"resourceClaimTemplateName": of}
    own = {
        "name": "c",
        "image": "x",
        "resources": {"claims": [{"name": "gpu"} | ({"request": request} if request else {})]},
    }
    raw = pod(name, own, node=node)
    raw["spec"]["resourceClaims"] = [{"name": "gpu", **source}]
    return raw


def cards(row: dict[str, Any]) -> list[int]:
    found: list[int] = row["containers"]["c"]["cards"]
    return found


def test_share_is_next_to_a_pod_and_its_container_sees_the_card() -> None:
    found = simulated(served(), share("classic"), template(), user("p"))
    classic, row = found["pods"]
    assert cards(classic) == cards(row) == [0]
    assert "claims" not in classic
    assert (row["dialect"], row["annotations"]) == ("dra", {})
    consumed = {"cores": "30", "memory": "8Gi"}
    results = [{"request": "gpu", "device": "card-0", "consumedCapacity": consumed}]
    assert row["claims"] == [{"name": "p-gpu", "node": "n1", "results": results}]
    assert row["containers"]["c"]["env"] == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-n1-0",
        "MGPU_CARDS": "0",
        "MGPU_CORE_PERCENT": "30",
        "MGPU_MEMORY_BYTES": str(8 << 30),
    }
    assert found["nodes"]["n1"]["cards"][0]["core"]["used"] == 80
    assert "claim default/p-gpu/gpu" in found["nodes"]["n1"]["cards"][0]["holders"]
    assert row["patch"][0]["value"]["requests"] == {"mgpu.io/claims": "0"}


def test_text_shows_claim_results_and_environment() -> None:
    text = run("-", objects=[served(), template(), user("p")]).stdout
    assert "default/p   n1   c on card 0" in text
    assert "claim p-gpu: gpu on card-0 (cores 30, memory 8Gi)" in text
    assert "c sees NVIDIA_VISIBLE_DEVICES=GPU-n1-0 MGPU_CARDS=0" in text


def test_claim_of_several_pods_counts_once_and_fixes_their_node() -> None:
    first, second = (user(name, named="c") for name in ("a", "b"))
    found = simulated(served("n1"), served("n2"), claim(), first, second)
    assert [row["node"] for row in found["pods"]] == ["n1", "n1"]
    assert found["pods"][1]["rejections"] == {"n2": "its ResourceClaim c is allocated on n1"}
    assert found["nodes"]["n1"]["cards"][0]["core"]["used"] == 30


def test_allocated_claim_holds_its_card_and_unknown_cards_are_noted() -> None:
    result = run("-", "-o", "json", objects=[served(), claim("a", 1), claim("b", 7)])
    assert '"claim default/a/gpu"' in result.stdout
    assert "claim default/b: its allocation names card 7" in result.stderr


def test_claims_of_a_running_pod_without_an_allocation_are_allocated_on_its_node() -> None:
    result = run(
        "-", "-o", "json", objects=[served(), template(), user("p", node="n1"), user("q", of="gone", node="n1")]
    )
    assert '"claim default/p-gpu/gpu"' in result.stdout
    assert result.stderr == (
        "pod default/q: its claims hold no cards on n1: ResourceClaimTemplate default/gone does not exist\n"
    )


def test_claim_that_is_in_the_status_of_its_pod_is_found() -> None:
    raw = user("p")
    raw["status"] = {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "p-gpu-x7k2p"}]}
    (row,) = simulated(served(), claim("p-gpu-x7k2p", 1), raw)["pods"]
    assert (row["claims"][0]["name"], cards(row)) == ("p-gpu-x7k2p", [1])


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (user("p", named="gone"), "ResourceClaim default/gone does not exist"),
        (user("p", of="gone"), "ResourceClaimTemplate default/gone does not exist"),
    ],
)
def test_pod_waits_for_a_claim_that_does_not_exist(raw: dict[str, Any], reason: str) -> None:
    (row,) = simulated(served(), raw)["pods"]
    assert (row["node"], row["rejections"]) == (None, {"n1": reason})


def test_requests_of_a_claim_belong_to_containers() -> None:
    rows = [{"name": name, "exactly": exactly(capacity={"requests": {"cores": "60"}})} for name in ("a", "b")]
    by_request = [simulated(served(), template("t", *rows), user("p", request=name))["pods"][0] for name in ("a", "b")]
    assert [cards(row) for row in by_request] == [[0], [1]]
    assert cards(simulated(served(), template("t", *rows), user("p"))["pods"][0]) == [0, 1]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"count": 2}, [0, 1]),
        ({"allocationMode": "All"}, [0, 1]),
        ({"capacity": None}, [1]),
        ({"capacity": {"requests": {"cores": "60"}}}, [1]),
        ({"capacity": {"requests": {"memory": "1Gi"}}}, [1]),
        ({"selectors": [{"cel": {"expression": 'device.attributes["gpu.mgpu.io"].index > 0'}}]}, [1]),
    ],
)
def test_what_a_request_gets_beside_a_pod_on_card_0(fields: dict[str, Any], expected: list[int]) -> None:
    rows = {"name": "gpu", "exactly": exactly(**fields)}
    found = simulated(served(), share("classic"), template("t", rows), user("p"))["pods"]
    assert cards(found[1]) == expected


def test_request_for_two_cards_waits_where_only_one_has_room() -> None:
    """As with kube-scheduler, one card never serves a request for two, although it has room for both shares."""
    rows = {"name": "gpu", "exactly": exactly(count=2)}
    whole = pod("whole", {"name": "c", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "1"}}})
    (_, row) = simulated(served(), whole, template("t", rows), user("p"))["pods"]
    assert row["rejections"] == {"n1": "request gpu needs 2 different cards, and too few can take it"}


@pytest.mark.parametrize(
    ("requested", "consumed"),
    [(("500m", "1500Ki"), ("1", "2Mi")), (("0", "2Gi"), ("0", "2Gi")), (("5", "0"), ("5", "1Mi"))],
)
def test_amounts_are_rounded_up_to_what_kube_scheduler_consumes(
    requested: tuple[str, str], consumed: tuple[str, str]
) -> None:
    amounts = dict(zip(("cores", "memory"), requested, strict=True))
    rows = {"name": "gpu", "exactly": exactly(capacity={"requests": amounts})}
    (row,) = simulated(served(), template("t", rows), user("p"))["pods"]
    assert tuple(row["claims"][0]["results"][0]["consumedCapacity"].values()) == consumed


def test_alternatives_are_tried_in_their_order() -> None:
    large, small = exactly(capacity={"requests": {"cores": "80"}}), exactly()
    rows = {"name": "gpu", "firstAvailable": [{"name": "large", **large}, {"name": "small", **small}]}
    used = [share(f"classic-{i}") for i in range(3)]
    found = simulated(served(), used[0], template("t", rows), *(user(f"p{i}") for i in range(3)))["pods"][1:]
    assert [row["claims"][0]["results"][0]["request"] if row["claims"] else None for row in found[:2]] == [
        "gpu/large",
        "gpu/small",
    ]
    assert found[2]["node"] is None


def test_constraints_hold_between_requests() -> None:
    near = [{"model": "A100", "memory": "80Gi", "numa": numa} for numa in (0, 1, 1)]
    rows = [{"name": name, "exactly": exactly(capacity={"requests": {"cores": "60"}})} for name in ("a", "b")]
    objects = [served(cards=near), template("t", *rows, constraints=[{"matchAttribute": NUMA}]), user("p")]
    assert cards(simulated(*objects)["pods"][0]) == [1, 2]
    objects[1] = template("t", *rows, constraints=[{"distinctAttribute": NUMA}])
    assert cards(simulated(*objects)["pods"][0]) == [0, 1]


def test_annotation_of_a_template_chooses_the_policy() -> None:
    spread = template()
    spread["spec"]["metadata"] = {"annotations": {"mgpu.io/card-policy": "spread"}}
    found = simulated(served(), spread, user("a"), user("b"))["pods"]
    assert [cards(row) for row in found] == [[0], [1]]


def test_class_of_another_driver_gets_no_card_of_mgpu() -> None:
    other = device_class("nic", 'device.driver == "nic.example.com"')
    rows = {"name": "gpu", "exactly": {"deviceClassName": "nic"}}
    (row,) = simulated(served(), other, template("t", rows), user("p"))["pods"]
    assert 'selector device.driver == "nic.example.com" is false' in row["rejections"]["n1"]


def test_classes_of_the_input_replace_those_of_the_manifests() -> None:
    large = device_class("large", 'device.driver == "gpu.mgpu.io"')
    (row,) = simulated(served(), large, template(), user("p"))["pods"]
    assert "there is no DeviceClass mgpu" in row["rejections"]["n1"]


def test_whole_cards_by_their_old_name_are_a_claim_where_no_plugin_serves_them() -> None:
    theirs = served()
    theirs["metadata"]["labels"]["mgpu.io/whole-cards"] = "dra"
    whole = pod("whole", {"name": "c", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "1"}}})
    _, row, more = simulated(theirs, share("classic"), whole, {**whole, "metadata": {"name": "more"}})["pods"]
    assert (row["node"], row["dialect"], row["annotations"], cards(row)) == ("n1", "koordinator", {}, [1])
    (held,) = row["claims"]
    assert held["name"] == "whole-extended-resources"
    assert held["results"][0]["consumedCapacity"] == {"cores": "100", "memory": "80Gi"}
    assert row["containers"]["c"]["env"]["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"
    assert "2 in use, but a whole card is requested" in more["rejections"]["n1"]
    other = device_class("other", 'device.driver == "gpu.mgpu.io"')
    (row,) = simulated(theirs, other, whole)["pods"]
    assert row["rejections"] == {"n1": "no DeviceClass stands for nvidia.com/gpu"}


def test_pod_with_a_claim_and_a_request_of_its_own_gets_both() -> None:
    raw = user("p")
    raw["spec"]["containers"].append({**share("x", core=90)["spec"]["containers"][0], "name": "own"})
    (row,) = simulated(served(), template(), raw)["pods"]
    assert (cards(row), row["containers"]["own"]["cards"]) == ([0], [1])


def test_labeled_pod_is_converted_where_the_settings_say_so(tmp_path: Path) -> None:
    settings = tmp_path / "mgpu.yaml"
    settings.write_text("dra: {enabled: true, convert: true}")
    raw = share("p")
    raw["metadata"]["labels"] = {"mgpu.io/dra": "convert"}
    (row,) = simulated(served(), raw, options=("--config", str(settings)))["pods"]
    assert (row["dialect"], row["annotations"], cards(row)) == ("dra", {}, [0])
    assert row["claims"][0]["results"][0]["request"] == "c"
    assert (row["containers"]["c"]["core"], row["containers"]["c"]["memory"]) == ([50], [1 << 30])
    raw["spec"]["containers"][0]["resources"] = {"limits": {"koordinator.sh/gpu": "50"}}
    (row,) = simulated(served(), raw, options=("--config", str(settings)))["pods"]
    assert "convertCardMemory" in row["denied"][0]["message"]
    (row,) = simulated(served(), raw)["pods"]
    assert row["dialect"] == "koordinator"


def test_container_with_several_claims_is_noted() -> None:
    raw = user("p")
    raw["spec"]["resourceClaims"].append({"name": "more", "resourceClaimTemplateName": "t"})
    raw["spec"]["containers"][0]["resources"]["claims"].append({"name": "more"})
    result = run("-", "-o", "json", objects=[served(), template(), raw])
    assert result.stderr.startswith("pod default/p: container c uses several claims")
    assert json.loads(result.stdout)["nodes"]["n1"]["cards"][0]["core"]["used"] == 60


def test_invalid_reference_to_a_claim_denies_the_pod() -> None:
    raw = user("p")
    raw["spec"]["containers"][0]["resources"]["claims"] = [{"name": "odd"}]
    (row,) = simulated(served(), template(), raw)["pods"]
    assert row["denied"][0]["field"] == "spec.containers[0].resources.claims[0]"
    raw["spec"]["resourceClaims"] = {"name": "gpu"}
    (row,) = simulated(served(), template(), raw)["pods"]
    assert row["denied"][0] == {"field": "spec.resourceClaims", "message": "must be a list"}


DEVICES = "spec.devices"
REQUEST = f"{DEVICES}.requests[0]"


def with_request(row: Any) -> dict[str, Any]:
    return {**claim(), "spec": {"devices": {"requests": [row]}}}


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        ({**claim(), "apiVersion": "resource.k8s.io/v1beta1"}, "apiVersion: must be resource.k8s.io/v1, not "),
        ({**claim(), "metadata": {}}, "metadata.name: is missing"),
        ({**claim(), "spec": {"devices": []}}, f"{DEVICES}: must be an object"),
        ({**claim(), "spec": {"devices": {"requests": {}}}}, f"{DEVICES}.requests: must be a list"),
        (with_request("gpu"), f"{REQUEST}: must be an object"),
        (with_request({"name": "gpu"}), f"{REQUEST}: Required value: exactly one of `exactly` or `firstAvailable`"),
        (with_request({"name": "G", "exactly": exactly()}), f"{REQUEST}.name: Invalid value"),
        (with_request({"name": "gpu", "exactly": exactly(count="2")}), f"{REQUEST}.exactly.count: must be an integer"),
        (with_request({"name": "gpu", "exactly": exactly(count=-1)}), f"{REQUEST}.exactly.count: Invalid value"),
        (with_request({"name": "gpu", "exactly": exactly(cores="3")}), f"{REQUEST}.exactly.cores: unknown field; "),
        (
            with_request({"name": "gpu", "exactly": exactly(deviceClassName=None)}),
            f"{REQUEST}.exactly.deviceClassName: Required value",
        ),
        (
            with_request({"name": "gpu", "exactly": exactly(capacity={"requests": {"cores": "x"}})}),
            f"{REQUEST}.exactly.capacity.requests[cores]: ",
        ),
        (
            with_request({"name": "gpu", "exactly": exactly(capacity={"requests": {"vram": "1"}})}),
            f"{REQUEST}.exactly.capacity.requests[vram]: a card of mgpu has only the capacities cores and memory",
        ),
        (
            with_request({"name": "gpu", "exactly": exactly(selectors=[{"cel": {"expression": "1 +"}}])}),
            f"{REQUEST}.exactly.selectors[0].cel.expression: Invalid value",
        ),
        ({**template(), "spec": {"spec": {"devices": {"requests": 1}}}}, "spec.spec.devices.requests: must be a list"),
        (template("t", constraints=[{"matchAttribute": "numa"}]), "spec.spec.devices.constraints[0].matchAttribute: "),
        (device_class("mgpu", "device."), "spec.selectors[0].cel.expression: Invalid value"),
        (
            claim(annotations={"mgpu.io/card-policy": "wat"}),
            "metadata.annotations[mgpu.io/card-policy]: must be one of binpack",
        ),
        (claim("c", 0, node="gone"), "status.allocation.devices.results[0].pool: no node is named 'gone'"),
    ],
)
def test_malformed_claim_names_document_and_field(raw: dict[str, Any], error: str) -> None:
    result = run("-", objects=[served(), raw])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"<stdin>: document 2: {error}"), result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(("command", "output"), DOCUMENTED, ids=[command for command, _ in DOCUMENTED])
def test_outputs_in_the_page_for_users_are_right(command: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page omits the map of the cards, which an empty line precedes."""
    monkeypatch.chdir(ROOT)
    stdout = CliRunner(env={"COLUMNS": "118"}).invoke(main, command.split()).stdout
    assert [line.rstrip() for line in stdout.partition("\n\n")[0].splitlines()] == output.splitlines()


def test_every_example_with_claims_is_in_the_page_for_users() -> None:
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "examples/simulate").glob("claim-*.yaml")}
    assert {command.split()[1] for command, _ in DOCUMENTED} == files


def test_two_claims_of_one_name_are_an_error() -> None:
    result = run("-", objects=[claim(), claim()])
    assert result.stderr == "<stdin>: document 2: metadata.name: a ResourceClaim named default/c exists already\n"
