"""The errors of all heads as a picture."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import numpy as np

from minfer import atomic
from minfer.errors import Refusal
from minfer.kv.session.pieces import WHICH
from minfer.sessions.advice import Advice, by_layer


def refuse_without_matplotlib(path: str) -> None:
    """Refuse before minutes of work: a name that is no .png, and a missing library."""
    if Path(path).suffix != ".png":
        raise Refusal("0.3", f"{path} is no name of a .png file", {"path": path})
    if importlib.util.find_spec("matplotlib") is None:
        raise Refusal("0.2", "matplotlib is not installed; pip install 'minfer[bench]'")


def draw(advice: Advice, path: str) -> None:
    """Heat maps of heads by layers, in percent: a row a format, K beside V."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [one for one in advice.candidates if one.planes]
    if not shown:
        raise Refusal("4.2", "no narrower cache type can be used, so there is nothing to draw")
    figure, axes = pyplot.subplots(
        len(shown), len(WHICH), figsize=(9, 1 + 2.4 * len(shown)), dpi=130, squeeze=False
    )
    for row, candidate in zip(axes, shown, strict=True):
        for panel, which in zip(row, WHICH, strict=True):
            errors = 100 * np.array(by_layer(candidate, which)).T
            image = panel.imshow(errors, aspect="auto", origin="lower", cmap="viridis")
            panel.set(
                title=f"{candidate.fmt}: relative rms error of {which.upper()}, %",
                xlabel="layer",
                ylabel="head",
            )
            panel.yaxis.get_major_locator().set_params(integer=True)
            figure.colorbar(image, ax=panel)
    figure.tight_layout()
    made = io.BytesIO()
    figure.savefig(made, format="png")
    pyplot.close(figure)
    with atomic.replacing(path, made.tell()) as part:
        part.write(made.getvalue())
