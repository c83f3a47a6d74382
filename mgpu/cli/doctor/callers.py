"""Whether the admission endpoints answer the API server alone. Pure."""

from collections.abc import Iterator, Mapping
from ipaddress import ip_network

from mgpu.cli.doctor.seen import Finding, Level, Raw, Seen
from mgpu.model.addresses import Block
from mgpu.model.errors import BadObject
from mgpu.presentation.plain_text import listed
from mgpu.serving.callers import Callers, api_servers
from mgpu.settings import SchedulerSettings, Settings, WebhookSettings, load_settings

CALLERS = "callers"
ENDPOINTS: Mapping[str, str] = {"webhook": "mgpu-webhook", "scheduler": "mgpu-scheduler"}
"""The block of the settings, and the Deployment of the process."""
_OVERRIDES = ("APISERVERS", "CLIENTCA")


def variables(key: str) -> tuple[str, ...]:
    """The environment variables that decide who may call the endpoint of this process."""
    return tuple(f"MGPU_{key.upper()}__{name}" for name in _OVERRIDES)


def callers(seen: Seen) -> Iterator[Finding]:
    """Each endpoint that more than the API server may call; one finding that all are closed, where they are."""
    found = [finding for key in ENDPOINTS for finding in _of(seen, key)]
    if not found:
        blocks = (f"{key}: {_shown(_admitted(seen, key))}" for key in ENDPOINTS)
        found = [Finding(CALLERS, Level.OK, f"the admission endpoints are closed ({', '.join(blocks)})")]
    yield from found


def _of(seen: Seen, key: str) -> Iterator[Finding]:
    try:
        admitted = _admitted(seen, key)
    except BadObject as error:
        remedy = f"correct it in Deployment {ENDPOINTS[key]} or run make deploy again"
        yield Finding(CALLERS, Level.FAILED, f"the environment of {ENDPOINTS[key]} is not valid: {error}", remedy)
        return
    if admitted is None or _own(seen.settings, key).client_ca:
        return
    remedy = f"name the API servers' addresses in {key}.apiServers, or use client certificates ({key}.clientCa)"
    if admitted.is_open():
        text = f"{key}.apiServers lets every address call {ENDPOINTS[key]}: any pod can pose as the API server"
        yield Finding(CALLERS, Level.WARNING, text, remedy)
        return
    pods = sorted(f"{block} ({node})" for block, node in _pod_blocks(seen) if _overlaps(block, admitted.blocks))
    if pods:
        text = f"{key}.apiServers includes addresses of pods: {listed(pods)}"
        yield Finding(CALLERS, Level.WARNING, text, remedy)


def _admitted(seen: Seen, key: str) -> Callers | None:
    """Who may call, by the settings and by the environment of the Deployment, which overrides them."""
    given = {name: seen.environment[name] for name in variables(key) if name in seen.environment}
    overridden = _own(load_settings("", ENDPOINTS[key], given), key)
    own = _own(seen.settings, key)
    changes: dict[str, object] = {"api_servers": overridden.api_servers} if variables(key)[0] in given else {}
    changes |= {"client_ca": overridden.client_ca} if variables(key)[1] in given else {}
    return api_servers(own.model_copy(update=changes), key)


def _own(settings: Settings, key: str) -> WebhookSettings | SchedulerSettings:
    return settings.webhook if key == "webhook" else settings.scheduler


def _shown(admitted: Callers | None) -> str:
    if admitted is None:
        return "clients with a certificate"
    return listed([str(block) for block in admitted.blocks]) if admitted.blocks else "no address"


def _pod_blocks(seen: Seen) -> Iterator[tuple[Block, str]]:
    for node in seen.nodes:
        spec: Raw = node.get("spec") or {}
        for text in spec.get("podCIDRs") or ():
            yield ip_network(str(text)), str(node["metadata"]["name"])


def _overlaps(pods: Block, admitted: tuple[Block, ...]) -> bool:
    """Single addresses within it are the node's own, by which an API server on it calls (docs/install.md)."""
    wide = [block for block in admitted if block.num_addresses > 1]
    return any(block.version == pods.version and block.overlaps(pods) for block in wide)
