"""Payloads, record files, manifests, publication, verification. Everything here blocks: run it in threads."""

from gym_ckpt_grpc.storage.aggregate import (
    AggregateManifest,
    EpisodeListRef,
    EpisodeLists,
    Excluded,
    Member,
    OpaqueBlock,
    StragglerAction,
    check_members,
    read_aggregate,
    read_episodes,
    write_aggregate,
)
from gym_ckpt_grpc.storage.collector import paused_collector
from gym_ckpt_grpc.storage.files import FileLayer, FileSink, FileSource, NameTaken
from gym_ckpt_grpc.storage.fsck import Finding, Level, verify_checkpoint
from gym_ckpt_grpc.storage.holds import Hold
from gym_ckpt_grpc.storage.intent import Intent, read_intent, write_intent
from gym_ckpt_grpc.storage.local_files import LocalFiles
from gym_ckpt_grpc.storage.locations import (
    CheckpointLocation,
    PartLocation,
    Place,
    path_to_uri,
    resolve_checkpoint,
    uri_to_path,
)
from gym_ckpt_grpc.storage.owner import Owner
from gym_ckpt_grpc.storage.part import PartManifestInfo, write_part
from gym_ckpt_grpc.storage.part_manifest import FileEntry, IdentityBlock, PartManifest, read_manifest
from gym_ckpt_grpc.storage.part_reading import Part, read_part
from gym_ckpt_grpc.storage.payloads import Codec, Payload, PayloadRefused, decode, encode, raw
from gym_ckpt_grpc.storage.pins import Pin
from gym_ckpt_grpc.storage.preflight import Preflight, preflight
from gym_ckpt_grpc.storage.pruning import RetentionOutcome, delete_checkpoint, finish_deletions
from gym_ckpt_grpc.storage.pruning import apply as apply_retention
from gym_ckpt_grpc.storage.record_writer import Progress
from gym_ckpt_grpc.storage.records import EpisodeSelection, FieldValue, Record
from gym_ckpt_grpc.storage.references import STAGING_KEYS, staging_keys
from gym_ckpt_grpc.storage.retention import Decision, Plan, Retention
from gym_ckpt_grpc.storage.retention import plan as plan_retention
from gym_ckpt_grpc.storage.root import LATEST, CheckpointRoot, Found, Listed, Published
from gym_ckpt_grpc.storage.sequence import Claim, Publication, Sequence
from gym_ckpt_grpc.storage.stop import StopFlag, WriteStopped

__all__ = [
    "LATEST",
    "STAGING_KEYS",
    "AggregateManifest",
    "CheckpointLocation",
    "CheckpointRoot",
    "Claim",
    "Codec",
    "Decision",
    "EpisodeListRef",
    "EpisodeLists",
    "EpisodeSelection",
    "Excluded",
    "FieldValue",
    "FileEntry",
    "FileLayer",
    "FileSink",
    "FileSource",
    "Finding",
    "Found",
    "Hold",
    "IdentityBlock",
    "Intent",
    "Level",
    "Listed",
    "LocalFiles",
    "Member",
    "NameTaken",
    "OpaqueBlock",
    "Owner",
    "Part",
    "PartLocation",
    "PartManifest",
    "PartManifestInfo",
    "Payload",
    "PayloadRefused",
    "Pin",
    "Place",
    "Plan",
    "Preflight",
    "Progress",
    "Publication",
    "Published",
    "Record",
    "Retention",
    "RetentionOutcome",
    "Sequence",
    "StopFlag",
    "StragglerAction",
    "WriteStopped",
    "apply_retention",
    "check_members",
    "decode",
    "delete_checkpoint",
    "encode",
    "finish_deletions",
    "path_to_uri",
    "paused_collector",
    "plan_retention",
    "preflight",
    "raw",
    "read_aggregate",
    "read_episodes",
    "read_intent",
    "read_manifest",
    "read_part",
    "resolve_checkpoint",
    "staging_keys",
    "uri_to_path",
    "verify_checkpoint",
    "write_aggregate",
    "write_intent",
    "write_part",
]
