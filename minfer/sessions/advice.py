"""Which cache type suits a text: what narrower ones do to its rows and to what comes after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minfer.engine import Engine
from minfer.errors import Refusal
from minfer.format import KvFormat, refuse_odd_blocks
from minfer.kv.session.header import damaged
from minfer.kv.session.pieces import WHICH
from minfer.kv.session.reading import SessionFile
from minfer.offload import required
from minfer.perplexity import Scores, Versus, Window, summarize
from minfer.perplexity.feeding import SEQ, reserved, scored_pieces
from minfer.prompts import checked_prompt
from minfer.sessions.deviation import Deviation, Planes
from minfer.sessions.progress import bar
from minfer.sessions.rows import Codec
from minfer.sessions.wording import counted, percent

NARROW = (KvFormat.F16, KvFormat.Q8_0)  # the smallest last
KL_MEAN, KL_MAX, TOP1 = 0.01, 1.0, 0.95  # what a format may cost at most; of top-1, at least
TOKENS = "stream_tokens"  # the name that a chat keeps its tokens under


@dataclass(frozen=True)
class Candidate:
    """One format, against f32.

    planes: how far rows lie from those of f32 once stored. versus: what that does to predictions;
    None where the format cannot be used. against: why it is not recommended.
    """

    fmt: KvFormat
    cache_bytes: int
    planes: Planes
    versus: Versus | None
    against: tuple[str, ...]


@dataclass(frozen=True)
class Advice:
    """What was found over `n_tokens` tokens; `cache_bytes` is that of f32."""

    n_tokens: int
    cache_bytes: int
    candidates: tuple[Candidate, ...]

    @property
    def recommended(self) -> KvFormat:
        """The smallest format that nothing speaks against."""
        good = [one.fmt for one in self.candidates if not one.against]
        return good[-1] if good else KvFormat.F32


def session_tokens(file: SessionFile) -> list[int] | None:
    """The tokens that the host of a session says its rows are of; None where it does not."""
    part = file.host_part
    state = {} if part.version is None else part.state(file.where)
    if TOKENS not in state:
        return None
    tokens = state[TOKENS]
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise damaged(file.where, f"{TOKENS} in its host part is no list of token ids")
    return tokens


def advise(engine: Engine, tokens: Sequence[int], kind: str, *, progress: bool = False) -> Advice:
    """Feed the tokens to `engine`, whose cache is f32, and to one of each narrower format.

    kind: whose numerics. progress: a bar on stderr. Refuses fewer than two tokens, ids outside the
    vocabulary, and caches that do not fit in memory.
    """
    ids = checked_prompt(tokens, engine.n_vocab)
    if len(ids) < 2:
        raise Refusal("1", "one token has nothing before it; give two or more", {"tokens": 1})
    out = _impossible(engine)
    while True:
        formats = [fmt for fmt in NARROW if fmt not in out]
        try:
            versus, planes = _replay(engine, formats, ids, kind, progress)
            break
        except Refusal as refusal:  # logits that are not finite
            fmt = refusal.facts.get("fmt")
            if fmt not in [one.value for one in formats]:
                raise
            out[KvFormat(fmt)] = refusal.message
    found = tuple(
        Candidate(
            fmt,
            engine.cache_bytes(fmt),
            planes.get(fmt, {}),
            versus.get(fmt),
            (out[fmt],) if fmt in out else tuple(_against(versus[fmt], planes[fmt])),
        )
        for fmt in NARROW
    )
    return Advice(len(ids), engine.cache_bytes(), found)


def _impossible(engine: Engine) -> dict[KvFormat, str]:
    """Formats that heads of this size cannot have, and why."""
    store = engine.store
    try:
        refuse_odd_blocks(KvFormat.Q8_0, store.head_dim, store.n_head_kv * store.head_dim)
    except Refusal as refusal:
        return {KvFormat.Q8_0: refusal.message}
    return {}


def _replay(
    engine: Engine, formats: Sequence[KvFormat], ids: list[int], kind: str, progress: bool
) -> tuple[dict[KvFormat, Versus], dict[KvFormat, Planes]]:
    with required(need for fmt in formats for need in engine.store.needs(fmt)):
        engines = [engine, *(engine.with_cache(fmt) for fmt in formats)]
    window, parts = Window(0, 1, len(ids)), []
    with (
        reserved(engines, len(ids)),
        bar(len(ids) - 1, "replaying", " tokens", show=progress) as update,
    ):
        for part in scored_pieces(engines, ids, window, kind):
            parts.append(part)
            update(len(part[0].nll))
        planes = {fmt: _planes(engine, fmt) for fmt in formats}
    _, *results = summarize([[Scores.join(own) for own in zip(*parts, strict=True)]])
    found = [result.versus for result in results if result.versus is not None]
    return dict(zip(formats, found, strict=True)), planes


def _planes(engine: Engine, fmt: KvFormat) -> Planes:
    """How far the rows of `SEQ` come to lie from themselves when stored as `fmt`."""
    store = engine.store
    codec, found = Codec(fmt, store.n_head_kv, store.head_dim), {}
    for layer in range(store.n_layer):
        for which in WHICH:
            rows = store.export(SEQ, layer, which)
            found[layer, which] = Deviation(store.n_head_kv)
            found[layer, which].add(rows, codec.decode(codec.encode(rows)))
    return found


def _against(versus: Versus, planes: Planes) -> list[str]:
    """What speaks against a format, with the limit that it misses."""
    lost = sum(deviation.lost for deviation in planes.values())
    found = [f"overflow in {counted(lost, 'element')} of its rows"] if lost else []
    if versus.kl_mean > KL_MEAN:
        found.append(f"mean KL {versus.kl_mean:.2g} nats a token, limit {KL_MEAN}")
    if versus.kl_max > KL_MAX:
        found.append(f"largest KL {versus.kl_max:.2g} nats, limit {KL_MAX}")
    if versus.top1_agreement < TOP1:
        same, least = percent(versus.top1_agreement, 4), percent(TOP1, 2)
        found.append(f"same likeliest token in {same}, limit {least}")
    return found


def by_layer(candidate: Candidate, which: str) -> list[list[float]]:
    """Relative errors of K or V rows, [layer][head]."""
    planes = candidate.planes.items()
    return [one.relative_by_head.tolist() for (_, of), one in planes if of == which]


def worst_heads(candidate: Candidate, n: int) -> list[tuple[int, str, int, float]]:
    """The `n` heads with the largest relative error: layer, "k" or "v", head, error."""
    errors = [
        (layer, which, head, float(error))
        for (layer, which), deviation in candidate.planes.items()
        for head, error in enumerate(deviation.relative_by_head)
    ]
    return sorted(errors, key=lambda one: -one[3])[:n]
