"""The config manager of the seed: reads this node's key of the ConfigMap, whenever its content changes."""

import threading
from collections.abc import Callable
from typing import Any

from mgpu.kube import Api
from mgpu.kube.reflector import Reflector
from mgpu.model.errors import RetryLater
from mgpu.model.mps_config import config_of
from mgpu.settings.slice_settings import SlicesSettings


class ConfigMap:
    """Watched from the first question on. changed: called, on another thread, with every change of it."""

    def __init__(self, api: Api, node: str, settings: SlicesSettings, changed: Callable[[], None]) -> None:
        self._node, self._changed = node, changed
        self._name = f"{settings.config_map_namespace}/{settings.config_map}"
        path = f"/api/v1/namespaces/{settings.config_map_namespace}/configmaps"
        query = {"fieldSelector": f"metadata.name={settings.config_map}"}
        self._reflector = Reflector(api, path, self._take, lambda _: self._take(None), query)
        self._started = threading.Event()
        self._said: tuple[str, str] | None = None

    def text(self) -> tuple[str, str]:
        """What it says of this node ("": nothing), and where that stands. Raises RetryLater where it is not known."""
        if not self._started.is_set():
            self._started.set()
            self._reflector.start()
        if not self._reflector.synced:
            raise RetryLater(f"ConfigMap {self._name} is not known yet")
        key, text = self._said or (self._node, "")
        return text, f"ConfigMap {self._name} data[{key}]"

    def stop(self) -> None:
        if self._started.is_set():
            self._reflector.stop()

    def _take(self, raw: dict[str, Any] | None) -> None:
        self._said = config_of((raw or {}).get("data") or {}, self._node)
        self._changed()
