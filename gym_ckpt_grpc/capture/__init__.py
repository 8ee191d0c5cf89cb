"""Token capture of a policy model: the ledger of its calls, what an inference worker stages, and cuts.

`ledger` belongs to the policy model server, `staging` and `generation_servicer` to the inference worker, and
`backends` is the client between them.
"""

from gym_ckpt_grpc.capture.admission import CaptureAdmission as CaptureAdmission
from gym_ckpt_grpc.capture.admission import Coordinates as Coordinates
from gym_ckpt_grpc.capture.admission import admission_from_json as admission_from_json
from gym_ckpt_grpc.capture.admission import admission_to_json as admission_to_json
from gym_ckpt_grpc.capture.admission import coordinates_from_json as coordinates_from_json
from gym_ckpt_grpc.capture.admission import coordinates_to_json as coordinates_to_json
from gym_ckpt_grpc.capture.attempt_rows import AttemptRows as AttemptRows
from gym_ckpt_grpc.capture.backends import GrpcGenerationBackend as GrpcGenerationBackend
from gym_ckpt_grpc.capture.continuation import Snapshot as Snapshot
from gym_ckpt_grpc.capture.continuation import continuation_from_json as continuation_from_json
from gym_ckpt_grpc.capture.continuation import continuation_to_json as continuation_to_json
from gym_ckpt_grpc.capture.cut_engine import CutEngine as CutEngine
from gym_ckpt_grpc.capture.file_token_store import FileTokenStore as FileTokenStore
from gym_ckpt_grpc.capture.generation_servicer import GenerationServer as GenerationServer
from gym_ckpt_grpc.capture.generation_servicer import GenerationServicer as GenerationServicer
from gym_ckpt_grpc.capture.generation_wire import CutOutcome as CutOutcome
from gym_ckpt_grpc.capture.generation_wire import CutReference as CutReference
from gym_ckpt_grpc.capture.ledger import CaptureLedger as CaptureLedger
from gym_ckpt_grpc.capture.ledger_ids import all_episodes as all_episodes
from gym_ckpt_grpc.capture.ledger_ids import all_rollouts as all_rollouts
from gym_ckpt_grpc.capture.manifest import Manifest as Manifest
from gym_ckpt_grpc.capture.rows import row_staging_key as row_staging_key
from gym_ckpt_grpc.capture.staging import Fetched as Fetched
from gym_ckpt_grpc.capture.staging import StagedCall as StagedCall
from gym_ckpt_grpc.capture.staging import cut_evidence as cut_evidence
from gym_ckpt_grpc.capture.staging import fetch as fetch
from gym_ckpt_grpc.capture.staging import finished_cut as finished_cut
from gym_ckpt_grpc.capture.stored_cuts import StoredCuts as StoredCuts
from gym_ckpt_grpc.capture.token_records import TokenRecord as TokenRecord
from gym_ckpt_grpc.capture.token_records import cut_key as cut_key
from gym_ckpt_grpc.capture.token_records import staging_key as staging_key
from gym_ckpt_grpc.capture.token_records import tokens_digest as tokens_digest
from gym_ckpt_grpc.capture.token_store import AsyncTokenStore as AsyncTokenStore
from gym_ckpt_grpc.capture.token_store import TokenStore as TokenStore
