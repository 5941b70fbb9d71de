"""Whole models through transformers: `python -m tuning.columns.transformers_cuda static | eager`.

static: a static cache, and a decode step compiled by torch.compile with CUDA graphs of its own;
compiling takes about a minute. eager: a growing cache, nothing compiled. Both read
the file's weights, decoded to 16 or 32 bits, and feed the prompt at once, not compiled.
"""

from __future__ import annotations

import inspect
import sys
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from tuning.bench.cases import Case, Model
from tuning.bench.prompts import DECODED, prompt_tokens, room
from tuning.bench.protocol import Absent, Message
from tuning.columns.replay import DEVICE, refuse_format, run_gpu_column, versions
from tuning.columns.subjects import Measure, Subject

DTYPES = {"f32": torch.float32, "f16": torch.float16}
WARM = 3  # calls that compile, then record
COMPILED_DEPTH = 512  # cells at most: another size of the cache is compiled anew


@lru_cache(maxsize=1)
def load(path: str, fmt: str) -> Any:
    """The model of a GGUF file, held until another one is asked for."""
    file = Path(path)
    read: Any = AutoModelForCausalLM.from_pretrained
    model = read(str(file.parent), gguf_file=file.name, dtype=DTYPES[fmt])
    return model.to(DEVICE).eval()


class Chat:
    """One cache of a model: feed tokens at its end, cut it."""

    def __init__(self, model: Any, depth: int, compiled: bool) -> None:
        self.model, self.compiled, self.length = model, compiled, 0
        self.cache: Any = StaticCache(model.config, room(depth)) if compiled else self.growing()
        names = inspect.signature(model.forward).parameters
        self.given = "cache" if "cache" in names else "past_key_values"
        # One step is compiled, and its graphs are torch's own.
        self.step: Any = (
            torch.compile(model.forward, mode="reduce-overhead", dynamic=False)
            if compiled
            else model.forward
        )

    def growing(self) -> Any:
        """An empty cache."""
        return DynamicCache(config=self.model.config)

    def feed(self, tokens: list[int]) -> Any:
        """float32 [n_vocab] on the host, behind the last token."""
        ids = torch.tensor([tokens], device=DEVICE)
        call = self.step if len(tokens) == 1 else self.model.forward
        places = torch.arange(self.length, self.length + len(tokens), device=DEVICE)[None]
        out = call(input_ids=ids, position_ids=places, logits_to_keep=1, **{self.given: self.cache})
        self.length += len(tokens)
        return out.logits[0, -1].float().cpu().numpy()

    def cut(self, rows: int) -> None:
        """Forget positions from `rows` on."""
        if self.compiled:
            for layer in self.cache.layers:
                if layer.is_initialized:
                    layer.cumulative_length.fill_(rows)
        elif not rows:
            self.cache = self.growing()
        elif rows < self.length:
            self.cache.crop(rows - self.length)
        self.length = rows


def model(case: Case, how: Message, *, compiled: bool) -> Subject:
    """A prompt, and one token behind it."""
    assert isinstance(case, Model)
    refuse_format(how["fmt"], list(DTYPES))
    if compiled and case.depth > COMPILED_DEPTH:
        raise Absent(f"compiled for a depth of {COMPILED_DEPTH} alone")
    chat = Chat(load(case.path, how["fmt"]), case.depth, compiled)
    tokens = prompt_tokens(case.depth)
    values = np.array(chat.feed(tokens))
    for _ in range(WARM):
        chat.feed(tokens[:1])
    measures = {
        "prefill": Measure([lambda: chat.feed(tokens)], lambda: chat.cut(0), most=1),
        "decode": Measure(
            [lambda: chat.feed(tokens[:1])], lambda: chat.cut(case.depth), most=DECODED // 2
        ),
    }
    note = "static cache, compiled" if compiled else "growing cache, eager"
    return Subject(measures, values, f"transformers, {note}, {how['fmt']}")


def all_versions() -> dict[str, str]:
    """Versions of what runs."""
    return versions() | {"transformers": transformers.__version__}


if __name__ == "__main__":
    prepare = partial(model, compiled=sys.argv[1] == "static")
    run_gpu_column({"model": prepare}, all_versions)
