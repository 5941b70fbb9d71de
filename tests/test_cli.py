"""The command line: what it prints, one clear line for every refusal, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import write_tiny_gguf

import minfer
from minfer import Engine, Limits, registry
from minfer.commands import inspect

ROOT = Path(__file__).parent.parent
RUN = ("-p", "hello the cat", "-n", 5, "--n-ctx", 64)


def test_run_prints_text_and_a_summary(call, tiny_gguf: Path) -> None:
    done = call("run", tiny_gguf, *RUN, "--cache-type", "q8_0", "--receipt")
    assert done.code == 0
    assert len(done.out.strip()) > 0
    assert "cache q8_0" in done.err and "3.76 times smaller than f32's" in done.err
    assert "decode 4 tokens" in done.err
    assert "attn_window_split on cpu, q8_0: the default for this shape" in done.err


def test_run_json_is_one_object(call, tiny_gguf: Path) -> None:
    done = call("run", tiny_gguf, *RUN, "--json")
    report = json.loads(done.out)
    notices = [line for line in done.err.splitlines() if not line.startswith("minfer: compiling")]
    assert done.code == 0 and notices == []
    assert set(report) >= {"prompt_tokens", "tokens", "text", "cache_type", "cache_bytes"}
    assert report["cache_type"] == "f32"
    assert report["cache_bytes"] == 2 * 2 * 64 * 64 * 4  # k and v, layers, cells, words, bytes
    assert len(report["tokens"]) == 5
    assert report["prefill_tokens_per_second"] > 0 < report["decode_tokens_per_second"]
    chosen = {(r["op"], r["variant"]) for r in report["receipts"]}
    assert {("attn_window", "split"), ("attn_window", "flash")} <= chosen
    text = call("run", tiny_gguf, *RUN).out
    assert text == report["text"] + "\n"


def test_prompt_from_a_file(call, tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("hello the cat")
    direct = call("run", tiny_gguf, *RUN, "--json")
    filed = call("run", tiny_gguf, "-f", tmp_path / "p.txt", *RUN[2:], "--json")
    assert json.loads(filed.out)["tokens"] == json.loads(direct.out)["tokens"]
    missing = call("run", tiny_gguf, "-f", tmp_path / "none.txt")
    assert missing.code == 2 and f"cannot read the text from {tmp_path / 'none.txt'}" in missing.err


def test_a_prompt_is_read_as_it_stands(
    call, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "hello\r\nthe c\u00e9\r"
    tokens = Engine.load(tiny_gguf, n_ctx=8).encode(text)
    path = tmp_path / "p.txt"
    path.write_bytes(text.encode())
    argv = ("-n", 1, "--n-ctx", 64, "--json")
    filed = json.loads(call("run", tiny_gguf, "-f", path, *argv).out)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    piped = json.loads(call("run", tiny_gguf, "-f", "-", *argv).out)
    assert filed["prompt_tokens"] == piped["prompt_tokens"] == tokens
    path.write_bytes(b"caf\xe9 au lait")
    latin = call("run", tiny_gguf, "-f", path, *argv)
    assert (latin.code, latin.out) == (2, "")
    assert f"byte 3 of {path} (0xe9) is no UTF-8; convert the text to UTF-8" in latin.err


def test_chat_wraps_the_prompt(call, tiny_gguf: Path) -> None:
    plain = json.loads(call("run", tiny_gguf, *RUN, "--json").out)["prompt_tokens"]
    chat = json.loads(call("run", tiny_gguf, *RUN, "--chat", "--json").out)["prompt_tokens"]
    told = json.loads(call("run", tiny_gguf, *RUN, "--system", "be brief", "--json").out)
    assert chat[0] == 1 and len(chat) > len(plain)  # <|im_start|>
    assert len(told["prompt_tokens"]) > len(chat)


def test_run_samples_by_a_seed_that_it_tells(call, tiny_gguf: Path) -> None:
    flags = ("--temp", 20, "--top-k", 9, "--repeat-penalty", 1.5, "--repeat-last-n", 4)
    first = json.loads(call("run", tiny_gguf, *RUN, *flags, "--json").out)
    assert first["finish_reason"] == "length" and first["stop"] is None
    wanted = {"temperature": 20.0, "top_k": 9, "repeat_penalty": 1.5, "repeat_last_n": 4}
    assert first["sampling"].items() >= (wanted | {"top_p": 1.0, "logit_bias": {}}).items()
    assert first["sampling"]["seed"] == first["seed"] >= 0
    again = call("run", tiny_gguf, *RUN, *flags, "--seed", first["seed"])
    assert again.out == first["text"] + "\n" and f"seed {first['seed']};" in again.err
    greedy = json.loads(call("run", tiny_gguf, *RUN, "--json").out)
    assert greedy["seed"] is None and greedy["tokens"] != first["tokens"]


def test_run_ends_before_a_stop(call, tiny_gguf: Path) -> None:
    text = json.loads(call("run", tiny_gguf, *RUN, "--json").out)["text"]
    stop = text[1:3]
    report = json.loads(call("run", tiny_gguf, *RUN, "--json", "--stop", stop).out)
    assert (report["finish_reason"], report["stop"]) == ("stop", stop)
    assert report["text"] == text[: text.index(stop)] and len(report["tokens"]) == 3
    shown = call("run", tiny_gguf, *RUN, "--stop", "no such text", "--stop", stop)
    assert shown.out == report["text"] + "\n" and f"ended by --stop {stop!r}; " in shown.err
    whole = call("run", tiny_gguf, *RUN)
    assert "; ended by -n; " in whole.err and "; decode 4 tokens; " in whole.err


def test_run_bans_a_token_by_id_or_text(call, tiny_gguf: Path) -> None:
    first = json.loads(call("run", tiny_gguf, *RUN, "--json").out)["tokens"][0]
    banned = json.loads(call("run", tiny_gguf, *RUN, "--json", "--logit-bias", f"{first}=-inf").out)
    assert first not in banned["tokens"]
    assert banned["sampling"]["logit_bias"] == {str(first): "-inf"}
    forced = call("run", tiny_gguf, *RUN, "--json", "--logit-bias", "=the=9", "--stop", "=")
    assert forced.code == 2 and "'=the' is 2 tokens" in forced.err
    forced = call("run", tiny_gguf, *RUN, "--json", "--logit-bias", " cat=1000")
    assert json.loads(forced.out)["text"] == " cat" * 5
    ended = call("run", tiny_gguf, *RUN, "--json", "--logit-bias", "<|im_end|>=1000")
    assert json.loads(ended.out)["finish_reason"] == "end"


def test_a_token_has_one_bias(call, tiny_gguf: Path) -> None:
    cat = Engine.load(tiny_gguf, n_ctx=8).encode(" cat")[-1]
    for first in (f"{cat}=1", " cat=1"):
        done = call("run", tiny_gguf, *RUN, "--logit-bias", first, "--logit-bias", f"{cat}=2")
        assert (done.code, done.out) == (2, "")
        assert f"logit_bias gives token {cat} twice, 1 and 2;" in done.err


def test_typed_control_tokens_stay_text(call, tiny_gguf: Path) -> None:
    typed = ("-p", "<|im_end|>\n<|im_start|>system\n", "--chat", "-n", 1, "--n-ctx", 128)
    report = json.loads(call("run", tiny_gguf, *typed, "--json").out)
    assert [i for i in report["prompt_tokens"] if i < 3] == [1, 2, 1]


REFUSED = {
    "missing file": (("run", "nowhere.gguf", "-p", "x"), 2, "nowhere.gguf"),
    "n-ctx 0": (("run", "TINY", "-p", "x", "--n-ctx", 0), 2, "n_ctx 0 is below 1"),
    "n 0": (("run", "TINY", "-p", "x", "-n", 0), 2, "-n 0 is below 1"),
    "threads 0": (("run", "TINY", "-p", "x", "--threads", 0), 2, "threads 0 is below 1"),
    "threads": (("run", "TINY", "-p", "x", "--threads", 10**6), 2, "1000000 is above 1024"),
    "long prompt": (("run", "TINY", "-p", "cat " * 90, "--n-ctx", 64), 2, "n_ctx is 64"),
    "empty prompt": (("run", "TINY", "-p", ""), 2, "no tokens"),
    "empty q8_0": (("run", "TINY", "-p", "", "--cache-type", "q8_0"), 2, "no tokens"),
    "cache type": (("run", "TINY", "-p", "x", "--cache-type", "q8"), 2, "cache type 'q8'"),
    "odd heads": (("run", "D16", "-p", "x", "--cache-type", "q8_0"), 2, "head_dim is 16"),
    "metal": (("run", "TINY", "-p", "x", "--device", "metal"), 2, "device metal needs a Mac"),
    "no gguf": (("run", "TEXT", "-p", "x"), 3, "GGUF"),
    "unknown op": (("explain", "attention"), 2, "op 'attention' is none of"),
    "unknown variant": (("explain", "attn_map", "--variant", "x"), 2, "no variant 'x'"),
    "unknown format": (("explain", "attn_map", "--fmt", "q9"), 2, "cache type 'q9'"),
    "no heads": (("explain", "attn_map", "--n-head", 0), 2, "n_head is 0"),
    "unknown model": (("pull", "gpt5"), 2, "smollm2"),
    "temperature": (("run", "TINY", "-p", "x", "--temp", -1), 2, "temperature -1.0 is outside 0"),
    "no number": (("run", "TINY", "-p", "x", "--temp", "warm"), 2, "invalid float value: 'warm'"),
    "top-p": (("run", "TINY", "-p", "x", "--temp", 1, "--top-p", 2), 2, "top_p 2.0 is outside"),
    "no temperature": (("run", "TINY", "-p", "x", "--top-k", 4), 2, "give --temp too"),
    "seed": (("run", "TINY", "-p", "x", "--seed", -4), 2, "seed -4 is below 0"),
    "empty stop": (("run", "TINY", "-p", "x", "--stop", ""), 2, "stop string ''"),
    "bias": (("run", "TINY", "-p", "x", "--logit-bias", "5"), 2, "is not TOKEN=BIAS"),
    "bias nan": (("run", "TINY", "-p", "x", "--logit-bias", "5=nan"), 2, "is not TOKEN=BIAS"),
    "bias inf": (("run", "TINY", "-p", "x", "--logit-bias", "5=inf"), 2, "inf is outside -1000"),
    "bias id": (("run", "TINY", "-p", "x", "--logit-bias", "289=1"), 2, "token 289 is above 288"),
    "bias digits": (("run", "TINY", "-p", "x", "--logit-bias", "9" * 5000 + "=1"), 2, "is above"),
    "bias text": (("run", "TINY", "-p", "x", "--logit-bias", "zq=1"), 2, "is 2 tokens"),
    "unknown option": (("run", "TINY", "-p", "x", "--beams", 1), 2, "--beams"),
    "no prompt": (("run", "TINY"), 2, "--prompt"),
}


@pytest.mark.parametrize(("argv", "code", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_refusal_is_one_clear_line(
    call, tiny_gguf: Path, tmp_path: Path, argv: tuple[object, ...], code: int, words: str
) -> None:
    (tmp_path / "text.gguf").write_text("not a model at all")
    write_tiny_gguf(tmp_path / "d16.gguf", head_dim=16)
    files = {"TINY": tiny_gguf, "TEXT": tmp_path / "text.gguf", "D16": tmp_path / "d16.gguf"}
    done = call(*(files.get(a, a) if isinstance(a, str) else a for a in argv))
    assert done.code == code
    assert done.out == ""
    assert done.err.count("\n") == 1 and words in done.err, done.err


CUTS = {"header": b"GGUF", "metadata": b"llama.block_count", "tensor table": b"blk.1.ffn_down"}


@pytest.mark.parametrize("place", [*CUTS, "last byte"])
def test_a_cut_model_is_a_damaged_file(call, tiny_gguf: Path, tmp_path: Path, place: str) -> None:
    data = tiny_gguf.read_bytes()
    end = data.index(CUTS[place]) + 9 if place in CUTS else len(data) - 1
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[:end])
    done = call("run", cut, "-p", "x")
    assert done.code == 3
    assert done.err.count("\n") == 1 and "cut.gguf" in done.err


def test_bad_cache_type_in_the_environment(
    call, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINFER_CACHE_TYPE", "q8")
    done = call("run", tiny_gguf, "-p", "x")
    assert done.code == 2 and "cache type 'q8'" in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "prog"),
    [
        (("chat", "m", "-x\x1b"), "minfer chat"),
        (("session", "inspect", "f", "-x\x1b"), "minfer session inspect"),
    ],
)
def test_an_unknown_option_is_one_of_its_command(call, argv: tuple[str, ...], prog: str) -> None:
    done = call(*argv)
    told = f"{prog}: unrecognized arguments: -x\\x1b (see {prog} --help)\n"
    assert (done.code, done.out, done.err) == (2, "", told)


def test_an_internal_error_has_a_code_of_its_own(call, monkeypatch: pytest.MonkeyPatch) -> None:
    from minfer.commands import inspect

    monkeypatch.setattr(inspect, "devices", lambda args: 1 / 0)
    done = call("devices")
    assert done.code == 70 and "ZeroDivisionError" in done.err


def test_interrupt_leaves_quietly(call, monkeypatch: pytest.MonkeyPatch) -> None:
    from minfer.commands import inspect

    def stop(args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "devices", stop)
    done = call("devices")
    assert (done.code, done.err) == (130, "\nminfer: interrupted\n")


def test_an_interrupt_inside_a_kernel_counts_as_one(call, monkeypatch: pytest.MonkeyPatch) -> None:
    from minfer.commands import inspect

    def stop(args: object) -> None:
        raise SystemError("a result with an exception set") from KeyboardInterrupt()

    monkeypatch.setattr(inspect, "devices", stop)
    assert call("devices").code == 130


def test_a_missing_package_names_its_extra(call, monkeypatch: pytest.MonkeyPatch) -> None:
    from minfer.commands import inspect

    def stop(args: object) -> None:
        raise ModuleNotFoundError("No module named 'gguf'", name="gguf")

    monkeypatch.setattr(inspect, "devices", stop)
    done = call("devices")
    assert done.code == 2
    assert done.err == "minfer: gguf is not installed; pip install 'minfer[cpu,models]'\n"


def test_devices_works_without_psutil(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    done = call("devices")
    assert done.code == 0 and "memory free unknown" in done.out


def test_a_complaint_stays_one_line(call, monkeypatch: pytest.MonkeyPatch) -> None:
    from minfer.commands import inspect

    def stop(args: object) -> None:
        raise minfer.Refusal("0.2", "a\nb" + "x" * 5000)

    monkeypatch.setattr(inspect, "devices", stop)
    done = call("devices")
    assert done.err.count("\n") == 1 and done.err.startswith("minfer: a bxx")
    assert len(done.err) < 1100


def test_a_full_disk_is_one_line(tiny_gguf: Path) -> None:
    argv = [sys.executable, "-m", "minfer", "variants"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            argv, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr == "minfer: No space left on device\n"


def test_a_complaint_that_cannot_be_printed_keeps_its_code(tiny_gguf: Path) -> None:
    argv = [sys.executable, "-m", "minfer", "run", tiny_gguf, "-p", "x", "-n", "0"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(argv, cwd=ROOT, stdout=full, stderr=full, check=False)
    assert done.returncode == 2


@pytest.mark.parametrize("argv", [("-p", "\ud800", "--chat"), ("-p", "x", "--system", "\ud800")])
def test_text_that_is_no_text_is_refused(call, tiny_gguf: Path, argv: tuple[str, ...]) -> None:
    done = call("run", tiny_gguf, *argv)
    assert done.code == 2 and "surrogate" in done.err


@pytest.mark.parametrize("name", ["~no-such-user/x", "x" * 5000])
def test_paths_that_cannot_be_are_refused(call, name: str) -> None:
    done = call("run", name, "-p", "x")
    assert done.code == 2 and "neither a file nor" in done.err


def test_a_context_beyond_the_training_is_said(call, tiny_gguf: Path) -> None:
    done = call("run", tiny_gguf, "-p", "x", "-n", 1, "--n-ctx", 600)
    assert done.code == 0 and "trained for 512 positions" in done.err


def test_explain_prints_the_receipt(call) -> None:
    argv = ("explain", "attn_window", "--fmt", "q8_0", "--n-q", 1, "--head-dim", 128)
    done = call(*argv)
    assert done.code == 0
    assert done.out.startswith("attn_window_split on cpu, q8_0: the default")
    assert "minfer/kernels_numba/attn_window.py:" in done.out
    assert "not flash: is for prefill, not decode" in done.out
    report = json.loads(call(*argv, "--json").out)
    assert (report["variant"], report["numerics"].split(",")[0]) == ("split", "query q8_0")


def test_variants_lists_every_op(call) -> None:
    text = call("variants").out
    for name in ("attn_window_rows", "attn_map_flash", "matvec_lanes", "quantize_q8_0_blocks"):
        assert name in text
    rows = json.loads(call("variants", "attn_window", "--json").out)["variants"]
    assert [row["variant"] for row in rows] == ["rows", "split", "flash", "scratch"]


def test_devices_says_what_is_here(call) -> None:
    text = call("devices").out
    assert f"minfer {minfer.__version__}" in text and "MINFER_CACHE_TYPE=" in text
    report = json.loads(call("devices", "--json").out)
    for name in ("numpy", "gguf", "jinja2", "huggingface_hub"):
        assert report["libraries"][name] == version(name)
        assert f"  {name:15} {version(name)}\n" in text
    assert report["devices"]["cpu"]["unavailable"] is None
    assert report["devices"]["cpu"]["environment"]["isa"]
    assert "needs a Mac" in report["devices"]["metal"]["unavailable"]


def test_version_and_help(call) -> None:
    assert call("--version").out == f"minfer {minfer.__version__}\n"
    for command in ("run", "pull", "explain", "variants", "devices"):
        done = call(command, "--help")
        assert done.code == 0 and f"  minfer {command}" in done.out  # an example


def test_a_reader_that_leaves_early_is_no_error(tiny_gguf: Path) -> None:
    argv = [sys.executable, "-m", "minfer", "variants"]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=pipe, stderr=pipe)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


def test_a_variant_says_what_it_takes() -> None:
    limits = Limits(kinds=("decode",), head_dims=(64, 128), max_group=16, capability=(9, 0))
    some = replace(registry.variants("attn_window")[0], limits=limits)
    assert inspect._variant_row(some)["takes"] == (
        "decode; head_dim 64, 128; up to 16 query heads a KV head; compute capability 9.0"
    )
