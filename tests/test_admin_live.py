"""What an operator sees of the index: a router over HTTP, and replicas whose model is a ledger."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
from gated_replica import MODEL
from prometheus_client.parser import text_string_to_metric_families
from test_fleet import Replica, Setup, eventually, prompt, setup, start_replica, stop_replica
from test_router_metrics import metrics_of, samples
from told_replica import told_fleet

from hotbranch.fingerprint import fingerprint
from hotbranch.settings import RouterSettings
from router.fleet.discovery import StaticDiscovery
from router.index.heat import HEAT_S
from router.index.view import RECOVERIES
from router.main import Router

KEY = "key-of-operator"
OPERATOR = {"authorization": f"Bearer {KEY}"}
SYSTEM = "You know the tides, and how a lighthouse is kept. Answer as a keeper would. " * 8


@dataclass
class Site:
    router: Router
    replicas: list[Replica]
    http: httpx.AsyncClient

    async def ask(self, system: str, question: str, **headers: str) -> str:
        """One chat; the replica that served it. Headers with `_` for `-`."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        body = {"model": "smol", "messages": messages, "max_tokens": 2}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await self.http.post("/v1/chat/completions", json=body, headers=named)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-hotbranch-replica"]

    async def tokens(self, system: str) -> int:
        messages = [{"role": "system", "content": system}]
        body = {"model": "smol", "messages": messages, "add_generation_prompt": False}
        return int((await self.http.post("/tokenize", json=body)).json()["count"])

    async def get(self, path: str) -> Any:
        answer = await self.http.get(path, headers=OPERATOR)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.http.get("/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and sample.labels.items() >= labels.items()
        )


@asynccontextmanager
async def site(smollm2: Path, **overrides: Any) -> AsyncIterator[Site]:
    ours = fingerprint(smollm2)
    replicas = [
        await start_replica(
            name=name, model="smol", fingerprint=ours, block_size=16, vocabulary=49152
        )
        for name in ("a", "b")
    ]
    settings = RouterSettings(
        model=str(smollm2),
        served_name="smol",
        port=0,
        admin_key_sha256=sha256(KEY.encode()).hexdigest(),
        **overrides,
    )
    router = Router(settings, StaticDiscovery([replica.address for replica in replicas]))
    await router.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{router.address}", timeout=20) as http:
            await eventually(lambda: len(router.fleet.ready("smol")) == 2)
            yield Site(router, replicas, http)
    finally:
        await router.stop(0)
        for replica in replicas:
            await stop_replica(replica)


async def test_the_hottest_branch_is_the_system_prompt_that_most_ask_with(smollm2: Path) -> None:
    async with site(smollm2) as here:
        homes = {await here.ask(SYSTEM, f"Question {i}?") for i in range(12)}
        await here.ask("You are terse. " * 30, "Why?")
        (home,) = homes
        branches = (await here.get("/admin/branches"))["branches"]
        first = branches[0]
        rates = [branch["tokens_per_s"] for branch in branches if not branch["parent"]]
        assert (first["parent"], rates) == ("", sorted(rates, reverse=True))
        assert first["start_token"] == 0
        assert first["end_token"] // 16 == await here.tokens(SYSTEM) // 16
        served = first["replicas"][home]
        assert served["held_tokens"] == first["end_token"]
        assert served["tokens_per_s"] == first["tokens_per_s"]
        prompts = first["tokens_per_s"] * HEAT_S / first["end_token"]
        assert 2 < prompts < 2 * 12, "all of a dozen, decayed, and their questions"
        below = [branch for branch in branches if branch["parent"] == first["key"]]
        assert len(below) >= 2, "where the questions part"
        assert all(branch["start_token"] == first["end_token"] for branch in below)
        assert sum(branch["tokens_per_s"] for branch in below) <= first["tokens_per_s"]
        assert first["key"] in (await here.get(f"/admin/index/{home}"))["keys"]
        assert (await here.get("/admin/branches?limit=1"))["branches"][0]["key"] == first["key"]
        assert len((await here.get("/admin/branches?limit=2"))["branches"]) == 2
        assert SYSTEM[:8] not in str(branches)


async def test_branches_are_for_operators_and_their_limit_is_a_number(smollm2: Path) -> None:
    async with site(smollm2) as here:
        for headers in ({}, {"authorization": "Bearer other"}):
            assert (await here.http.get("/admin/branches", headers=headers)).status_code == 401
        for wrong in ("0", "-1", "x", "1.5", "10001", "9" * 5000, "²"):
            answer = await here.http.get(f"/admin/branches?limit={wrong}", headers=OPERATOR)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit"), wrong
        for right in ("1", "10000"):
            assert (await here.get(f"/admin/branches?limit={right}")) == {"branches": []}


async def test_every_kind_of_recovery_is_there_from_the_start_and_counted(smollm2: Path) -> None:
    async with site(smollm2) as here:
        name = "hotbranch_index_recoveries_total"
        text = (await here.http.get("/metrics")).text
        for kind in RECOVERIES:
            assert f'{name}{{kind="{kind}"}} 0.0' in text
        replica = here.replicas[0]
        port = int(replica.address.rpartition(":")[2])
        ours = fingerprint(smollm2)
        await stop_replica(replica)
        await eventually(lambda: len(here.router.fleet.ready("smol")) == 1)
        here.replicas[0] = await start_replica(
            port, name="a", model="smol", fingerprint=ours, block_size=16, vocabulary=49152
        )
        await eventually(lambda: here.router.recoveries["epoch"] == 1)
        assert await here.metric(name, kind="reconnect") == 1
        shown = {r["replica_id"]: r for r in (await here.get("/admin/replicas"))["replicas"]}
        assert shown["a"]["recoveries"].items() >= {"reconnect": 1, "epoch": 1}.items()
        assert shown["b"]["recoveries"] == {}


async def test_field_report_17_a_live_replica_without_blocks_shows() -> None:
    async with setup(replicas=2) as fleet:
        metrics = metrics_of(fleet)
        full = (await fleet.generate(prompt(1))).replica_id
        (empty,) = (r.address for r in fleet.replicas if r.address != full)
        await eventually(lambda: all(link.watcher.heard_at for link in fleet.fleet.links))
        await fleet.settled()
        found = samples(metrics)
        assert found["hotbranch_replicas", "ready"] == 2
        assert found["hotbranch_replica_report_age_seconds", empty] >= 0
        assert found["hotbranch_replica_index_blocks_held", empty] == 0
        assert found["hotbranch_replica_index_blocks_held", full] == 11


async def test_field_report_17_a_silent_stream_shows_by_its_age() -> None:
    async with setup(replicas=1) as alive, told_fleet(1) as (fleet, told):
        told[0].report()
        await eventually(lambda: fleet.fleet.links[0].watcher.heard_at > 0)
        before = age(fleet)
        await asyncio.sleep(0.5)
        after = age(fleet)
        assert after >= before + 0.5
        await eventually(lambda: age(alive) < after)
        assert fleet.fleet.ready(MODEL), "it is not lost yet"


def age(fleet: Setup) -> float:
    (link,) = fleet.fleet.links
    return samples(metrics_of(fleet))["hotbranch_replica_report_age_seconds", link.replica_id]
