"""What launchers refuse before they look at values."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from minfer.errors import Refusal  # noqa: E402
from minfer.kernels_triton import _arguments  # noqa: E402


def test_a_tensor_on_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_arguments, "home", lambda: torch.device("cuda", 1))

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 0)

    rows = torch.zeros(2, 8).as_subclass(Elsewhere)
    with pytest.raises(Refusal, match="rows lies on cuda:0 and kernels run on cuda:1") as caught:
        _arguments.floats(rows, "rows", 2)
    assert caught.value.rule == "10"
