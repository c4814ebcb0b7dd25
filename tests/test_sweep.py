"""`python -m bench fleet`, with little load."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.fleet import scheduling, sweep
from bench.fleet.fairness import DOCUMENTS, Crowd
from bench.fleet.load import load, no_renderer
from bench.fleet.sweep import Point
from hotbranch.settings import SimulateSettings
from replicas.simulated.profile import DEFAULT, Profile
from router.schedule.policies import POLICIES

TRACES = Path(os.environ.get("TRACES", Path(__file__).parents[2] / "shared/traces"))


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, Any], str]:
    monkeypatch.setattr(sys, "argv", ["bench fleet", "--jobs", "1", *arguments])
    monkeypatch.setattr(
        sweep, "QUICK", [Point("rag", "shape:rag", requests=60), Point("far", "far.jsonl")]
    )
    monkeypatch.setattr(sweep, "CROWDS", {"few": Crowd(DOCUMENTS, 1.0, 2, 2, 8.0, 1)})
    monkeypatch.setattr(scheduling, "WAITING", 50)
    monkeypatch.setattr(scheduling, "MEASURED", 20)
    monkeypatch.delenv("TRACES", raising=False)
    status = sweep.main()
    out, err = capsys.readouterr()
    return status, json.loads(out.splitlines()[-1]), err


def test_every_policy_has_its_figures_and_what_is_there_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    status, result, err = run(monkeypatch, capsys, "--out", str(file))
    assert status == (1 if result["missed"] else 0)
    assert json.loads(file.read_text()) == result
    assert "far: left out" in err and "rag\n" in err
    assert set(result["fairness"]) == {"few"}
    workloads = result["workloads"]
    assert isinstance(workloads, dict) and set(workloads) == {"rag"}
    assert set(workloads["rag"]) == set(POLICIES)
    for metrics in workloads["rag"].values():
        assert metrics["failed"] == 0 and 0 < metrics["ttft_mean"] <= metrics["ttft_p99"]
        assert 0 < metrics["goodput"] <= 1 <= metrics["imbalance"]
    _, again, err = run(monkeypatch, capsys, "--out", str(file))
    assert again["workloads"] == workloads and "rag\n" not in err


def test_a_trace_that_cannot_be_read_ends_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "far.jsonl").write_text("nonsense\n")
    monkeypatch.setenv("TRACES", str(tmp_path))
    monkeypatch.setattr(sweep, "QUICK", [Point("far", "far.jsonl")])
    monkeypatch.setattr(sys, "argv", ["bench fleet"])
    assert sweep.main() == 2
    err = capsys.readouterr().err
    assert "far.jsonl" in err and "Traceback" not in err


@pytest.mark.parametrize("point", [*sweep.QUICK, *sweep.FULL], ids=lambda point: point.name)
def test_every_workload_can_be_loaded(point: Point) -> None:
    trace = point.where(TRACES)
    if trace is None:
        pytest.skip(f"no {point.trace} under {TRACES}")
    profile = Profile.load(DEFAULT)
    settings = SimulateSettings(trace=trace, requests=20)
    assert len(load(settings, no_renderer, profile.kv_tokens).ideal) == 20


def test_a_workload_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, capsys, "--only", "nonsense")
    assert "no workload 'nonsense': rag, far" in capsys.readouterr().err


def figures(mean: float, p99: float, goodput: float = 0.9) -> dict[str, float]:
    return {"ttft_mean": mean, "ttft_p99": p99, "goodput": goodput}


def missed(name: str, ours: dict[str, float], **others: dict[str, float]) -> list[str]:
    return list(sweep._missed({name: {"hotbranch": ours, **others}}, 100.0))


def test_aims_are_missed_where_another_policy_is_better() -> None:
    ours = figures(1.0, 10.0)
    assert missed("rag", ours, lmetric=figures(1.2, 9.0)) == []
    assert missed("rag", ours, lmetric=figures(0.98, 9.8)) == []  # within 3 %
    assert missed("rag", ours, lmetric=figures(1.02, 9.0)) == ["rag: lmetric dominates in TTFT"]
    assert len(missed("rag", ours, lmetric=figures(2.0, 20.0, 0.92))) == 1
    assert missed("unique", figures(1.0, 1.0), least_load=figures(0.99, 1.0)) == []
    assert len(missed("unique", figures(1.03, 1.0), least_load=figures(1.0, 1.0))) == 1
    peers = {peer: figures(3.0, 12.0) for peer in sweep.SATURATED_PEERS}
    assert missed("conversation_x3.4", ours, **peers) == []
    assert len(missed("conversation_x3.4_slow", figures(1.1, 10.0), **peers)) == 1
    assert len(missed("synthetic_x6", figures(1.0, 12.5), **peers)) == 1
    assert list(sweep._missed({}, 201.0)) == ["placing and queueing takes 201 us"]
