"""Each replica, asked on its own port, and the replicas of a model beside each other."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc

import hotbranch
from deploy.doctor.finding import Finding, ok, warning, wrong
from deploy.doctor.router import SKEW_S, Unreachable, ask, name
from hotbranch.keys import key_check
from hotbranch.v1.cache_pb2 import WatchRequest
from hotbranch.v1.replica_pb2 import DescribeRequest, Description
from hotbranch.v1.replica_pb2_grpc import ReplicaStub

TIMEOUT_S = 20.0


def look(replica: Mapping[str, Any], found: dict[str, Description]) -> Iterator[Finding]:
    """Ask one replica what it is; its description enters `found`, by its name."""
    about = name(replica)
    try:
        with grpc.insecure_channel(replica["address"]) as channel:
            here = ReplicaStub(channel).Describe(DescribeRequest(), timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        what = f"{replica['address']} does not answer us: {error.details()}"
        yield warning(about, what, "run the doctor where its port can be reached")
        return
    found[about] = here
    if here.version != hotbranch.__version__:
        what = f"it is version {here.version}, this doctor {hotbranch.__version__}"
        yield wrong(about, what, "install the same version everywhere")
    if here.key_check != key_check():
        yield wrong(
            about,
            "it computes other block keys than we do: its reports say nothing to the router",
            "reinstall hotbranch and xxhash there",
        )
    else:
        yield ok(about, f"blocks of {here.block_size} tokens, keys equal ours")
    yield from _clock(about, here)


def _clock(about: str, here: Description) -> Iterator[Finding]:
    try:
        skew_s = ask(f"http://{here.metrics_address}/metrics").skew_s
    except Unreachable as error:
        yield warning(about, f"its metrics: {error}", "let Prometheus reach its metrics port")
        return
    if abs(skew_s) > SKEW_S:
        yield warning(about, f"its clock is {skew_s:+.0f} s off ours", "synchronise the clocks")


def compare(found: Mapping[str, Description]) -> Iterator[Finding]:
    """Replicas of one model should agree."""
    for model in sorted({here.model for here in found.values()}):
        those = {about: here for about, here in found.items() if here.model == model}
        if len({here.tokenizer_fingerprint for here in those.values()}) > 1:
            names = ", ".join(sorted(those))
            yield wrong(model, f"tokenizers differ among {names}", "serve the same directory")
        sizes = {here.block_size for here in those.values()}
        if len(sizes) > 1:
            told = ", ".join(f"{about} {here.block_size}" for about, here in sorted(those.items()))
            what = f"block sizes differ, so that each prompt is hashed for each: {told}"
            yield warning(model, what, "start the engines with one block size")


def held(address: str) -> set[int] | None:
    """The keys in a snapshot of a replica's cache, taken now; None when it does not report."""
    keys: set[int] = set()
    try:
        with grpc.insecure_channel(address) as channel:
            stream = ReplicaStub(channel).WatchCache(WatchRequest(), timeout=TIMEOUT_S)
            for update in stream:
                for run in update.snapshot.runs:
                    keys.update(run.keys)
                if update.snapshot.last:
                    return keys
    except grpc.RpcError:
        return None
    return None


def largest_block(found: Sequence[Description]) -> int:
    """In tokens; a common one where no replica tells."""
    return max((here.block_size for here in found), default=16)
