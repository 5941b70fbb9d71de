"""A loaded model: the format gate, a cell store and graphs in one place (contract 3.2, 10)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from minfer import generation
from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.generation import Generation
from minfer.inference import Inference
from minfer.loading import LoadedModel, load_model
from minfer.models import chat_prompt
from minfer.models.sampling import Sampler, Sampling
from minfer.models.text_stream import TextStream
from minfer.offload import DevicePlan
from minfer.ops import F32
from minfer.timing import Timing


class Engine(Inference):
    """One model on one device, or on several by a plan, with one cache format.

    Two engines with two formats live in one process: nothing here is global.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self.tokenizer = loaded.tokenizer
        self.chat_template = loaded.file.metadata.get("tokenizer.chat_template")

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str | Device | DevicePlan = "cpu",
        cache_type: str | KvFormat | None = None,
        n_ctx: int | None = None,
        threads: int | None = None,
        weights: str | KvFormat | None = None,
        activations: str = F32,
        replay: bool = True,
        sanitize: bool | None = None,
        progress: bool = False,
    ) -> Engine:
        """Load a GGUF model.

        device: `cpu`, `cuda`, `metal`, or how many layers lie on each, in order: `cpu:10,cuda:20`.
        cache_type: f32, f16 or q8_0; else MINFER_CACHE_TYPE, else the device's default.
        n_ctx: cells of the cache; default 4096, or what the model was trained for if that is less.
        threads: workers of every kernel, default the cores this process may use. weights: format
        of the matrices, f32, f16 or q8_0; None or auto: Q8_0 ones as they are, others as f32.
        activations: f32, or on cuda f16 or bf16, what operands of products are rounded to.
        replay: record a decoded token's launches once where the device can; False for measuring.
        sanitize: trace an attention that is not finite to a cell; None for MINFER_SANITIZE_CELLS.
        progress: show a bar on stderr while weights are decoded.

        Refuses before loading: a bad file, an unknown format, q8_0 on odd head sizes, a device
        that is not there or too old, a plan of other layers, and what would not fit in memory.
        """
        loaded = load_model(
            path,
            device=DevicePlan.parse(device),
            cache_type=cache_type,
            n_ctx=n_ctx,
            threads=threads,
            weights=weights,
            activations=activations,
            replay=replay,
            sanitize=sanitize,
            progress=progress,
        )
        return cls(loaded)

    def with_cache(self, cache_type: str | KvFormat, n_ctx: int | None = None) -> Engine:
        """Another engine over the same weights, with an empty cache of its own."""
        return Engine(self._loaded.with_cache(cache_type, n_ctx))

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the model's start token where it wants one."""
        return [*self.tokenizer.prompt_start, *self.tokenizer.encode(text)]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation in the model's own chat template, up to the answer.

        messages: {"role": ..., "content": ...} each, both text. Control tokens that they spell stay
        text. Refuses a model without a template, and what `chat_prompt.encode` refuses.
        """
        if not isinstance(self.chat_template, str):
            raise Refusal(
                "0.3",
                f"{self.path.name} has no chat template; use a plain prompt",
                {"path": str(self.path)},
            )
        return chat_prompt.encode(messages, self.chat_template, self.tokenizer)

    def generate(
        self,
        tokens: Sequence[int],
        max_tokens: int | None = None,
        *,
        sampling: Sampling | Sampler | None = None,
        seq: int = 0,
        timing: Timing | None = None,
    ) -> Iterator[int]:
        """Continue `tokens`, one id at a time, until an end token or `max_tokens`.

        Greedily without `sampling`; a `Sampler` goes on where it stands and tells its seed. Without
        `max_tokens` it goes on to the last cell. Refuses, before anything runs, an empty prompt,
        one that does not fit and biases for tokens that are none; stops with an error at logits
        that are not finite. The sequence is reserved if it is not there yet and keeps its rows.
        """
        return generation.token_ids(self, tokens, max_tokens, sampling, seq, timing)

    def stream(
        self,
        tokens: Sequence[int],
        max_tokens: int | None = None,
        *,
        stop: str | Sequence[str] = (),
        continues: bool = False,
        sampling: Sampling | Sampler | None = None,
        seq: int = 0,
        timing: Timing | None = None,
    ) -> Generation:
        """The text that `generate` gives, in pieces, up to a stop string.

        The token after a stop string is never run. continues: the text goes on from the prompt's,
        rather than being an answer of its own: a space in front of it is kept. Refuses also an
        empty stop string.
        """
        text = TextStream(self.tokenizer, stop, continues=continues)
        ids = self.generate(tokens, max_tokens, sampling=sampling, seq=seq, timing=timing)
        return Generation(ids, text, self.tokenizer.is_end, bounded=max_tokens is not None)
