"""The users whose writes of placement annotations admission accepts."""

from collections.abc import Collection

from mgpu.settings import Settings

_SCHEDULER = "mgpu-scheduler"
_PROCESSES = (_SCHEDULER, "mgpu-deviceplugin", "mgpu-webhook")


def identities(settings: Settings) -> Collection[str]:
    """The users that may write placement annotations and create the Pods of MtgpuPods."""
    return settings.webhook.identities or [_user(settings, name) for name in _PROCESSES]


def scheduler(settings: Settings) -> str:
    """The user whom the suite's own scheduler is in a cluster."""
    return _user(settings, _SCHEDULER)


def _user(settings: Settings, account: str) -> str:
    return f"system:serviceaccount:{settings.webhook.namespace}:{account}"
