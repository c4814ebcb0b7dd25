"""The simulated engine: its timing is the profile's, its cache and scheduler are the radix ones."""

import threading
import time
from array import array
from pathlib import Path

import pytest

from replicas.engine import Finish, Namespace, Output, Request, Sampling, Step
from replicas.radix.engine import RadixEngine
from replicas.radix.scheduler import Limits
from replicas.radix.sequence import Chunk, Sequence
from replicas.simulated.profile import DEFAULT, PROFILES, Profile, ProfileError
from replicas.simulated.runner import LONGEST, SHORTEST, SimulatedRunner
from replicas.simulated.virtual import VirtualReplica

PROFILE = Profile.load(DEFAULT)
EOS = 99


def request(id: int, prompt: list[int], max_tokens: int = 4, **more: object) -> Request:
    sampling = Sampling(max_tokens, **more)  # type: ignore[arg-type]
    return Request(id, Namespace("m"), array("I", prompt).tobytes(), sampling)


def chunk(start: int, end: int) -> Chunk:
    asked = request(0, [1] * end)
    return Chunk(Sequence(asked, array("I", asked.prompt), end, 0.0), start, end)


def limits(policy: str = "longest_prefix") -> Limits:
    return Limits(16, 400, 4096, 512, 8, policy, 60.0)  # type: ignore[arg-type]


def test_a_step_takes_what_the_published_model_says() -> None:
    """T = 6.6 + 0.020 n + 0.020 B + 4.5e-5 KV + 1.05e-6 sum n (ctx + n / 2), in milliseconds."""
    chunks = [chunk(0, 1000), chunk(3000, 3500), chunk(99, 100), chunk(499, 500)]
    wanted = 6.6 + 0.020 * 1500 + 0.020 * 2 + 4.5e-5 * 600
    wanted += 1.05e-6 * (1000 * 500 + 500 * (3000 + 250))
    assert PROFILE.seconds(chunks) == pytest.approx(wanted / 1000)


def test_every_profile_loads_and_the_slow_one_differs_in_prefill_alone() -> None:
    profiles = {path.stem: Profile.load(path.stem) for path in PROFILES.glob("*.yaml")}
    slow = profiles[f"{DEFAULT}-slow"]
    assert slow.model_copy(update={"prefill_s": 2.0e-5}) == profiles[DEFAULT]
    assert slow.prefill_s == 2.4e-5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step_s: -1", "step_s"),
        ("step_s: fast", "step_s"),
        ("- 1", "file.yaml"),
        ("{", "not YAML"),
        ("speed: 1", "speed|step_s"),
    ],
)
def test_a_file_that_is_no_profile_is_told_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message) as caught:
        Profile.load(str(path))
    assert "\n" not in str(caught.value)


def test_an_unknown_profile_names_those_that_there_are() -> None:
    with pytest.raises(ProfileError, match=f"'h200': name a .yaml file, or {DEFAULT}"):
        Profile.load("h200")


def test_steps_that_follow_each_other_take_no_less_than_the_profile_says() -> None:
    runner = SimulatedRunner(PROFILE, [1, 2, 3], EOS)
    began = time.monotonic()
    for _ in range(5):
        runner.run([chunk(99, 100)])
    assert time.monotonic() - began >= 5 * PROFILE.seconds([chunk(99, 100)])


def served(requests: list[Request]) -> dict[int, list[Output]]:
    """What a simulated engine answers, each request after the one before it."""
    fast = PROFILE.model_copy(update={"step_s": 0.0})
    engine = RadixEngine(
        limits(), SimulatedRunner(fast, [5, 6, 7], EOS), frozenset({EOS}), lambda _: Silent(), 100
    )
    outputs: dict[int, list[Output]] = {asked.id: [] for asked in requests}
    ended = threading.Semaphore(0)

    def emit(step: Step) -> None:
        for output in step.outputs:
            outputs[output.id].append(output)
            if output.finish is not None:
                ended.release()

    engine.start(emit)
    for asked in requests:
        engine.submit(asked)
        assert ended.acquire(timeout=60)
    engine.stop()
    return outputs


class Silent:
    def push(self, token: int) -> tuple[str, str | None]:
        return "", None

    def flush(self) -> str:
        return ""


def test_answers_depend_on_the_prompt_alone_and_end() -> None:
    prompt = list(range(1, 65))
    outputs = served([request(1, prompt, 1000), request(2, prompt, 1000), request(3, [1], 1000)])
    tokens = {id: [t for o in some for t in o.tokens] for id, some in outputs.items()}
    assert tokens[1] == tokens[2] != tokens[3]
    for id, some in outputs.items():
        assert some[-1].finish == Finish.STOP and tokens[id][-1] == EOS
        assert SHORTEST < len(tokens[id]) <= LONGEST
    assert outputs[1][0].cached_tokens == 0
    assert outputs[2][0].cached_tokens == 48  # of 64, one block holds the token to sample from


def test_an_answer_has_the_tokens_that_it_has_to_have_at_least() -> None:
    some = served([request(1, [1, 2, 3], 1000, min_tokens=LONGEST + 50)])[1]
    tokens = [token for output in some for token in output.tokens]
    assert some[-1].finish == Finish.STOP
    assert tokens.index(EOS) == LONGEST + 50


def test_an_answer_is_as_long_as_it_was_asked_to_be_and_has_logprobs() -> None:
    asked = request(1, [1, 2, 3], 400, ignore_eos=True, logprobs=1)
    outputs = served([asked])[1]
    assert outputs[-1].finish == Finish.LENGTH
    assert sum(len(output.tokens) for output in outputs) == 400
    for output in outputs:
        assert output.logprobs is not None
        assert [known.token for known in output.logprobs] == output.tokens


def test_a_virtual_replica_takes_the_time_of_its_steps() -> None:
    replica = VirtualReplica(PROFILE, limits())
    replica.add(request(1, [1] * 700, 3), 10.0)
    now, steps = 10.0, []
    while not replica.idle:
        end = replica.begin(now)
        steps.append(end - now)
        now = end
        replica.end(now)
    wanted = [
        PROFILE.seconds([chunk(0, 512)]),
        PROFILE.seconds([chunk(512, 700)]),
        PROFILE.seconds([chunk(700, 701)]),
        PROFILE.seconds([chunk(701, 702)]),
    ]
    assert steps == pytest.approx(wanted)
    load = replica.load()
    assert load.step_s > 0 and load.prefill_s_per_token > 0 and load.cached_blocks == 43
