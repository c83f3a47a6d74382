"""Checks that allocation records are sealed, and that mgpu ignores none of them (docs/security.md, "Records").

`collection` calls `verify_records` when it reads the cluster, and `mgpu doctor` then calls `check_records`. Both are
pure functions.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from mgpu.cli.doctor.installation import Finding, Installation, Level, Raw, Sealing
from mgpu.dialects import mtgpu
from mgpu.dialects.record_verification import RecordVerifier
from mgpu.model.errors import BadObject
from mgpu.model.pods import Pod, read_pod
from mgpu.model.record_seals import SEAL
from mgpu.presentation.plain_text import join_names

CHECK = "records"
CONFIG_MAP = "mgpu-record-keys"
_MOST = 10


def verify_records(records: RecordVerifier, pods: Iterable[Raw]) -> Sealing:
    return Sealing(records, tuple(sorted(_unproven(records, pods))))


def _unproven(records: RecordVerifier, pods: Iterable[Raw]) -> Iterator[str]:
    """Yield each pod that has not ended and whose record mgpu ignores, with the reason.

    Objects that cannot be read as pods are skipped.
    """
    for raw in pods:
        try:
            pod = read_pod(raw)
        except BadObject:
            continue
        finding = records.finding_of_mtgpu(raw)
        if finding is None:
            # The seal of an MtgpuPod's Pod names the MtgpuPod, so it would not be valid as the seal of a record.
            _, judged = records.judge(_without_seal(pod) if mtgpu.claimed_mtgpupod(raw) else pod)
            finding = judged.finding if judged else None
        if finding is not None and not pod.ended:
            yield f"{pod.key} ({finding.reason})"


def _without_seal(pod: Pod) -> Pod:
    return replace(pod, annotations={key: text for key, text in pod.annotations.items() if key != SEAL})


def check_records(installation: Installation) -> Iterator[Finding]:
    """Check that records are sealed, and that mgpu ignores no record of a pod that has not ended."""
    sealing = installation.sealing
    if f"configmap {CONFIG_MAP}" in installation.hidden:
        return
    if isinstance(sealing, BadObject):
        remedy = f"correct ConfigMap {CONFIG_MAP}; until then no process that reads it can start"
        yield Finding(CHECK, Level.FAILED, str(sealing), remedy)
    elif sealing is None or sealing.records.keys is None:
        text = "records are not sealed: every record that admission allows counts"
        remedy = 'run make deploy or manifests/record-keys.sh (docs/security.md, "Records")'
        yield Finding(CHECK, Level.WARNING, text, remedy)
    elif sealing.unproven:
        text = f"pods have records that mgpu did not decide: {join_names(sealing.unproven, _MOST)}"
        remedy = (
            "kubectl describe pod shows the reason in the Events; "
            "delete these pods, or add the vocabulary of their scheduler to records.peers"
        )
        yield Finding(CHECK, Level.FAILED, text, remedy)
    else:
        keys = sealing.records.keys
        count = f"{len(keys.public)} key{'' if len(keys.public) == 1 else 's'}"
        yield Finding(CHECK, Level.OK, f"records are sealed since {keys.since} ({count})")
