"""Choosing the next token from logits: greedily, or at random by a shaped distribution.

The steps and their order are those of llama.cpp's default chain: bias, penalties, top-k, top-p,
min-p, temperature, draw. What each does, with its formula and source, is on docs/sampling.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from minfer.errors import Refusal
from minfer.format import Floats
from minfer.kv.checks import whole_number
from minfer.models.ranking import Doubles, Ids, draw, highest, kept, weights

SEED_BITS = 32  # of a drawn seed; short enough to type again
LARGEST_SEED = 2**64 - 1
RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repeat_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}
BIAS = (-1000.0, 1000.0)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the default is greedy, and every other option is off.

    temperature: divides logits, 0 takes the highest. top_k: how many of the highest stay, 0 all.
    top_p: the fewest that hold this much probability stay, 1 all; one always stays. min_p: what has
    this fraction of the highest probability stays, 0 all. repeat_penalty (1 is off),
    presence_penalty and frequency_penalty (0 is off): for tokens among the last `repeat_last_n`,
    the prompt's included. logit_bias: what is added to a token's logit, by id; -inf bans it. seed:
    the same seed gives the same text; None draws one.

    Refuses a value outside its range, naming both, and a token with two biases.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            object.__setattr__(self, name, _number(getattr(self, name), name, low, high))
        for name, low in (("top_k", 0), ("repeat_last_n", 1)):
            object.__setattr__(self, name, whole_number(getattr(self, name), name, "10", low=low))
        if self.seed is not None:
            seed = whole_number(self.seed, "seed", "10", high=LARGEST_SEED)
            object.__setattr__(self, "seed", seed)
        biases: dict[int, float] = {}
        for given, bias in _pairs(self.logit_bias):
            token = whole_number(given, "logit_bias of token", "10")
            value = _bias(bias, token)
            if token in biases:
                raise Refusal(
                    "0.3",
                    f"logit_bias gives token {token} twice, {biases[token]:g} and {value:g}; "
                    "give it one bias",
                    {"token": token, "biases": (biases[token], value)},
                )
            biases[token] = value
        object.__setattr__(self, "logit_bias", tuple(sorted(biases.items())))

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens change anything."""
        return (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def as_dict(self) -> dict[str, Any]:
        """The options by name, for JSON; a ban is the text "-inf"."""
        biases = {
            str(token): bias if math.isfinite(bias) else str(bias)
            for token, bias in dict(self.logit_bias).items()
        }
        return dataclasses.asdict(self) | {"logit_bias": biases}


def _bias(value: object, token: int) -> float:
    if value == -math.inf:
        return -math.inf
    return _number(value, f"logit_bias of token {token}", *BIAS, or_else=" or -inf")


def _pairs(biases: Any) -> list[tuple[Any, Any]]:
    try:
        pairs = biases.items() if isinstance(biases, Mapping) else biases
        return [(token, bias) for token, bias in pairs]
    except (TypeError, ValueError):
        message = (
            f"logit_bias {biases!r} is no mapping; give biases by token id, such as {{42: -1}}"
        )
        raise Refusal("10", message) from None


def _number(value: object, name: str, low: float, high: float, or_else: str = "") -> float:
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # a whole number beyond all floats
            number = float(value)
    if low <= number <= high:
        return number
    raise Refusal(
        "10",
        f"{name} {value!r} is outside {low:g} .. {high:g}{or_else}; give a number in that range",
        {"name": name, "value": value, "low": low, "high": high},
    )


class Sampler:
    """Chooses token after token for one sequence; holds its random state and its last tokens.

    sampling: with the seed in use, the drawn one where none was given. n_vocab: how many logits
    there are. Refuses biases for tokens that are none, and a ban of every token.
    """

    def __init__(self, sampling: Sampling, n_vocab: int) -> None:
        self.n_vocab = whole_number(n_vocab, "n_vocab", "10", low=1)
        if sampling.seed is None and sampling.temperature > 0:
            sampling = dataclasses.replace(sampling, seed=secrets.randbits(SEED_BITS))
        self.sampling = sampling
        biases = dict(sampling.logit_bias)
        for token in biases:
            whole_number(token, "logit_bias of token", "10", high=self.n_vocab - 1)
        self._biased = np.array([*biases], np.intp)
        self._bias = np.array([*biases.values()], np.float64)
        banned = int(np.count_nonzero(self._bias == -np.inf))
        self._n_allowed = self.n_vocab - banned
        if not self._n_allowed:
            raise Refusal(
                "10",
                f"logit_bias bans all {n_vocab} tokens; leave at least one",
                {"n_vocab": n_vocab, "banned": banned},
            )
        self._random = np.random.Generator(np.random.PCG64(sampling.seed or 0))
        self._last: deque[int] = deque(maxlen=sampling.repeat_last_n)

    def see(self, tokens: Iterable[int]) -> None:
        """Count `tokens`, a prompt's, among the last ones that penalties look at.

        Refuses ids outside the vocabulary, before any is counted.
        """
        self._last.extend(self._checked(tokens))

    def _checked(self, tokens: Iterable[int]) -> list[int]:
        end = self.n_vocab - 1
        return [whole_number(token, "token", "7.5", high=end) for token in tokens]

    def pick(self, logits: Floats, *, position: int) -> int:
        """The next token after `logits` [n_vocab]; it counts among the last ones from now on.

        Of equal logits the lowest id comes first. position: of the token that gave the logits, for
        the message. Refuses logits that are not all finite (contract 4.2).
        """
        scores, options = self._scores(logits, position), self.sampling
        if options.temperature == 0:
            token = int(np.argmax(scores))
        else:
            token = draw(scores, self._kept(scores), options.temperature, self._random.random())
        self._last.append(token)
        return token

    def distribution(self, logits: Floats, *, position: int) -> tuple[Ids, Doubles]:
        """What `pick` would draw from: ids and their probabilities, float64, highest first.

        Nothing is drawn or remembered. Refuses what `pick` refuses.
        """
        scores, temperature = self._scores(logits, position), self.sampling.temperature
        if temperature == 0:
            return np.array([np.argmax(scores)]), np.ones(1)
        ids = highest(scores, self._kept(scores))
        shares = weights(scores[ids], float(scores[ids[0]]), temperature)
        return ids, shares / shares.sum()

    def state(self) -> dict[str, Any]:
        """Random state and last tokens, as plain JSON; `restore` takes it back."""
        return {"random": self._random.bit_generator.state, "last": list(self._last)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where the sampler that gave `state` stood.

        Refuses what is no such state, and tokens of a larger vocabulary.
        """
        random = np.random.PCG64()
        try:
            random.state = state["random"]
            last = self._checked(state["last"])
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            raise Refusal("10", f"this is no state of a sampler, {why}; start a new one") from None
        self._random = np.random.Generator(random)
        self._last.clear()
        self._last.extend(last)

    def _kept(self, scores: Doubles) -> int:
        options = self.sampling
        return kept(scores, self._n_allowed, options.top_k, options.top_p, options.min_p)

    def _scores(self, logits: Floats, position: int) -> Doubles:
        """Logits with bias and penalties, float64 [n_vocab]; -inf where a token is banned."""
        if logits.shape != (self.n_vocab,):
            shape = list(logits.shape)
            raise Refusal("10", f"logits have shape {shape}; wanted is [{self.n_vocab}]")
        refuse_damaged(logits, position)
        scores = logits.astype(np.float64)
        scores[self._biased] += self._bias
        if self.sampling.penalizes and self._last:
            counts = Counter(self._last)
            seen, times = np.array(list(counts)), np.array(list(counts.values()))
            factor, at = self.sampling.repeat_penalty, scores[seen]
            at = np.where(at > 0, at / factor, at * factor)
            at -= self.sampling.presence_penalty + self.sampling.frequency_penalty * times
            scores[seen] = at
        return scores


def refuse_damaged(logits: Floats, position: int) -> None:
    """Refuse logits that are not all finite (contract 4.2)."""
    finite = np.isfinite(logits)
    if not finite.all():
        bad = int(np.count_nonzero(~finite))
        raise Refusal(
            "4.2",
            f"{bad} of {logits.size} logits at position {position} are not finite: the cache or "
            "the weights hold damaged values; start again, with an f32 cache if this returns",
            {"position": position, "bad": bad},
        )
