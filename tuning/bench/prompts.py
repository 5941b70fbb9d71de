"""The prompt of a whole-model case: token ids that every engine takes as they are."""

from __future__ import annotations

CHUNK = 512  # prompt tokens a batch, in every engine
GPU_CHUNK = 4096  # on a GPU, where a prompt is one batch elsewhere too
DECODED = 128  # tokens that may follow the prompt
FIRST, USED = 300, 20011  # ids are spread over ordinary tokens; a prime, so that none repeats early


def prompt_tokens(n: int) -> list[int]:
    """n ordinary token ids of a vocabulary of 20400 and more."""
    return [FIRST + 7919 * i % USED for i in range(n)]


def room(depth: int) -> int:
    """Cells for a prompt of `depth` tokens and what is decoded behind it, in whole 256s."""
    return -(-(depth + DECODED) // 256) * 256
