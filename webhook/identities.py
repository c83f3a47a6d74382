"""The users whose writes of placement annotations admission accepts."""

from collections.abc import Collection

from mgpu.settings import Settings

_PROCESSES = ("mgpu-scheduler", "mgpu-deviceplugin", "mgpu-webhook")


def identities(settings: Settings) -> Collection[str]:
    """The users that may write placement annotations and create the Pods of MtgpuPods."""
    namespace = settings.webhook.namespace
    return settings.webhook.identities or [f"system:serviceaccount:{namespace}:{name}" for name in _PROCESSES]
