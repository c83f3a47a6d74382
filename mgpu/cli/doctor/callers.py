"""Checks that only the API server may call the admission endpoints (docs/security.md).

`mgpu doctor` runs these checks. `collection` reads the environment variables that `environment_variables` names.
"""

from collections.abc import Iterator, Mapping
from ipaddress import ip_network

from mgpu.cli.doctor.installation import Finding, Installation, Level, Raw
from mgpu.model.addresses import Block
from mgpu.model.errors import BadObject
from mgpu.presentation.plain_text import join_names
from mgpu.serving.callers import Callers, read_callers
from mgpu.settings import SchedulerSettings, Settings, WebhookSettings, load_settings

CALLERS = "callers"
ENDPOINTS: Mapping[str, str] = {"webhook": "mgpu-webhook", "scheduler": "mgpu-scheduler"}
"""For each process with an admission endpoint, the name of its settings block and the name of its Deployment."""
_OVERRIDES = ("APISERVERS", "CLIENTCA")


def environment_variables(key: str) -> tuple[str, ...]:
    """Return the names of the environment variables that override `apiServers` and `clientCa` of a process.

    Args:
        key: the name of the process's settings block, `webhook` or `scheduler`.
    """
    return tuple(f"MGPU_{key.upper()}__{name}" for name in _OVERRIDES)


def check_callers(installation: Installation) -> Iterator[Finding]:
    """Report endpoints that may be called from every address or from addresses of pods.

    Deployments whose environment variables are not valid settings are reported too.
    """
    found = [finding for key in ENDPOINTS for finding in _check_endpoint(installation, key)]
    if not found:
        blocks = (f"{key}: {_describe(_configured_callers(installation, key))}" for key in ENDPOINTS)
        found = [Finding(CALLERS, Level.OK, f"the admission endpoints accept only these callers: {', '.join(blocks)}")]
    yield from found


def _check_endpoint(installation: Installation, key: str) -> Iterator[Finding]:
    try:
        endpoint = _configured_callers(installation, key)
    except BadObject as error:
        remedy = f"correct it in Deployment {ENDPOINTS[key]} or run make deploy again"
        yield Finding(CALLERS, Level.FAILED, f"the environment of {ENDPOINTS[key]} is not valid: {error}", remedy)
        return
    if endpoint is None or _own(installation.settings, key).client_ca:
        return
    remedy = f"name the API servers' addresses in {key}.apiServers, or use client certificates ({key}.clientCa)"
    if endpoint.is_open():
        text = f"{key}.apiServers lets every address call {ENDPOINTS[key]}: any pod can pose as the API server"
        yield Finding(CALLERS, Level.WARNING, text, remedy)
        return
    pods = sorted(f"{block} ({node})" for block, node in _pod_blocks(installation) if _overlaps(block, endpoint.blocks))
    if pods:
        text = f"{key}.apiServers includes addresses of pods: {join_names(pods)}"
        yield Finding(CALLERS, Level.WARNING, text, remedy)


def _configured_callers(installation: Installation, key: str) -> Callers | None:
    """Return the callers that the settings allow; None if client certificates authenticate them instead.

    The environment of the Deployment takes precedence over the settings. Raises BadObject if the environment is not
    valid.
    """
    given = {
        name: installation.environment[name] for name in environment_variables(key) if name in installation.environment
    }
    overridden = _own(load_settings("", ENDPOINTS[key], given), key)
    own = _own(installation.settings, key)
    changes: dict[str, object] = (
        {"api_servers": overridden.api_servers} if environment_variables(key)[0] in given else {}
    )
    changes |= {"client_ca": overridden.client_ca} if environment_variables(key)[1] in given else {}
    return read_callers(own.model_copy(update=changes), key)


def _own(settings: Settings, key: str) -> WebhookSettings | SchedulerSettings:
    return settings.webhook if key == "webhook" else settings.scheduler


def _describe(endpoint: Callers | None) -> str:
    if endpoint is None:
        return "clients with a certificate"
    return join_names([str(block) for block in endpoint.blocks]) if endpoint.blocks else "no address"


def _pod_blocks(installation: Installation) -> Iterator[tuple[Block, str]]:
    for node in installation.nodes:
        spec: Raw = node.get("spec") or {}
        for text in spec.get("podCIDRs") or ():
            yield ip_network(str(text)), str(node["metadata"]["name"])


def _overlaps(pods: Block, endpoint: tuple[Block, ...]) -> bool:
    """Return whether a block of the endpoint overlaps with the addresses of pods.

    Blocks of a single address are ignored, since that address can be the one of a node.
    """
    ranges = [block for block in endpoint if block.num_addresses > 1]
    return any(block.version == pods.version and block.overlaps(pods) for block in ranges)
