"""`python -m bench fleet --orders`, with little load."""

import json
import sys
from pathlib import Path

import pytest

from bench.fleet import over_load, sweep


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["bench fleet", "--orders", *arguments])
    status = sweep.main()
    return status, *capsys.readouterr()


def test_depth_first_reuses_more_once_the_fleet_is_saturated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRACES", raising=False)
    monkeypatch.setattr(over_load, "SHAPE", "shape:permuted")  # more than caches hold
    monkeypatch.setattr(over_load, "RATES", (2, 50))
    monkeypatch.setattr(over_load, "REQUESTS", 600)
    picture = tmp_path / "orders.svg"
    status, out, _ = run(monkeypatch, capsys, "--plot", str(picture))
    assert status == 0 and "depth first" in picture.read_text()
    result = json.loads(out.splitlines()[-1])
    assert result["admission"] == "least_uncached" and result["requests"] == 600
    deep, plain = result["orders"]["depth_first"], result["orders"]["arrival"]
    assert deep[0]["load"] == plain[0]["load"] < deep[1]["load"] == plain[1]["load"]
    assert deep[0] == pytest.approx(plain[0], rel=0.05)  # nothing waits
    assert deep[1]["hit_rate"] >= plain[1]["hit_rate"] > 0
    assert deep[1]["ttft_mean"] < plain[1]["ttft_mean"]
    assert f"{deep[1]['hit_rate']:.3f}" in out


def test_what_the_user_has_to_change_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / over_load.TRACE
    trace.parent.mkdir()
    trace.write_text("nonsense\n")
    monkeypatch.setenv("TRACES", str(tmp_path))
    status, _, err = run(monkeypatch, capsys)
    assert status == 2 and len(err.splitlines()) == 1 and "conversation_trace" in err
    with pytest.raises(SystemExit):
        run(monkeypatch, capsys, "--plot", "orders.gif")
    assert ".png or .svg" in capsys.readouterr().err
