"""`minfer chat`: a conversation with a model."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from minfer.chat.program import Program
from minfer.chat.reading import Lines, Reader, Terminal, as_typed, checked_text, unseen_keys
from minfer.chat.session import Session
from minfer.chat.showing import show
from minfer.chat.signals import Signals
from minfer.commands.loading import load_engine, note_long_context
from minfer.commands.options import biases_of, sampling_of
from minfer.kv.checks import whole_number


def chat(args: argparse.Namespace) -> int:
    """Talk until the input ends; the session's files are checked before the model is loaded.

    Returns the exit code: 128 and the number of the signal that ended it, else 0.
    """
    if args.max_tokens is not None:
        whole_number(args.max_tokens, "-n", "10", low=1)
    if args.system is not None:
        checked_text(args.system, "--system")
    sampling = sampling_of(args)
    session = Session(None if args.session is None else Path(args.session), args.system)
    terminal = not args.json and all(s and s.isatty() for s in (sys.stdin, sys.stdout))
    if terminal:  # a missing package is told before the model is loaded
        import prompt_toolkit.utils

        terminal = not prompt_toolkit.utils.is_dumb_terminal()  # which reads lines like a pipe
    engine = load_engine(args, args.cache_type, args.n_ctx)
    if args.session is not None:
        engine.store.refuse_several_stretches("save")
    sampling = replace(sampling, logit_bias=biases_of(args, engine.tokenizer))
    engine.warm_up()
    note_long_context(engine)
    with unseen_keys() if terminal else nullcontext(), Signals() as signals:
        talk, opened = session.open(engine, sampling)
        reader: Reader = Lines(sys.stdin.buffer if sys.stdin else None, signals)
        if terminal:
            earlier = [as_typed(m["content"]) for m in talk.messages if m["role"] == "user"]
            earlier += [as_typed(session.unanswered)] if session.unanswered else []
            reader = Terminal(signals, earlier)
        program = Program(
            talk,
            session,
            opened,
            reader=reader,
            show=show(as_json=args.json, terminal=terminal),
            signals=signals,
            max_tokens=args.max_tokens,
            stops=args.stop,
        )
        try:
            program.run()
        except OSError:
            if not signals.leave:  # else the terminal that it tells of has gone away
                raise
    return 128 + signals.leave if signals.leave else 0
