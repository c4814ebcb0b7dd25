"""The Ray application and `hotbranch up`, on real Ray with the real model."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event
from typing import TextIO

import httpx
import pytest

from deploy import panel
from deploy.app import build
from deploy.registry import EXPIRY_S, Beat, Directory
from hotbranch.load_settings import SettingsError

WAIT_S = 200
FOREIGN = """
import sys, ray
context = ray.init(
    address="local", include_dashboard=False, num_cpus=3, object_store_memory=80 << 20
)
print(context.address_info["address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""
UNTOUCHED = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
assert ray.get(ray.put("alive")) == "alive"
assert not ray.util.list_named_actors(all_namespaces=True)
"""
QUICK = """
import sys
from deploy import autoscale
from hotbranch.cli import main
autoscale.REPORT_S, autoscale.LOOK_BACK_S = 1.0, 4.0
autoscale.BUSY = 9.0  # only what waits asks for replicas, most of it at the router
sys.exit(main(sys.argv[1:]))
"""
SLOW_PREFILL = """
step_s: 0.01
prefill_s: 2.0e-3
decode_s: 0
context_s: 0
attention_s: 0
chunk_tokens: 512
kv_tokens: 100000
kv_token_bytes: 1
max_context: 8192
"""
SMALL = ["--port=0", "--kv-tokens=2048", "--max-context=1024", "--drain-s=5"]


def test_directory_forgets_the_silent_and_the_leaving() -> None:
    directory = Directory(born=0.0)
    now = EXPIRY_S + 100.0
    for name in ("a", "b", "c"):
        directory.hear(Beat(name, "serving", f"{name}:1"), now)
    directory.hear(Beat("d", "loading weights", "d:1"), now)
    directory.hear(Beat("b", "serving", "b:1"), now + EXPIRY_S - 1)
    directory.forget("c")
    directory.forget("never heard of")
    assert directory.addresses(frozenset(), now) == {"a:1", "b:1", "d:1"}
    assert [beat.replica_id for beat in directory.beats(now)] == ["a", "b", "d"]
    assert directory.addresses(frozenset({"a:1", "b:1"}), now + EXPIRY_S) == {"b:1"}


def test_young_directory_takes_nobody_away() -> None:
    directory = Directory(born=100.0)
    directory.hear(Beat("a", "serving", "a:1"), 101.0)
    assert directory.addresses(frozenset({"b:1"}), 101.0) == {"a:1", "b:1"}
    directory.hear(Beat("a", "serving", "a:1"), 100.0 + EXPIRY_S)
    assert directory.addresses(frozenset({"b:1"}), 100.0 + EXPIRY_S) == {"a:1"}


def test_counters_sum_over_labels() -> None:
    exposition = """\
# TYPE hotbranch_requests counter
hotbranch_requests_total{status="200",tenant="a"} 3.0
hotbranch_requests_total{status="400",tenant="a"} 2.0
hotbranch_requests_total{status="503",tenant="b"} 1.0
# TYPE hotbranch_prompt_tokens counter
hotbranch_prompt_tokens_total{replica="r"} 80.0
# TYPE hotbranch_cached_tokens counter
hotbranch_cached_tokens_total{replica="r"} 60.0
"""
    totals = panel.counters(exposition)
    assert (totals.requests, totals.errors, totals.hit_rate) == (6, 1, 0.75)
    assert panel.counters("").hit_rate == 0.0


@pytest.mark.parametrize(
    ("state", "reported", "shown"),
    [
        ("ready", "serving", "ready"),
        ("draining", "serving", "draining"),
        ("connecting", "", "connecting"),
        ("connecting", "loading", "loading weights"),
        ("connecting", "out_of_memory", "out of memory"),
    ],
)
def test_the_panel_shows_what_a_replica_reports(state: str, reported: str, shown: str) -> None:
    entry: dict[str, object] = dict.fromkeys(panel.Replica.__dataclass_fields__, 0)
    entry |= {"state": state, "reported_state": reported, "in_flight": 3}
    assert panel.replica(entry).state == shown


def test_builder_takes_strings_and_names_the_wrong_one() -> None:
    deployments = build({"model": "smollm2", "replicas": "3", "replica_gpus": "0.5"})
    assert deployments._bound_deployment.name == "Router"
    with pytest.raises(SettingsError, match=r"^[^\n]*replicas[^\n]*$"):
        build({"replicas": "none"})
    with pytest.raises(SettingsError, match=r"^[^\n]*replics[^\n]*$"):
        build({"replics": "2"})


def test_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with up(f"--port={port}") as fleet:
            assert fleet.process.wait(WAIT_S) == 2
            assert re.search(rf"^hotbranch: .*\b{port}\b.*$", fleet.stderr(), re.MULTILINE)


@dataclass
class Fleet:
    """A running `hotbranch up`, the leader of its process group."""

    process: subprocess.Popen[str]
    errors: TextIO
    url: str = ""
    family: set[int] = field(default_factory=set)

    def wait_ready(self) -> None:
        assert self.process.stdout
        line = self.process.stdout.readline()
        match = re.match(r"ready (http://\S+)/v1 model=smollm2 replicas=\d+$", line)
        assert match, (line, self.stderr())
        self.url = match[1]
        self.family = descendants(self.process.pid)

    def interrupt(self) -> int:
        """Ctrl-C, as a terminal sends it: to the whole group. Returns the exit status."""
        self.family |= descendants(self.process.pid)
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(WAIT_S)

    def stderr(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def chat(self, text: str) -> httpx.Response:
        message = {"role": "user", "content": text}
        body = {"model": "smollm2", "messages": [message], "max_tokens": 2}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=WAIT_S)

    def keep_asking(self, number: int, enough: Event) -> list[int]:
        """Send one new prompt after the other; the statuses of the answers."""
        statuses = []
        while not enough.is_set():
            prompt = [1000 + number, 1000 + len(statuses), *range(700)]
            body = {"model": "smollm2", "prompt": prompt, "max_tokens": 1}
            answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=WAIT_S)
            statuses.append(answer.status_code)
        return statuses

    def stream(self, number: int, tokens: int, used: list[str]) -> int:
        """Generate so many tokens, on a replica that is added to `used`; how many came."""
        prompt = [2000 + number, *range(300)]
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": tokens}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        url = f"{self.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=WAIT_S) as answer:
            used.append(answer.headers["x-hotbranch-replica"])
            *_, usage, done = (line for line in answer.iter_lines() if line)
        assert done == "data: [DONE]"
        count: int = json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"]
        return count

    def ready(self) -> dict[str, str]:
        """Epochs of the replicas the router sends requests to."""
        listing = httpx.get(f"{self.url}/admin/replicas", timeout=WAIT_S).json()["replicas"]
        return {one["replica_id"]: one["epoch"] for one in listing if one["state"] == "ready"}


@contextmanager
def up(
    *flags: str, ray_address: str = "", program: Sequence[str] = ("-m", "hotbranch")
) -> Iterator[Fleet]:
    command = [sys.executable, "-X", "faulthandler", *program, "up", *flags]
    environment = os.environ | {"RAY_ADDRESS": ray_address}
    with TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        fleet = Fleet(process, errors)
        try:
            yield fleet
        except BaseException:
            process.send_signal(signal.SIGABRT)  # it writes down what its threads are doing
            process.wait()
            print(fleet.stderr())
            raise
        finally:
            process.kill()
            process.communicate()


def parents() -> dict[int, int]:
    """Parent of every process that is not a zombie."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            found[int(stat.parent.name)] = int(parent)
    return found


def descendants(pid: int) -> set[int]:
    parent_of = parents()
    family, size = {pid}, 0
    while len(family) > size:
        size = len(family)
        family |= {child for child, parent in parent_of.items() if parent in family}
    return family


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with up(*SMALL, "--replicas=2") as fleet:
        fleet.wait_ready()
        yield fleet


@pytest.mark.slow
def test_second_request_is_served_from_the_cache_of_the_first(fleet: Fleet) -> None:
    text = "A prompt of some blocks, so that there is something to be found again. " * 3
    first, second = fleet.chat(text), fleet.chat(text)
    assert first.status_code == second.status_code == 200
    replica = first.headers["x-hotbranch-replica"]
    assert replica in fleet.ready()
    assert second.headers["x-hotbranch-replica"] == replica
    usage = second.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["prompt_tokens"] - 16 <= cached < usage["prompt_tokens"]


@pytest.mark.slow
def test_a_killed_replica_is_replaced_and_requests_go_on(fleet: Fleet) -> None:
    before = fleet.ready()
    texts = [f"{number} is the first word of this prompt." for number in range(8)]
    assert all(fleet.chat(text).status_code == 200 for text in texts)

    workers = [pid for pid in fleet.family if re.search(r"^ray::.*:Replica", command_of(pid))]
    assert len(workers) == len(before) == 2
    os.kill(workers[0], signal.SIGKILL)
    assert [fleet.chat(text).status_code for text in texts] == [200] * len(texts)

    eventually(lambda: len(fleet.ready()) == 2 and fleet.ready() != before)
    after = fleet.ready()
    (new,) = after.keys() - before.keys()
    assert len(before.keys() - after.keys()) == 1
    assert after[new] not in before.values()
    assert fleet.chat(texts[0]).status_code == 200


@pytest.mark.slow
def test_ctrl_c_ends_everything_that_was_started(fleet: Fleet) -> None:
    assert len(fleet.family) > 5
    assert fleet.interrupt() == 0, fleet.stderr()
    left = fleet.family & parents().keys()
    assert not left, [command_of(pid) for pid in left]
    assert "Traceback" not in fleet.stderr()


@pytest.mark.slow
def test_replicas_come_with_the_work_and_finish_theirs_when_they_go(tmp_path: Path) -> None:
    profile = tmp_path / "slow.yaml"
    profile.write_text(SLOW_PREFILL)
    flags = ["--port=0", "--engine=simulated", f"--profile={profile}", "--drain-s=60"]
    flags += ["--replicas=1", "--max-replicas=2", "--target-queue-s=4"]
    flags += ["--scale-up-s=0", "--scale-down-s=1"]
    with up(*flags, program=("-c", QUICK)) as fleet, ThreadPoolExecutor(12) as pool:
        fleet.wait_ready()
        (first,) = fleet.ready()
        enough, used = Event(), list[str]()
        streams = [pool.submit(fleet.stream, number, 2000, used) for number in range(2)]
        eventually(lambda: used == [first, first])
        crowd = [pool.submit(fleet.keep_asking, number, enough) for number in range(6)]
        try:
            eventually(lambda: len(fleet.ready()) == 2)
            streams += [pool.submit(fleet.stream, number, 2000, used) for number in range(2, 6)]
            eventually(lambda: set(used) == fleet.ready().keys())
        finally:
            enough.set()
        assert all(status == 200 for asked in crowd for status in asked.result(WAIT_S))
        eventually(lambda: len(fleet.ready()) == 1)
        assert any(not stream.done() for stream in streams), "nothing was left to finish"
        assert [stream.result(WAIT_S) for stream in streams] == [2000] * len(streams)
        assert len(fleet.ready()) == 1
        assert fleet.interrupt() == 0, fleet.stderr()


@pytest.fixture(scope="module")
def foreign_ray() -> Iterator[str]:
    """The address of a Ray that is not ours to end.

    It is started by a process of its own: Ray forks, which this one must not do with the threads of
    gRPC in it. All who join know one token.
    """
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # Ray lets its workers starve behind anything else, such as the tests beside this one.
    environment = os.environ | {"RAY_worker_niceness": "0"}
    command = [sys.executable, "-c", FOREIGN]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        try:
            address = process.stdout.readline().strip()
            assert address, "it did not start"
            yield address
        finally:
            process.stdin.close()  # it ends its Ray
            process.wait(WAIT_S)
            del os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]


def assert_untouched(address: str) -> None:
    subprocess.run([sys.executable, "-c", UNTOUCHED, address], check=True, timeout=WAIT_S)


@pytest.mark.slow
def test_foreign_ray_loses_only_our_application(foreign_ray: str) -> None:
    with up(*SMALL, "--replicas=1", ray_address=foreign_ray) as fleet:
        fleet.wait_ready()
        assert fleet.chat("Hello").status_code == 200
        assert fleet.interrupt() == 0, fleet.stderr()
    assert_untouched(foreign_ray)


@pytest.mark.slow
def test_a_replica_that_cannot_start_says_why(foreign_ray: str) -> None:
    with up(*SMALL, "--kv-tokens=1000000000000", "--replicas=1", ray_address=foreign_ray) as fleet:
        assert fleet.process.wait(WAIT_S) == 1
        (reason,) = (line for line in fleet.stderr().splitlines() if "cannot start" in line)
        assert reason.startswith("hotbranch: replica cannot start: ")
        assert "out of memory: a KV pool of 1000000000000 tokens takes" in reason
        assert "Traceback" not in fleet.stderr()
    assert_untouched(foreign_ray)
