"""The pods that `mgpu doctor` reports because mgpu did not decide their records."""

from mgpu.cli.doctor.records import verify_records
from tests.mgpu.dialects.test_record_verification import AGENT, RECORDS, own, with_seal


def test_genuine_pod_of_an_mtgpupod_is_proven() -> None:
    """The seal names the MtgpuPod. As the seal of a record it would be that of another pod."""
    assert verify_records(AGENT, [with_seal(own())]).unproven == ()
    orphan = with_seal(own())
    del orphan["metadata"]["ownerReferences"]
    assert verify_records(AGENT, [orphan]).unproven == ()


def test_pod_of_an_mtgpupod_with_another_record_is_unproven() -> None:
    carrier = with_seal(own())
    carrier["metadata"]["annotations"] |= RECORDS["gpushare"]
    assert verify_records(AGENT, [carrier]).unproven == ("default/m (UnsealedRecord)",)


def test_pod_that_pretends_to_have_an_mtgpupod_is_unproven() -> None:
    assert verify_records(AGENT, [own()]).unproven == ("default/m (UnsealedRecord)",)
