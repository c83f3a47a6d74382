"""Which pods doctor reports as pods with a record that mgpu did not decide."""

from mgpu.cli.doctor.records import verify_records
from tests.mgpu.dialects.test_record_verification import AGENT, RECORDS, own, with_seal


def test_unproven_with_a_genuine_pod_of_an_mtgpupod_is_empty() -> None:
    """Its seal names the MtgpuPod; judged as the seal of a record it would be one of another pod."""
    assert verify_records(AGENT, [with_seal(own())]).unproven == ()
    orphan = with_seal(own())
    del orphan["metadata"]["ownerReferences"]
    assert verify_records(AGENT, [orphan]).unproven == ()


def test_unproven_with_a_record_beside_the_seal_of_an_mtgpupod_names_the_pod() -> None:
    carrier = with_seal(own())
    carrier["metadata"]["annotations"] |= RECORDS["gpushare"]
    assert verify_records(AGENT, [carrier]).unproven == ("default/m (UnsealedRecord)",)


def test_unproven_with_a_pod_that_poses_as_an_mtgpupods_names_the_pod() -> None:
    assert verify_records(AGENT, [own()]).unproven == ("default/m (UnsealedRecord)",)
