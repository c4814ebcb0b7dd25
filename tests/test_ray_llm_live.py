"""The request router for Ray Serve LLM, on a real Serve."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import yaml
from ray.serve._private.config import DeploymentConfig
from ray_llm_app import FULL, ROUTER

from hotbranch.settings import RayLlmSettings

WAIT_S = 120


@dataclass(frozen=True)
class App:
    """A running `ray_llm_app.py`, whose ingress calls the deployments ours, default and wrong."""

    url: str

    def post(self, path: str, body: Any, timeout: float = WAIT_S) -> httpx.Response:
        return httpx.post(f"{self.url}/{path}", content=json.dumps(body), timeout=timeout)

    def chat(self, deployment: str, body: Any) -> int:
        """The process that answered; the answer must be whole."""
        answer = self.post(f"{deployment}/chat", body)
        lines = answer.text.splitlines()
        assert answer.status_code == 200 and lines[1:] == ["done"], answer.text
        return int(lines[0])

    def state(self, deployment: str = "ours") -> dict[str, Any]:
        """Of the router in the ingress."""
        state: dict[str, Any] = httpx.get(f"{self.url}/{deployment}/router", timeout=WAIT_S).json()
        return state

    def idle(self) -> bool:
        state = self.state()
        return not any(state["loads"].values()) and not state["leases"]


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def app(smollm2: Path) -> Iterator[App]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = Path(__file__)
    environment = os.environ | {"PYTHONPATH": str(here.parents[1]), "RAY_worker_niceness": "0"}
    command = [sys.executable, str(here.with_name("ray_llm_app.py")), str(port), str(smollm2)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        try:
            assert any(line.startswith("ready") for line in process.stdout), "it did not start"
            yield App(f"http://127.0.0.1:{port}")
        finally:
            process.stdin.close()  # it ends its Ray
            process.wait(WAIT_S)


def conversation(family: int, own: int = 0, **fields: Any) -> dict[str, Any]:
    rules = f"Rule {family}: what is said in family {family} is known to family {family}. " * 60
    messages = [
        {"role": "system", "content": rules},
        {"role": "user", "content": f"Question {own}?"},
    ]
    return {"messages": messages, **fields}


def homes(app: App, deployment: str) -> dict[int, set[int]]:
    """By family the processes that answered: first one after the other, then four at a time. (A
    family that comes while its home computes others is rightly copied.)"""
    found = defaultdict(set)
    for family in range(6):
        found[family].add(app.chat(deployment, conversation(family)))
    order = [(family, own) for own in range(1, 8) for family in range(6)]
    Random(deployment).shuffle(order)
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda one: app.chat(deployment, conversation(*one)), order)
        for (family, _), process in zip(order, answers, strict=True):
            found[family].add(process)
    return found


def test_what_is_documented_is_what_ray_and_the_settings_take() -> None:
    text = (Path(__file__).parents[1] / "docs" / "ray_llm.md").read_text()
    python, _, yaml_ = re.findall(r"```(?:python|yaml)\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(python, names)
    in_yaml = DeploymentConfig(**yaml.safe_load(yaml_)["deployment_config"])
    config = names["request_router_config"]
    assert in_yaml.request_router_config == config
    assert config.request_router_class == ROUTER
    assert config.get_request_router_class().__name__ == "HotbranchRouter"
    assert RayLlmSettings(**config.request_router_kwargs).kv_tokens == 442_000
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE)
    defaults = {name: field.default for name, field in RayLlmSettings.model_fields.items()}
    assert dict(rows[1:5]) == {name: str(value or "none") for name, value in defaults.items()}


@pytest.mark.slow
def test_families_stay_on_one_replica_and_scatter_under_rays_own_router(app: App) -> None:
    ours = homes(app, "ours")
    assert {len(home) for home in ours.values()} == {1}
    assert len(set.union(*ours.values())) > 1
    assert app.state()["placements"]["match"] >= 6 * 7 - 3
    assert max(len(home) for home in homes(app, "default").values()) > 1


@pytest.mark.slow
def test_unrelated_requests_at_the_same_time_are_spread_evenly(app: App) -> None:
    bodies = [conversation(100 + number, seconds=2) for number in range(30)]
    with ThreadPoolExecutor(30) as pool:
        counts = Counter(pool.map(lambda body: app.chat("ours", body), bodies))
    assert sum(counts.values()) == 30 and max(counts.values()) <= 11


@pytest.mark.slow
def test_calls_of_one_request_at_the_same_time_are_all_answered(app: App) -> None:
    """They share an id, by which Ray finds who waits for a replica."""
    bodies = [*(conversation(family) for family in range(6)), {"prompt": "x"}, {}]
    answers = app.post("ours/fan", bodies, timeout=30).json()
    assert [answer.splitlines()[1:] for answer in answers] == [["done"]] * len(bodies)
    eventually(app.idle)


@pytest.mark.slow
def test_whatever_comes_is_served(app: App) -> None:
    before = Counter(app.state()["degraded"])
    bodies = {
        "no_prompt": [{}, [], 1, "text", None, {"input": "to embed"}],
        "empty": [{"messages": []}, {"prompt": ""}],
        "shape": [{"messages": 7}, {"prompt": [[1], ["x"]]}, conversation(1, tools=3)],
        "template": [{"messages": [{"role": "nobody", "content": "x"}]}],
    }
    for some in bodies.values():
        for body in some:
            app.chat("ours", body)
    after = Counter(app.state()["degraded"])
    assert after - before == {reason: len(some) for reason, some in bodies.items()}


@pytest.mark.slow
def test_load_returns_to_nothing_after_failures_and_disconnects(app: App) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        app.post("ours/chat", conversation(1, fails=True))
    open_ = 3 * FULL + 6  # more than the replicas take
    with ThreadPoolExecutor(open_) as pool:
        for _ in range(open_):
            pool.submit(app.post, "ours/chat", conversation(2, seconds=600), timeout=5)
        eventually(lambda: sum(app.state()["loads"].values()) == open_)
    eventually(app.idle)
    assert app.chat("ours", conversation(2))


@pytest.mark.slow
def test_settings_that_are_wrong_cost_no_request(app: App) -> None:
    processes = {app.chat("wrong", conversation(1, own)) for own in range(4)}
    assert len(processes) == 1


@pytest.mark.slow
def test_the_families_of_a_killed_replica_move_and_no_request_fails(app: App) -> None:
    """The last one: a replica is another process afterwards."""
    before = {family: app.chat("ours", conversation(family, 50)) for family in range(200, 206)}
    known = set(app.state()["loads"])
    dead = before[200]
    os.kill(dead, signal.SIGKILL)
    after = [
        {family: app.chat("ours", conversation(family, own)) for family in before}
        for own in range(51, 54)
    ]
    assert after[0] == after[1] == after[2]
    assert dead not in after[0].values()
    assert all(after[0][family] == home for family, home in before.items() if home != dead)
    eventually(lambda: len(app.state()["loads"]) == 3 and set(app.state()["loads"]) != known)
    eventually(app.idle)
