"""The doctor before a well fleet, and before ill ones: each ailment has its own line."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
from test_admin_live import KEY, site
from test_fleet import eventually
from told_replica import EPOCH, Context, ToldReplica, told_replica

from deploy.doctor import main as doctor
from deploy.doctor.finding import Finding, Verdict
from deploy.doctor.router import Client
from hotbranch import __version__
from hotbranch.cli import main
from hotbranch.fingerprint import fingerprint
from hotbranch.keys import block_keys, root
from hotbranch.settings import RouterSettings
from hotbranch.v1.cache_pb2 import CacheDelta, CacheUpdate, Run
from hotbranch.v1.serve_pb2 import FINISH_REASON_LENGTH, ClientFrame, Delta, ServerFrame, Submit
from router.fleet.discovery import StaticDiscovery
from router.main import Router

BLOCK = 16


@dataclass(eq=False)
class Patient(ToldReplica):
    """Caches every prompt and reports it, but for its ailment."""

    caches: set[int] = field(default_factory=set)
    tells: bool = True  # what it had cached
    reports: bool = True  # what it stores
    salts: bool = True  # prompts apart
    keeps: bool = True  # anything at all
    sequence: int = 0
    watchers: list[asyncio.Queue[CacheUpdate]] = field(default_factory=list)

    async def Serve(self, frames: Any, context: Context) -> AsyncIterator[ServerFrame]:
        await context.send_initial_metadata(())
        async for frame in frames:
            assert isinstance(frame, ClientFrame)
            yield ServerFrame(deltas=[self._answer(submit) for submit in frame.submit])

    def _answer(self, submit: Submit) -> Delta:
        keys = block_keys(submit.token_ids, BLOCK, root("smol", "", submit.salt))
        names = keys if self.salts else block_keys(submit.token_ids, BLOCK, root("smol"))
        most = (len(submit.token_ids) // 4 - 1) // BLOCK
        held = sum(key in self.caches for key in names[:most]) if self.keeps else 0
        new = [key for key in names if key not in self.caches]
        self.caches.update(names)
        if new and self.reports:
            self.sequence += 1
            delta = CacheDelta(sequence=self.sequence)
            parent = names[len(names) - len(new) - 1] if len(new) < len(names) else None
            delta.stored.append(Run(parent=parent, keys=new))
            for watcher in self.watchers:
                watcher.put_nowait(CacheUpdate(epoch=EPOCH, delta=delta))
        return Delta(
            ticket=submit.ticket,
            token_ids=bytes(4),
            text="a",
            finish=FINISH_REASON_LENGTH,
            cached_tokens=held * BLOCK if self.tells else None,
        )

    async def WatchCache(self, request: Any, context: Context) -> AsyncIterator[CacheUpdate]:
        first = CacheUpdate(epoch=EPOCH)
        first.snapshot.last, first.snapshot.sequence = True, self.sequence
        if self.reports:
            first.snapshot.runs.extend(Run(keys=[key]) for key in sorted(self.caches))
        own: asyncio.Queue[CacheUpdate] = asyncio.Queue()
        self.watchers.append(own)
        yield first
        while True:
            yield await own.get()


async def examined(client: Client) -> list[Finding]:
    return await asyncio.to_thread(lambda: list(doctor.examine(client)))


def told(findings: list[Finding], verdict: Verdict) -> list[str]:
    return [finding.what for finding in findings if finding.verdict is verdict]


@asynccontextmanager
async def ill(
    smollm2: Path, ailment: Callable[[Patient], None] = lambda _: None, **changes: Any
) -> AsyncIterator[Client]:
    """A real router before one patient."""
    given = {
        "model": "smol",
        "tokenizer_fingerprint": fingerprint(smollm2),
        "block_size": BLOCK,
        "vocab_size": 49152,
        "version": __version__,
        "engine": "told",
        **changes,
    }
    async with told_replica("patient", Patient, **given) as replica:
        assert isinstance(replica, Patient)
        ailment(replica)
        settings = RouterSettings(model=str(smollm2), served_name="smol", port=0)
        router = Router(settings, StaticDiscovery([replica.address]))
        await router.start()
        try:
            state = "refused" if changes.get("tokenizer_fingerprint") else "ready"
            await eventually(lambda: [link.state for link in router.fleet.links] == [state])
            yield Client(f"http://{router.address}")
        finally:
            await router.stop(0)


async def test_a_fleet_that_is_well(smollm2: Path) -> None:
    async with site(smollm2) as running:
        client = Client(f"http://{running.router.address}", admin_key=KEY)
        findings = await examined(client)
    assert not told(findings, Verdict.WRONG)
    assert not told(findings, Verdict.WARNING)
    said = "\n".join(told(findings, Verdict.OK))
    for words in (
        f"router {__version__}",
        "models: smol",
        "ready, radix, model smol",
        "blocks of 16 tokens, keys equal ours",
        "router and engine agree on a prompt of",
        "tokens were cached, as predicted",
        "another cache_salt shares nothing",
        "blocks of the probe are in the router's index",
    ):
        assert words in said


AILMENTS: dict[str, tuple[Callable[[Patient], None], dict[str, Any], Verdict, str]] = {
    "tokenizer": (lambda p: None, {"tokenizer_fingerprint": "x"}, Verdict.WRONG, "tokenizer or"),
    "keys": (lambda p: None, {"key_check": 1}, Verdict.WRONG, "other block keys than we do"),
    "version": (lambda p: None, {"version": "0.0.1"}, Verdict.WRONG, "it is version 0.0.1"),
    "silent": (lambda p: setattr(p, "reports", False), {}, Verdict.WRONG, "it reports 0 blocks of"),
    "untold": (lambda p: setattr(p, "tells", False), {}, Verdict.WARNING, "does not say what"),
    "forgets": (lambda p: setattr(p, "keeps", False), {}, Verdict.WRONG, "asked again, 0 of "),
    "salt": (lambda p: setattr(p, "salts", False), {}, Verdict.WRONG, "under a salt that nobody"),
}


@pytest.mark.parametrize("name", AILMENTS)
async def test_each_ailment_is_told(smollm2: Path, name: str) -> None:
    ailment, changes, verdict, words = AILMENTS[name]
    async with ill(smollm2, ailment, **changes) as client:
        findings = await examined(client)
    assert any(words in what for what in told(findings, verdict)), "\n".join(map(str, findings))
    assert all(finding.mend for finding in findings if finding.verdict is Verdict.WRONG)


async def test_the_same_patient_without_an_ailment_is_well(smollm2: Path) -> None:
    async with ill(smollm2) as client:
        findings = await examined(client)
    assert not told(findings, Verdict.WRONG), findings


async def test_operators_door_is_closed(smollm2: Path) -> None:
    async with site(smollm2) as running:
        findings = await examined(Client(f"http://{running.router.address}", admin_key="wrong"))
    assert "/admin answers 401: replicas are not seen" in told(findings, Verdict.WARNING)
    assert any("as predicted" in what for what in told(findings, Verdict.OK)), "probes go on"


def test_nobody_answers(free_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"http://127.0.0.1:{free_port}"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("hotbranch doctor: http://127.0.0.1:")
    assert said.err.count("\n") == 1


def test_wrong_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "localhost"]) == 2
    assert "--url localhost" in capsys.readouterr().err


class Elsewhere(BaseHTTPRequestHandler):
    """A router on a machine whose clock is late, without replicas."""

    answers: ClassVar[dict[str, Any]] = {
        "/version": {"version": "9.9"},
        "/v1/models": {"data": [{"id": "m"}]},
        "/admin/replicas": {"replicas": []},
    }

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(self.answers[self.path]).encode())

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(time.time() - 60, usegmt=True)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_clocks_versions_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    server = HTTPServer(("127.0.0.1", 0), Elsewhere)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert main(["doctor", f"http://127.0.0.1:{server.server_port}", "--json"]) == 1
    finally:
        server.shutdown()
        server.server_close()
    findings = json.loads(capsys.readouterr().out)
    said = {finding["what"]: finding["verdict"] for finding in findings}
    assert said[f"the router is version 9.9, this doctor {__version__}"] == "warning"
    assert any(what.startswith("its clock is -6") for what in said)
    assert said["it has no replicas"] == "wrong"
