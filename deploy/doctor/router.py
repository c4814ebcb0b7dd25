"""The router as a client and as an operator see it."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import hotbranch
from deploy.doctor.finding import Finding, ok, warning, wrong

TIMEOUT_S = 60.0
SKEW_S = 2.0  # of clocks: an HTTP date is cut to seconds

MENDS: Mapping[str, str] = {
    "connecting": "start it, or correct its address",
    "refused": "give router and replica the same model, tokenizer and chat template",
    "draining": "wait, or start it again: it takes no new requests",
}


class Unreachable(Exception):
    """Nobody answers; the message is one line."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer. `headers` are by lower-case name; `at` is when it came, seconds of Unix."""

    status: int
    body: Any  # of JSON; None where it is not
    headers: Mapping[str, str]
    at: float

    @property
    def skew_s(self) -> float:
        """Its clock ahead of ours; 0 when it does not tell."""
        date = self.headers.get("date")
        return parsedate_to_datetime(date).timestamp() - self.at if date else 0.0


@dataclass(frozen=True, slots=True)
class Client:
    """Asks one router."""

    url: str
    api_key: str = ""
    admin_key: str = ""

    def get(self, path: str) -> Answer:
        key = self.admin_key if path.startswith("/admin") else self.api_key
        return ask(self.url + path, key)

    def post(self, path: str, body: Mapping[str, Any]) -> Answer:
        return ask(self.url + path, self.api_key, json.dumps(body).encode())


def ask(url: str, key: str = "", body: bytes | None = None) -> Answer:
    """GET, or POST of a body. Raises Unreachable."""
    headers = {"content-type": "application/json"} if body else {}
    if key:
        headers["authorization"] = f"Bearer {key}"
    try:
        with urlopen(Request(url, body, headers), timeout=TIMEOUT_S) as reply:
            return _answer(reply.status, reply.read(), reply.headers)
    except HTTPError as error:
        return _answer(error.code, error.read(), error.headers)
    except (URLError, HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Unreachable(f"{url} does not answer: {reason}") from None


def _answer(status: int, data: bytes, headers: Any) -> Answer:
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    return Answer(status, body, {key.lower(): value for key, value in headers.items()}, time.time())


@dataclass(slots=True)
class Fleet:
    """What the router knows: its models, and its replicas as /admin/replicas tells them."""

    models: list[str] = field(default_factory=list)
    replicas: list[dict[str, Any]] = field(default_factory=list)


def look(client: Client, fleet: Fleet) -> Iterator[Finding]:
    """Fill in the fleet. Raises Unreachable when the router does not answer at all."""
    url = client.url
    answer = client.get("/version")
    version = (answer.body or {}).get("version") if isinstance(answer.body, dict) else None
    if version is None:
        raise Unreachable(f"{url} answers, but not as a router of ours")
    if version != hotbranch.__version__:
        what = f"the router is version {version}, this doctor {hotbranch.__version__}"
        yield warning(url, what, "run the doctor that came with the router")
    else:
        yield ok(url, f"router {version}")
    if abs(answer.skew_s) > SKEW_S:
        yield warning(
            url, f"its clock is {answer.skew_s:+.0f} s off ours", "synchronise the clocks"
        )
    yield from _models(client, fleet)
    yield from _replicas(client, fleet)


def _models(client: Client, fleet: Fleet) -> Iterator[Finding]:
    answer = client.get("/v1/models")
    if answer.status == 401:
        yield wrong(client.url, "it does not know the API key", "give a tenant's with --api-key")
    elif answer.status != 200:
        yield wrong(client.url, f"/v1/models answers {answer.status}", "see the router's log")
    else:
        fleet.models = [entry["id"] for entry in answer.body["data"]]
        yield ok(client.url, f"models: {', '.join(fleet.models)}")


def _replicas(client: Client, fleet: Fleet) -> Iterator[Finding]:
    answer = client.get("/admin/replicas")
    if answer.status != 200:
        mend = "give --admin-key, or run the doctor on the router's machine"
        yield warning(client.url, f"/admin answers {answer.status}: replicas are not seen", mend)
        return
    fleet.replicas = answer.body["replicas"]
    if not fleet.replicas:
        yield wrong(client.url, "it has no replicas", "give it some with --replica or --upstream")
    for replica in fleet.replicas:
        yield _state(replica)
        if replica["cached_blocks"] and not replica["index_blocks"]:
            what = f"it caches {replica['cached_blocks']} blocks, and the index knows of none"
            yield wrong(name(replica), what, "see `problem` and `recoveries` in /admin/replicas")


def _state(replica: Mapping[str, Any]) -> Finding:
    state, problem = replica["state"], replica["problem"]
    if state == "ready" and not problem:
        return ok(name(replica), f"ready, {replica['engine']}, model {replica['model']}")
    mend = MENDS.get(state, "see its log")
    if state == "ready":
        return wrong(
            name(replica), problem, "bring it and the router to the same version and model"
        )
    reported = replica.get("reported_state") or state
    what = f"{state} ({reported})" if reported != state else state
    return wrong(name(replica), f"{what}: {problem}" if problem else what, mend)


def name(replica: Mapping[str, Any]) -> str:
    return str(replica["replica_id"] or replica["address"])


def ready(replicas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [replica for replica in replicas if replica["state"] == "ready"]
