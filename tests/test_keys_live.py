"""Keys, block sizes and ranks over real connections: what is not comparable is not compared."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from gated_replica import MODEL
from test_fleet import Setup, eventually, held, prompt, setup
from told_replica import told_fleet
from xxhash import xxh3_64_intdigest

from hotbranch import cli, keys
from hotbranch.keys import block_keys, key_check, root
from replicas import server
from router.api.http import Request
from router.fleet.holder import Holder
from router.fleet.link import INCOMPARABLE, State
from router.generation import Prompt
from router.index.index import Index
from router.observe.admin import Admin


def of(*token_ids: int) -> Prompt:
    return Prompt(MODEL, struct.pack(f"<{len(token_ids)}I", *token_ids), "t", "r")


def path(prompt: Prompt, size: int = 4) -> list[int]:
    return block_keys(prompt.token_ids, size, root(MODEL))


async def listed(fleet: Setup) -> list[dict[str, Any]]:
    """What GET /admin/replicas shows."""
    response = await Admin(fleet.fleet, fleet.index).replicas(
        Request("GET", "/admin/replicas", {}, "127.0.0.1", "r")
    )
    assert isinstance(response.body, bytes)
    replicas: list[dict[str, Any]] = json.loads(response.body)["replicas"]
    return replicas


async def test_field_report_20_a_replica_with_other_keys_serves_by_its_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "key_check", lambda: key_check() ^ 1)
    async with setup(index=Index(prediction_s=1e-3)) as fleet:
        for seed in range(6):
            home = await fleet.generate(prompt(seed), max_tokens=9)
            route = await fleet.generate(prompt(seed, tail=1), max_tokens=9)
            assert route.replica_id == home.replica_id
            assert route.predicted_tokens == route.cached_tokens == 40
        for replica, shown in zip(fleet.replicas, await listed(fleet), strict=True):
            link = fleet.link(replica)
            await eventually(lambda link=link: link.watcher.heard_at > 0)  # type: ignore[misc]
            assert (shown["state"], shown["problem"]) == (State.READY, INCOMPARABLE)
            known = fleet.index.held(Holder(replica.address))
            # Not the answers; chance may have sent it nothing.
            assert known < held(replica) or not held(replica)
            assert link.load, "its load counts all the same"


async def test_an_honest_replica_has_no_problem() -> None:
    async with setup(replicas=1) as fleet:
        assert [shown["problem"] for shown in await listed(fleet)] == [""]


@pytest.fixture
def other_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """An xxhash that computes something else."""

    def other(data: bytes, seed: int = 0) -> int:
        return xxh3_64_intdigest(data, seed) ^ 1

    monkeypatch.setattr(keys, "xxh3_64_intdigest", other)


@pytest.mark.usefixtures("other_hash")
def test_field_report_20_another_hash_is_noticed_at_start() -> None:
    with pytest.raises(ValueError, match="xxhash"):
        key_check()


@pytest.mark.usefixtures("other_hash")
@pytest.mark.parametrize("command", ["router", "replica"])
def test_field_report_20_a_process_with_another_hash_ends_in_one_line(
    command: str, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = [] if command == "replica" else ["--port", "0"]
    assert cli.main([command, "--model", str(smollm2), *port]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"hotbranch {command}: xxhash computes block keys of its own here")
    assert said.count("\n") == 1


async def test_field_report_21_credit_is_in_blocks_of_the_engine() -> None:
    async with setup(replicas=1, block_size=64) as fleet:
        short, long = range(48), range(500, 630)
        for shared in (short, long):
            await fleet.generate(of(*shared, *range(900, 990)))
        await fleet.settled()
        for shared, credit in ((short, 0), (long, 128)):
            route = await fleet.generate(of(*shared, *range(700, 790)))
            assert route.predicted_tokens == route.cached_tokens == credit


async def test_field_report_23_a_request_goes_to_the_rank_that_has_its_prefix() -> None:
    async with told_fleet(ranks=2) as (fleet, told):
        prompts = [prompt(seed) for seed in range(4)]
        for replica, (first, second) in zip(told, (prompts[:2], prompts[2:]), strict=True):
            replica.report(path(first), path(second))
            holder, keys = Holder(replica.address, 1), {*path(second)}
            await eventually(lambda h=holder, k=keys: fleet.index.held(h) == k)  # type: ignore[misc]
        match = fleet.index.match(path(prompts[3]))
        depths = [match.depth(holder) for link in fleet.fleet.links for holder in link.holders]
        assert sorted(depths) == [0, 0, 0, 11]
        for asked in prompts * 2:
            assert (await fleet.generate(asked)).predicted_tokens == 40
        for replica, (first, second) in zip(told, (prompts[:2], prompts[2:]), strict=True):
            sent = [(submit.token_ids, submit.rank) for submit in replica.submits]
            assert sent == [(first.token_ids, 0), (second.token_ids, 1)] * 2
