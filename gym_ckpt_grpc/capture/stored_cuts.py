"""Whether cuts exist, and giving them up: the part of a `CutEngine` that is the same for every inference worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gym_ckpt_grpc.capture.generation_wire import CutReference
from gym_ckpt_grpc.capture.token_records import CUTS, TokenRecord, cut_id_of, tokens_digest
from gym_ckpt_grpc.capture.token_store import AsyncTokenStore
from gym_ckpt_grpc.control.generation import CutPresence
from gym_ckpt_grpc.protocol.errors import StateCorrupt


class StoredCuts:
    """The cuts that stand in a token store."""

    def __init__(self, store: AsyncTokenStore) -> None:
        self._store = store

    async def check(self, cuts: Sequence[CutReference]) -> list[CutPresence]:
        """One presence per cut, in order. A record that is there and cannot be read is CHANGED."""
        keys = list(dict.fromkeys(key for cut in cuts for key in cut.staging_keys))
        try:
            records = await self._store.get(keys)
        except StateCorrupt:
            return [await self._check_alone(cut) for cut in cuts]
        return [_presence(cut, records) for cut in cuts]

    async def _check_alone(self, cut: CutReference) -> CutPresence:
        try:
            return _presence(cut, await self._store.get(cut.staging_keys))
        except StateCorrupt:
            return CutPresence.CHANGED

    async def release(self, cut_ids: Sequence[str]) -> list[bool]:
        """Remove the records of these cuts; per id whether there was one. Completed calls are never touched."""
        wanted = set(cut_ids)
        keys = {
            cut_id: key
            for key in await self._store.keys(f"{CUTS}/")
            if (cut_id := cut_id_of(key)) is not None and cut_id in wanted
        }
        deleted = set(await self._store.delete(list(keys.values()))) if keys else set()
        answers: list[bool] = []
        for cut_id in cut_ids:
            answers.append(keys.get(cut_id) in deleted)
            deleted.discard(keys.get(cut_id, ""))
        return answers


def _presence(cut: CutReference, records: Mapping[str, TokenRecord]) -> CutPresence:
    found = [records[key] for key in cut.staging_keys if key in records]
    if len(found) != len(cut.staging_keys):
        return CutPresence.MISSING
    generated = [token for record in found for token in record.generated_ids]
    same = (found[-1].cut_id in ("", cut.cut_id), len(generated), tokens_digest(generated))
    return CutPresence.PRESENT if same == (True, cut.prefix_tokens, cut.prefix_digest) else CutPresence.CHANGED
