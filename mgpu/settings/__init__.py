"""Parses the settings of all processes into frozen objects.

The `main` module of each process calls `load_settings` once and passes the result on. docs/settings.md lists the keys,
which are API.
"""

from mgpu.settings.component_settings import DevicePluginSettings, SchedulerSettings, WebhookSettings
from mgpu.settings.dialect_settings import DialectSettings, KoordinatorSettings, MgpuSettings
from mgpu.settings.fields import CARD_POLICIES, NODE_POLICIES
from mgpu.settings.loader import Settings, load_settings

__all__ = [
    "CARD_POLICIES",
    "NODE_POLICIES",
    "DevicePluginSettings",
    "DialectSettings",
    "KoordinatorSettings",
    "MgpuSettings",
    "SchedulerSettings",
    "Settings",
    "WebhookSettings",
    "load_settings",
]
