"""The whole product once, as a client sees it: `python -m bench.smoke`.

Starts `hotbranch up` with two replicas on free ports and drives it with the `openai` package: one
streamed chat, then two tenants times three families of about 1,000 shared tokens times ten
requests, interleaved; then unique prompts until the pools evict. The last line is JSON. Exit 1 when
a bound does not hold.
"""

import argparse
import asyncio
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import yaml
from openai.types.chat import ChatCompletionMessageParam

from bench.cluster import Cluster, cluster
from deploy.doctor.replica import held

TENANTS = ("alpha", "beta")
FAMILIES = 3
REQUESTS = 10
UNIQUE = 10
KV_TOKENS = 7424  # all six families fit on one replica, not much more
BLOCK = 16
OUTPUT_TOKENS = 6

TOPICS = ("harbour pilots", "orchard keepers", "night train conductors")
QUESTIONS = (
    "What comes first?",
    "Who decides in doubt?",
    "Name one rule.",
    "What must be written down?",
    "When does the shift end?",
    "What is forbidden?",
    "Who is told about delays?",
    "What is checked twice?",
    "How is a mistake reported?",
    "What is the last duty?",
)

Messages = list[ChatCompletionMessageParam]


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer as the client saw it. Seconds, tokens."""

    replica: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


def family(topic: str) -> str:
    """A system prompt of about 1,000 tokens."""
    rules = (
        f"Rule {number}: the {topic} check station {number * 7 % 23}, note the hour, and tell "
        f"desk {number % 5} what they found."
        for number in range(1, 36)
    )
    return f"You answer questions about the handbook of the {topic}.\n" + "\n".join(rules)


def chat(system: str, question: str) -> Messages:
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": question},
    ]


async def ask(client: openai.AsyncOpenAI, messages: Messages) -> Answer:
    """Stream one chat to its end. Raises openai.APIError."""
    began = time.perf_counter()
    ttft = 0.0
    raw = await client.chat.completions.with_raw_response.create(
        model="smollm2",
        messages=messages,
        max_tokens=OUTPUT_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = None
    async for chunk in raw.parse():
        if not ttft and chunk.choices and chunk.choices[0].delta.content:
            ttft = time.perf_counter() - began
        usage = chunk.usage or usage
    assert usage and usage.prompt_tokens_details, "the stream carries usage"
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached is not None, "cached tokens are known"
    return Answer(raw.headers["x-hotbranch-replica"], ttft, usage.prompt_tokens, cached)


class IdealCache:
    """What a cache that forgets nothing would have held, in whole blocks of token ids."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        self.hit_tokens = 0
        self.tokens = 0

    def request(self, tenant: str, tokens: Sequence[int]) -> None:
        """Count one prompt, then remember it."""
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        paths = [(tenant, tuple(tokens[:end])) for end in ends]
        hits = next((i for i, path in enumerate(paths) if path not in self._seen), len(paths))
        self.hit_tokens += min(hits, (len(tokens) - 1) // BLOCK) * BLOCK
        self.tokens += len(tokens)
        self._seen.update(paths)

    @property
    def rate(self) -> float:
        return self.hit_tokens / self.tokens


class Smoke:
    """One run against a cluster; collects what the last line reports."""

    def __init__(self, running: Cluster, keys: dict[str, str]) -> None:
        self.running = running
        self.clients = {
            tenant: openai.AsyncOpenAI(
                base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=120
            )
            for tenant, key in keys.items()
        }
        self.http = httpx.AsyncClient(base_url=running.url, timeout=60)
        self.keys = keys
        self.ideal = IdealCache()
        self.errors = 0
        self.answers: dict[tuple[str, int], list[Answer]] = {}

    async def first_chat(self) -> None:
        answer = await ask(self.clients[TENANTS[0]], chat("Be brief.", "Say hello."))
        print(
            f"first chat: {answer.prompt_tokens} tokens, {answer.ttft_s:.2f} s",
            flush=True,
        )

    async def families(self, tenant: str) -> None:
        """All families of one tenant, interleaved, one request at a time."""
        for question in QUESTIONS[:REQUESTS]:
            for number, topic in enumerate(TOPICS[:FAMILIES]):
                messages = chat(family(topic), question)
                reply = await self.http.post(
                    "/tokenize",
                    json={"model": "smollm2", "messages": messages},
                    headers={"authorization": f"Bearer {self.keys[tenant]}"},
                )
                self.ideal.request(tenant, reply.raise_for_status().json()["tokens"])
                try:
                    answer = await ask(self.clients[tenant], messages)
                except openai.APIError as error:
                    self.errors += 1
                    print(f"error: {error}", flush=True)
                    continue
                self.answers.setdefault((tenant, number), []).append(answer)
            print(f"{tenant}: {question} asked of {FAMILIES} families", flush=True)

    async def overflow(self, tenant: str) -> None:
        """Prompts that share nothing: together more than the pools have left."""
        for number in range(UNIQUE // len(TENANTS)):
            system = f"{tenant.title()}, edition {number}. {family('curators')}"
            await ask(self.clients[tenant], chat(system, "Why?"))
            print(f"{tenant}: unique prompt {number + 1}", flush=True)

    async def evictions(self) -> int:
        replicas = (await self.http.get("/admin/replicas")).raise_for_status().json()["replicas"]
        return sum(replica["evicted_blocks"] for replica in replicas)

    async def index_equals_replicas(self) -> bool:
        """Compare the router's index with each replica's own tree, block by block."""
        await asyncio.sleep(0.5)  # reports under way
        replicas = (await self.http.get("/admin/replicas")).raise_for_status().json()["replicas"]
        equal = len(replicas) == 2
        for replica in replicas:
            path = f"/admin/index/{replica['replica_id']}"
            index = (await self.http.get(path)).raise_for_status().json()["keys"]
            truth = await asyncio.to_thread(held, replica["address"]) or set()
            print(
                f"{replica['replica_id']}: index {len(index)} blocks, tree {len(truth)}",
                flush=True,
            )
            equal = equal and len(truth) > 0 and {int(key, 16) for key in index} == truth
        return equal

    def report(self) -> dict[str, float | int]:
        answers = [answer for family in self.answers.values() for answer in family]
        warm = [answer for family in self.answers.values() for answer in family[1:]]
        cold = [family[0] for family in self.answers.values()]
        at_home = sum(
            answer.replica == family[0].replica
            for family in self.answers.values()
            for answer in family[1:]
        )
        cached = sum(answer.cached_tokens for answer in answers)
        spread = Counter(answer.replica for answer in answers)
        print(f"requests by replica: {dict(spread)}", flush=True)
        return {
            "requests": len(answers) + self.errors,
            "errors": self.errors,
            "ideal_hit_rate": round(self.ideal.rate, 4),
            "hit_rate": round(cached / sum(answer.prompt_tokens for answer in answers), 4),
            "same_replica_rate": round(at_home / len(warm), 4),
            "warm_over_cold_ttft": round(
                statistics.median(answer.ttft_s for answer in warm)
                / statistics.median(answer.ttft_s for answer in cold),
                4,
            ),
        }


async def run(running: Cluster, keys: dict[str, str]) -> dict[str, float | int | bool]:
    smoke = Smoke(running, keys)
    await smoke.first_chat()
    await asyncio.gather(*(smoke.families(tenant) for tenant in TENANTS))
    before = await smoke.index_equals_replicas()
    await asyncio.gather(*(smoke.overflow(tenant) for tenant in TENANTS))
    after = await smoke.index_equals_replicas()
    report = smoke.report()
    return report | {
        "evictions": await smoke.evictions(),
        "index_equals_replicas": before and after,
    }


def holds(report: dict[str, float | int | bool]) -> list[str]:
    """The bounds that the report breaks."""
    bounds = {
        "errors = 0": report["errors"] == 0,
        "requests = 60": report["requests"] == len(TENANTS) * FAMILIES * REQUESTS,
        "hit_rate >= 0.9 ideal": report["hit_rate"] >= 0.9 * report["ideal_hit_rate"],
        "warm_over_cold_ttft <= 0.25": report["warm_over_cold_ttft"] <= 0.25,
        "evictions > 0": report["evictions"] > 0,
        "index_equals_replicas": report["index_equals_replicas"] is True,
    }
    return [bound for bound, kept in bounds.items() if not kept]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.smoke", description=__doc__)
    parser.parse_args()
    keys = {tenant: f"sk-{tenant}" for tenant in TENANTS}
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "hotbranch.yaml"
        tenants = [
            {
                "name": tenant,
                "key_sha256": hashlib.sha256(key.encode()).hexdigest(),
                "isolation": "tenant",
            }
            for tenant, key in keys.items()
        ]
        config.write_text(yaml.safe_dump({"tenants": tenants}))
        flags = [
            "--config",
            str(config),
            "--kv-tokens",
            str(KV_TOKENS),
            "--replicas",
            "2",
        ]
        with cluster(flags) as running:
            report = asyncio.run(run(running, keys))
    broken = holds(report)
    for bound in broken:
        print(f"broken: {bound}", file=sys.stderr, flush=True)
    print(json.dumps(report), flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
