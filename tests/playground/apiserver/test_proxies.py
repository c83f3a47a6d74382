"""The proxy for Pods: which Pods it reaches, and how it refuses."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deviceplugin.health import HealthServer
from playground.apiserver import ApiServer, User, running, self_signed
from playground.processes import free_port, own_address
from tests.playground.apiserver.api import Api, pod

ADDRESS = own_address()
NETWORK = pytest.mark.skipif(ADDRESS.startswith("127."), reason="this machine has no address but that of loopback")


def create(api: Api, pods: str, address: str = "", port: int = 80) -> None:
    spec = pod()["spec"]["containers"][0] | {"ports": [{"containerPort": port}]}
    api.ok("POST", pods, pod(spec={"containers": [spec]}))
    if address:
        assert api.patch(f"{pods}/p/status", {"status": {"podIP": address, "podIPs": [{"ip": address}]}}).code == 200


@pytest.fixture(scope="module")
def agent() -> Iterator[int]:
    """The port of an agent's server at all addresses of this machine."""
    page = "text/plain"
    server = HealthServer(0, lambda: None, lambda: "not ready", metrics=lambda: b"mgpu_x 1\n", content_type=page)
    server.start()
    yield server.port
    server.stop()


@NETWORK
@pytest.mark.parametrize("target", ["p:{}", "http:p:{}", ":p:{}", "p", "p:"])
def test_a_pod_is_reached_by_its_port_or_by_the_first_of_its_containers(
    api: Api, pods: str, agent: int, target: str
) -> None:
    create(api, pods, ADDRESS, agent)
    path = f"{pods}/{target.format(agent)}/proxy"
    assert api.call("GET", f"{path}/metrics").body == "mgpu_x 1\n"
    reply = api.call("GET", f"{path}/readyz")
    assert (reply.code, reply.body) == (503, "not ready\n")


@pytest.mark.parametrize("target", ["ftp:p:80", "a:b:p:80", ":80"])
def test_a_malformed_name_is_refused(api: Api, pods: str, target: str) -> None:
    reply = api.call("GET", f"{pods}/{target}/proxy/metrics")
    assert (reply.code, reply.message) == (400, f'invalid pod request "{target}"')


def test_a_pod_that_does_not_exist_is_not_found(api: Api, pods: str) -> None:
    reply = api.call("GET", f"{pods}/p:80/proxy/metrics")
    assert (reply.code, reply.message) == (404, 'pods "p" not found')


@pytest.mark.parametrize("address", ["", "127.0.0.1", "169.254.169.254", "fe80::1", "224.0.0.1"])
def test_a_pod_without_an_address_of_the_network_is_not_reached(api: Api, pods: str, address: str) -> None:
    create(api, pods, address)
    reply = api.call("GET", f"{pods}/p:80/proxy/metrics")
    assert (reply.code, reply.message) == (400, "address not allowed")


@NETWORK
def test_a_pod_at_whose_port_nothing_listens_is_unavailable(api: Api, pods: str) -> None:
    create(api, pods, ADDRESS)
    reply = api.call("GET", f"{pods}/p:{free_port()}/proxy/metrics")
    assert (reply.code, reply.reason) == (503, "ServiceUnavailable")
    assert reply.message.startswith("error trying to reach service: ")


def test_the_proxy_needs_a_right_by_the_method(tmp_path: Path) -> None:
    tls = self_signed(tmp_path)
    with running(ApiServer(tokens={"t": User("kim")}, restricted=("kim",)), tls=tls) as url:
        api = Api(url, tls[0], "t", tmp_path, real=False)
        for method, verb in (("GET", "get"), ("POST", "create"), ("DELETE", "delete")):
            reply = api.call(method, "/api/v1/namespaces/default/pods/p:80/proxy/metrics")
            assert reply.code == 403
            assert f'cannot {verb} resource "pods/proxy"' in reply.message
        api.close()
