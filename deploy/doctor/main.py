"""The command: ask, compare, say it in lines or as JSON."""

import json
import sys
from collections.abc import Iterator

from deploy.doctor import probe, replica, router
from deploy.doctor.finding import Finding, Verdict
from hotbranch.settings import DoctorSettings
from hotbranch.v1.replica_pb2 import Description

ILL = 1
UNREACHABLE = 2


def run(settings: DoctorSettings) -> int:
    """0 when nothing is wrong, 1 when something is, 2 when the router cannot be asked."""
    client = router.Client(settings.url.rstrip("/"), settings.api_key, settings.admin_key)
    findings = []
    try:
        for finding in examine(client):
            findings.append(finding)
            if not settings.as_json:
                print(finding, flush=True)
    except router.Unreachable as error:
        print(f"hotbranch doctor: {error}", file=sys.stderr)
        return UNREACHABLE
    if settings.as_json:
        print(json.dumps([finding.record() for finding in findings]))
    return ILL if any(finding.verdict is Verdict.WRONG for finding in findings) else 0


def examine(client: router.Client) -> Iterator[Finding]:
    """All that can be said. Raises Unreachable."""
    fleet = router.Fleet()
    yield from router.look(client, fleet)
    found: dict[str, Description] = {}
    ready = router.ready(fleet.replicas)
    for each in ready:
        if not str(each["address"]).startswith("http"):  # a plain server has no contract
            yield from replica.look(each, found)
    yield from replica.compare(found)
    served = {each["model"] for each in ready} if fleet.replicas else set(fleet.models)
    for model in fleet.models:
        if model in served:
            yield from probe.probe(client, model, fleet, found)
