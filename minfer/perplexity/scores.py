"""Scores of logits, and what a text's scores come to. Pure functions over numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from minfer.format import Floats

Float64: TypeAlias = NDArray[np.float64]

BLOCK_VALUES = 1 << 18  # logits widened to float64 at a time


@dataclass(frozen=True, eq=False)
class Scores:
    """One number a scored token, [n] each.

    nll: -log of the probability of the token that came, nats. kl: Kullback-Leibler divergence of
    the distribution from the reference's, sum p log(p / q), nats. agrees: whether the likeliest
    token is the reference's. drift: the largest difference of a logit from the reference's.
    """

    nll: Float64
    kl: Float64
    agrees: NDArray[np.bool_]
    drift: Float64

    @classmethod
    def join(cls, parts: Sequence[Scores]) -> Scores:
        """The scores of consecutive tokens as one."""
        return cls(
            np.concatenate([part.nll for part in parts]),
            np.concatenate([part.kl for part in parts]),
            np.concatenate([part.agrees for part in parts]),
            np.concatenate([part.drift for part in parts]),
        )


def log_softmax(logits: Floats) -> Float64:
    """Log probabilities [n, n_vocab] in float64 of finite logits; a row depends on itself alone."""
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x


def score(logits: Sequence[Floats], targets: Sequence[int]) -> list[Scores]:
    """Score the same tokens under several models; the first one is the reference of the rest.

    logits: one array a model, [n, n_vocab], finite. targets: the n tokens that came. Works in
    float64 on a few rows at a time.
    """
    came = np.asarray(targets, dtype=np.int64)
    n, n_vocab = logits[0].shape
    step = max(1, BLOCK_VALUES // n_vocab)
    blocks = [
        _score_block([rows[at : at + step] for rows in logits], came[at : at + step])
        for at in range(0, max(n, 1), step)
    ]
    return [Scores.join(parts) for parts in zip(*blocks, strict=True)]


def _score_block(logits: Sequence[Floats], came: NDArray[np.int64]) -> list[Scores]:
    rows = np.arange(len(came))
    log_p, best = log_softmax(logits[0]), logits[0].argmax(axis=1)
    none = np.zeros(len(came))
    scores = [Scores(-log_p[rows, came], none, np.ones(len(came), np.bool_), none)]
    p = np.exp(log_p) if len(logits) > 1 else log_p
    for other in logits[1:]:
        log_q = log_softmax(other)
        nll = -log_q[rows, came]
        np.subtract(log_p, log_q, out=log_q)
        log_q *= p
        drift = np.abs(other - logits[0]).max(axis=1).astype(np.float64)
        scores.append(Scores(nll, log_q.sum(axis=1), other.argmax(axis=1) == best, drift))
    return scores


@dataclass(frozen=True)
class Versus:
    """One engine against the reference, over the same tokens.

    ratio: of the perplexities. ratio_error: its standard error, from the paired differences.
    kl_mean, kl_max: nats a token. top1_agreement: share of tokens. prob_rms: root mean square
    difference of the probability of the token that came. drift_max: largest difference of a logit.
    """

    ratio: float
    ratio_error: float | None
    kl_mean: float
    kl_max: float
    top1_agreement: float
    prob_rms: float
    drift_max: float


@dataclass(frozen=True)
class Result:
    """Perplexity over `n_scored` tokens: exp of the mean of `nll`, nats a token.

    perplexity_error: standard error, as if tokens were independent; None for a single token.
    versus: None for the reference.
    """

    n_scored: int
    nll: float
    perplexity: float
    perplexity_error: float | None
    versus: Versus | None


def summarize(scores: Sequence[Sequence[Scores]]) -> list[Result]:
    """The results of what `measure` gave: one list of scores a window, one result an engine."""
    joined = [Scores.join(parts) for parts in zip(*scores, strict=True)]
    return [_result(own, joined[0] if i else None) for i, own in enumerate(joined)]


def _result(own: Scores, reference: Scores | None) -> Result:
    perplexity, error = _exp_of_mean(own.nll)
    versus = None
    if reference is not None:
        ratio, ratio_error = _exp_of_mean(own.nll - reference.nll)
        change = np.exp(-own.nll) - np.exp(-reference.nll)
        versus = Versus(
            ratio=ratio,
            ratio_error=ratio_error,
            kl_mean=math.fsum(own.kl) / len(own.kl),
            kl_max=float(own.kl.max()),
            top1_agreement=float(own.agrees.mean()),
            prob_rms=math.sqrt(math.fsum(change * change) / len(change)),
            drift_max=float(own.drift.max()),
        )
    return Result(len(own.nll), math.fsum(own.nll) / len(own.nll), perplexity, error, versus)


def _exp_of_mean(values: Float64) -> tuple[float, float | None]:
    """exp of the mean, and its standard error: exp(mean) times the error of the mean."""
    n = len(values)
    with np.errstate(over="ignore"):
        result = float(np.exp(math.fsum(values) / n))
    return result, result * float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else None
