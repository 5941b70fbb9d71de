"""Whole models through llama.cpp: the same file, flash attention, a cache in three types."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tuning.bench.cases import Case, Model
from tuning.bench.prompts import CHUNK, DECODED, prompt_tokens, room
from tuning.bench.protocol import Message
from tuning.columns.ggml_library import TYPES
from tuning.columns.subjects import Measure, Subject

FILE_TYPES = {"f16": 1, "q8_0": 7}  # enum llama_ftype: MOSTLY_F16, MOSTLY_Q8_0
FLASH_ON = 1  # enum llama_flash_attn_type: ENABLED
LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
drop_log = LogCallback(lambda _level, _text, _data: None)  # kept: the library holds its address


@lru_cache(maxsize=1)
def load(path: str) -> Any:
    """A model on the CPU, held until another one is asked for."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(drop_log, None)
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    found = llama_cpp.llama_model_load_from_file(path.encode(), params)
    if not found:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    return found


class Chat:
    """One context of a model: feed tokens at its end, cut it, read logits."""

    def __init__(self, path: str, depth: int, cache: str, threads: int) -> None:
        import llama_cpp

        self._lib = llama_cpp
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = room(depth), CHUNK, CHUNK
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = TYPES[cache]
        params.flash_attn_type, params.no_perf = FLASH_ON, True
        model = load(path)
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {params.n_ctx} cells, cache {cache}")
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._memory = llama_cpp.llama_get_memory(self._context)

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._lib.llama_free(self._context)

    def feed(self, tokens: list[int]) -> None:
        """Tokens in chunks, behind those that are there; the last one's logits are kept."""
        for first in range(0, len(tokens), CHUNK):
            part = tokens[first : first + CHUNK]
            array = (ctypes.c_int32 * len(part))(*part)
            batch = self._lib.llama_batch_get_one(array, len(part))
            status = self._lib.llama_decode(self._context, batch)
            if status != 0:
                raise RuntimeError(f"llama_decode gives {status}")
        self._lib.llama_synchronize(self._context)

    def cut(self, rows: int) -> None:
        """Forget positions from `rows` on."""
        if not self._lib.llama_memory_seq_rm(self._memory, 0, rows, -1):
            raise RuntimeError(f"llama.cpp cannot cut its cache at {rows}")

    def logits(self) -> Any:
        """float32 [n_vocab] behind the last token."""
        data = self._lib.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(data, (self._n_vocab,)).astype(np.float32)


def model(case: Case, how: Message) -> Subject:
    """A prompt, and one token behind it, through llama_decode."""
    assert isinstance(case, Model)
    chat = Chat(case.path, case.depth, how["fmt"], how["threads"])
    tokens = prompt_tokens(case.depth)
    measures = {
        "prefill": Measure([lambda: chat.feed(tokens)], lambda: chat.cut(0), most=1),
        "decode": Measure(
            [lambda: chat.feed(tokens[:1])], lambda: chat.cut(case.depth), most=DECODED // 2
        ),
    }
    chat.feed(tokens[:2])  # graphs and buffers are made at the first call
    seconds = measures["prefill"].sample(1)
    note = f"llama_decode, {case.weights} weights, cache {how['fmt']}"
    return Subject(measures, chat.logits(), note, seconds={"prefill": seconds})


def do_requantize(request: Message) -> Message:
    """Write `source` with all matrices in another type, by the library's own tool."""
    import llama_cpp

    source, target = Path(request["source"]), Path(request["target"])
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = FILE_TYPES[request["weights"]], request["threads"]
    params.allow_requantize = params.pure = True
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".part")
    status = llama_cpp.llama_model_quantize(
        str(source).encode(), str(unfinished).encode(), ctypes.byref(params)
    )
    if status != 0:
        raise RuntimeError(f"llama_model_quantize gives {status}")
    unfinished.rename(target)
    return {}
