"""Environment flags: unset, empty and 0 are off, 1 is on, anything else is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from minfer import settings
from minfer.errors import Refusal

FLAG = "MINFER_NO_FUSED_Q8_KV"


@pytest.mark.parametrize(("value", "on"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_flag(monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool) -> None:
    monkeypatch.delenv(FLAG, raising=False)
    if value is not None:
        monkeypatch.setenv(FLAG, value)
    assert settings.flag(FLAG) is on


@pytest.mark.parametrize("value", ["true", "yes", "2", " 1", "off"])
def test_other_values_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(FLAG, value)
    with pytest.raises(Refusal, match=f"{FLAG}={value!r}") as refused:
        settings.flag(FLAG)
    assert refused.value.rule == "9.5"
    assert refused.value.facts == {"name": FLAG, "value": value}


def test_empty_cache_type_means_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINFER_CACHE_TYPE", "")
    assert settings.cache_type() is None
    monkeypatch.setenv("MINFER_CACHE_TYPE", "q8")
    assert settings.cache_type() == "q8"


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MINFER_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert settings.cache_dir() == tmp_path / "minfer"
    monkeypatch.setenv("MINFER_CACHE_DIR", str(tmp_path / "mine"))
    assert settings.cache_dir() == tmp_path / "mine"


def test_values_show_what_is_set_and_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in settings.SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    monkeypatch.setenv("MINFER_CACHE_TYPE", "q8")
    monkeypatch.setenv(FLAG, "")
    assert settings.values() == {
        **{setting.name: setting.default for setting in settings.SETTINGS},
        "MINFER_CACHE_TYPE": "q8",
        "MINFER_CACHE_DIR": str(settings.cache_dir()),
    }


def test_flags_are_off_by_default() -> None:
    off = {setting.name for setting in settings.SETTINGS if setting.default == "0"}
    assert off == set(settings.FLAGS)
    assert {"MINFER_SANITIZE_CELLS", "MINFER_NO_KV_DEFRAG"} < off


def test_every_flag_is_checked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.FLAGS:
        monkeypatch.delenv(name, raising=False)
    settings.check_flags()
    for name in settings.FLAGS:
        monkeypatch.setenv(name, "yes")
        with pytest.raises(Refusal, match=name):
            settings.check_flags()
        monkeypatch.delenv(name)


def test_a_home_that_is_nobodys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINFER_CACHE_DIR", "~no-such-user/x")
    with pytest.raises(Refusal, match="names no home folder"):
        settings.cache_dir()


def test_every_setting_is_documented() -> None:
    page = (Path(__file__).parent.parent / "docs" / "settings.md").read_text()
    for setting in settings.SETTINGS:
        assert f"`{setting.name}`" in page
        assert f"`{setting.default}`" in page
