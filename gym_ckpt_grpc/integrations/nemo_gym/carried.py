"""`carried_over`: what a training framework does with calls that a restore carried over, before it assembles tokens."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_gym.token_id_capture.staging.digest import compute_staging_digest
from nemo_gym.token_id_capture.staging.records import CallRecord, RolloutManifest, StagedCallBaseSnapshot


def carried_over(
    manifest: RolloutManifest, snapshots: Sequence[StagedCallBaseSnapshot]
) -> tuple[list[CallRecord], list[StagedCallBaseSnapshot]]:
    """The records of a manifest and the staged calls they name, all as calls of the manifest's own capture key.

    snapshots: one for each record, in their order, as they were staged. The framework's assembly takes only calls of
    one capture key, and the digest of a staged call covers its key: after a restore a manifest also names calls of
    earlier attempts. Each is checked against its record as it is (its tokens against its digest when the snapshot was
    made), and only then written anew under the later key. Calls that were not carried over are given back unchanged.

    Raises ValueError naming the call that is not the one its record says.
    """
    records: list[CallRecord] = []
    found: list[StagedCallBaseSnapshot] = []
    for record, snapshot in zip(manifest.records, snapshots, strict=True):
        if (record.model_call_id, record.digest) != (snapshot.model_call_id, snapshot.digest):
            raise ValueError(
                f"what is staged as {record.staging_key} is not call {record.model_call_id} of the manifest"
            )
        if snapshot.rollout_id != manifest.rollout_id:
            fields = snapshot.model_dump(include=set(StagedCallBaseSnapshot.model_fields))
            fields["rollout_id"] = manifest.rollout_id
            fields["digest"] = compute_staging_digest(**{name: fields[name] for name in fields if name != "digest"})
            snapshot = StagedCallBaseSnapshot.model_validate(fields)
            record = record.model_copy(update={"digest": fields["digest"]})
        records.append(record)
        found.append(snapshot)
    return records, found
