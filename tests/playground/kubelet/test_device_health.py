"""The health of the devices of DRA drivers."""

from playground.kubelet.claim_checkpoint import ClaimState, PreparedDevice
from playground.kubelet.device_health import DeviceHealth, Report, claim_rows
from proto import dra_health_pb2 as api
from tests.clock import Clock


def _row(device: str, health: "api.HealthStatus", *, seconds: int = 0, message: str = "") -> api.DeviceHealth:
    return api.DeviceHealth(
        device=api.DeviceIdentifier(pool_name="n1", device_name=device),
        health=health,
        health_check_timeout_seconds=seconds,
        message=message,
    )


def test_report_counts_for_the_seconds_that_the_driver_says() -> None:
    clock = Clock(0.0)
    health = DeviceHealth(lambda: None, clock)
    health.update("d", [_row("a", api.HEALTHY, seconds=60), _row("b", api.UNHEALTHY)])
    clock.now = 31.0
    assert health.report("d", "n1", "a").health == "Healthy"
    assert health.report("d", "n1", "b") == Report()  # 30 s is the default


def test_change_is_reported_once() -> None:
    changes: list[int] = []
    health = DeviceHealth(lambda: changes.append(1))
    health.update("d", [_row("a", api.HEALTHY)])
    health.update("d", [_row("a", api.HEALTHY)])
    health.update("d", [_row("a", api.UNHEALTHY)])
    assert len(changes) == 2


def test_devices_are_unknown_when_the_stream_has_ended() -> None:
    health = DeviceHealth(lambda: None)
    health.update("d", [_row("a", api.HEALTHY)])
    health.clear("d")
    assert health.report("d", "n1", "a").health == "Unknown"


def test_long_message_is_cut() -> None:
    health = DeviceHealth(lambda: None)
    health.update("d", [_row("a", api.UNHEALTHY, message="x" * 2000)])
    assert health.report("d", "n1", "a").message == "x" * 1021 + "..."


def test_rows_name_the_claim_and_the_request_of_a_container() -> None:
    health = DeviceHealth(lambda: None)
    health.update("d", [_row("a", api.HEALTHY), _row("b", api.UNHEALTHY, message="hot")])
    devices = (PreparedDevice("n1", "a", requests=("r",), cdi=("v/c=a",)), PreparedDevice("n1", "b", requests=("s",)))
    state = ClaimState("uid", "claim", "default", drivers={"d": devices})
    entries = [{"name": "gpu", "resourceClaimName": "claim"}]
    wanted = [{"name": "gpu"}, {"name": "gpu", "request": "s"}]
    container = {"name": "c", "resources": {"claims": wanted}}
    pod = {"metadata": {"name": "p", "namespace": "default"}, "spec": {"resourceClaims": entries}}
    first = {"resourceID": "v/c=a", "health": "Healthy"}
    second = {"resourceID": "d/n1/b", "health": "Unhealthy", "message": "hot"}
    assert claim_rows(pod, container, {"claim": state}.get, health) == [
        {"name": "claim:gpu", "resources": [first, second]},
        {"name": "claim:gpu/s", "resources": [second]},
    ]
