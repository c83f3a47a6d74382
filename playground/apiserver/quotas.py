"""The ResourceQuota admission plugin, for pods: charged last, after every webhook has had its say.

`spec.hard` is what counts here; a real server waits until a controller has copied it into the status.
"""

from fractions import Fraction

from mgpu.model.quantities import parse_quantity
from playground.apiserver.errors import forbidden
from playground.apiserver.quantities import canonical
from playground.apiserver.storage import Object, Storage

_PLAIN = ("cpu", "memory", "ephemeral-storage")


def _sum(containers: list[Object], part: str) -> dict[str, Fraction]:
    total: dict[str, Fraction] = {}
    for container in containers:
        for name, amount in ((container.get("resources") or {}).get(part) or {}).items():
            total[name] = total.get(name, Fraction(0)) + parse_quantity(amount)
    return total


def usage(pod: Object) -> dict[str, Fraction]:
    """What a pod is charged, by the names that a quota may use: `pods`, `cpu`, `requests.<name>`, `limits.<name>`."""
    spec, charged = pod["spec"], {"pods": Fraction(1), "count/pods": Fraction(1)}
    for part in ("requests", "limits"):
        total = _sum(spec["containers"], part)
        for init in spec.get("initContainers") or []:
            for name, amount in _sum([init], part).items():
                total[name] = max(total.get(name, Fraction(0)), amount)
        for name, amount in total.items():
            charged[f"{part}.{name}"] = amount
            if part == "requests" and name in _PLAIN:
                charged[name] = amount
    return charged


def check(storage: Storage, pod: Object) -> None:
    """Raises a 403 for a pod that some quota of its namespace has no room for."""
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    quotas = [
        item.obj for key, item in sorted(storage.collection("resourcequotas").items.items()) if key[0] == namespace
    ]
    if not quotas:
        return
    live = [
        usage(item.obj)
        for key, item in storage.collection("pods").items.items()
        if key[0] == namespace and item.obj["status"].get("phase") not in ("Succeeded", "Failed")
    ]
    wanted = usage(pod)
    for quota in quotas:
        hard = {k: parse_quantity(v) for k, v in (quota["spec"].get("hard") or {}).items()}
        used = {k: sum((u.get(k, Fraction(0)) for u in live), Fraction(0)) for k in hard}
        over = sorted(k for k, limit in hard.items() if wanted.get(k) and used[k] + wanted[k] > limit)
        if over:
            requested, taken, limited = (_shown(over, amounts) for amounts in (wanted, used, hard))
            text = f"requested: {requested}, used: {taken}, limited: {limited}"
            raise forbidden("", "pods", name, f"exceeded quota: {quota['metadata']['name']}, {text}")


def _shown(names: list[str], amounts: dict[str, Fraction]) -> str:
    return ",".join(f"{n}={_text(amounts[n])}" for n in names)


def _text(amount: Fraction) -> str:
    return canonical(f"{-(-amount * 1000 // 1)}m")
