"""A randomly initialised transformer that generates with a real KV cache. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 256
STOP = 0
POSITIONS = 512


class TinyTransformer:
    """Two layers, grouped attention, weights from `weight_version`; the same on every process of a machine."""

    def __init__(self, weight_version: int = 0) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1000 + weight_version)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=POSITIONS,
            initializer_range=0.2,
        )
        self.model = LlamaForCausalLM(config).eval()
        taken = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in taken else "past_key_values"
        self.weight_version = weight_version

    def forward(self, ids: Sequence[int], cache: Any = None) -> tuple[torch.Tensor, Any]:
        """(logits of the next token, cache) after reading `ids` behind what the cache holds."""
        with torch.no_grad():
            out = self.model(torch.tensor([list(ids)]), use_cache=True, **{self._cache_name: cache})
        return out.logits[0, -1], out.past_key_values


class Decoder:
    """One generation: reads a prompt in one pass, then one token at a time, sampling by a keyed noise.

    prefix: tokens of the reply that were made before; they are read one at a time, in the shapes in which the uncut
    generation read them, so that the cache, and with it every later number, is the same to the last bit.
    at_once: read them in one pass instead, as an engine does that refills its cache.
    """

    def __init__(
        self,
        model: TinyTransformer,
        seed: int,
        prompt: Sequence[int],
        prefix: Sequence[int] = (),
        *,
        at_once: bool = False,
    ) -> None:
        self._model, self._seed = model, seed
        self.ids = list(prefix)
        if at_once:
            self._logits, self._cache = model.forward([*prompt, *prefix])
            return
        self._logits, self._cache = model.forward(prompt)
        for token in prefix:
            self._logits, self._cache = model.forward([token], self._cache)

    def next(self) -> tuple[int, float]:
        """One more token and its log-probability."""
        logprobs = torch.log_softmax(self._logits.double() / 0.8, dim=-1)
        token = int(torch.argmax(logprobs + self._noise()))
        self.ids.append(token)
        self._logits, self._cache = self._model.forward([token], self._cache)
        return token, float(logprobs[token])

    def _noise(self) -> torch.Tensor:
        """Gumbel noise of this position: from seed and position alone, never from how the context came about."""
        key = hashlib.sha256(f"{self._seed} {len(self.ids)}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        return -torch.log(-torch.log(torch.rand(VOCABULARY, generator=generator, dtype=torch.double)))
