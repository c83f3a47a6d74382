"""Parses the settings of all processes into frozen objects.

Each process reads its settings once, when it starts (`mgpu.cli.process_settings`). docs/settings.md describes the keys.
Users write the keys, so they must not change.
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
