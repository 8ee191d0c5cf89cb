"""The conformance kit: a black-box suite for any running participant, by address and token."""

from gym_ckpt_grpc.testing.conformance.results import Check as Check
from gym_ckpt_grpc.testing.conformance.results import Report as Report
from gym_ckpt_grpc.testing.conformance.results import Result as Result
from gym_ckpt_grpc.testing.conformance.results import Verdict as Verdict
from gym_ckpt_grpc.testing.conformance.suite import CHECKS as CHECKS
from gym_ckpt_grpc.testing.conformance.suite import Unreachable as Unreachable
from gym_ckpt_grpc.testing.conformance.suite import run_conformance as run_conformance
