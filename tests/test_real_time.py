"""The running router and virtual time, with the same requests: a few of them, on three replicas."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from bench.fleet.real_time import compare, dilated
from hotbranch.settings import SimulateSettings
from replicas.simulated.profile import DEFAULT, Profile

ROOT = Path(__file__).parent.parent
DILATION = 3.0


def test_the_running_router_does_what_virtual_time_says() -> None:
    settings = SimulateSettings(
        trace="shape:agents", replicas=3, requests=80, speed=2 / DILATION, shape_tenants=1
    )
    result = compare(settings, dilated(Profile.load(DEFAULT), DILATION))
    hits, ttft = result["hit_rate"], result["ttft_mean"]
    assert result["failed"] == 0
    assert sum(result["reasons"]["real"].values()) == 80
    assert hits["virtual"] > 50
    assert abs(hits["points"]) < 5
    assert 0.9 < ttft["ratio"] < 3, "a busy machine makes it later, nothing makes it earlier"


def test_no_replica_is_left_after_ctrl_c() -> None:
    command = [sys.executable, "-m", "bench", "fleet", "--real-time", "--trace", "shape:voice"]
    process = subprocess.Popen(
        [*command, "--replicas", "2", "--speed", "0.1"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        assert process.stderr.readline() == "2 replicas run\n"
        children = _children(process.pid)
        assert len(children) == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert not any(Path(f"/proc/{child}").exists() for child in children)
    finally:
        process.kill()
        process.stderr.close()


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [
        int(child)
        for task in os.listdir(tasks)
        for child in (tasks / task / "children").read_text().split()
    ]
