"""The real model: its greedy text is the same whatever cache and scheduler do."""

import queue
import random
from array import array
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from hotbranch.settings import ReplicaSettings
from replicas.build import open_text
from replicas.engine import Finish, Namespace, Output, Request, Sampling, Step
from replicas.radix.engine import RadixEngine
from replicas.radix.runner import ModelRunner, load
from replicas.radix.scheduler import Limits
from replicas.radix.sequence import Chunk, Sampled, Sequence

PATIENCE_S = 200.0
LONG = 36  # tokens
SUBJECTS = ("tides", "bread", "glass", "bees", "clocks", "rivers", "paper", "salt", "kites", "ice")
QUESTIONS = (
    "What is it made of?",
    "Who first wrote about it?",
    "Why does it matter?",
    "Where is it found?",
    "How old is it?",
    "What does it cost?",
    "What harms it?",
    "What is it used for?",
    "Name one rule about it.",
    "Name one book about it.",
)
CHAT = (
    "<|im_start|>system\nYou know all about {0}. Answer in one sentence, and never speak of "
    "anything but {0}.<|im_end|>\n<|im_start|>user\nThink of {0}. {1}<|im_end|>\n"
    "<|im_start|>assistant\n"
)


class WatchedRunner:
    """A runner that counts sequences whose tokens are computed a second time: the preempted."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.recomputed = 0
        self.mixed = 0  # steps that decode and prefill
        self._computed: dict[Sequence, int] = {}

    def run(self, chunks: list[Chunk]) -> list[Sampled | None]:
        for chunk in chunks:
            self.recomputed += chunk.start < self._computed.get(chunk.sequence, 0)
            self._computed[chunk.sequence] = chunk.end
        decoding = sum(chunk.end - chunk.start == 1 for chunk in chunks)
        self.mixed += 0 < decoding < len(chunks)
        return self.runner.run(chunks)

    def forget(self, sequence: Sequence) -> None:
        self._computed.pop(sequence, None)
        self.runner.forget(sequence)


@pytest.fixture(scope="module")
def runner(smollm2: Path) -> ModelRunner:
    return load(smollm2, ReplicaSettings(dtype="float32", threads=1, kv_tokens=1024))


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


def generate(
    watched: WatchedRunner, tokenizer: Tokenizer, requests: list[Request], blocks: int
) -> tuple[dict[int, str], int, int]:
    """Texts by request id, cached tokens, evicted blocks."""
    limits = Limits(16, blocks, 1024, 96, 12, "longest_prefix", 60.0)
    runner = watched.runner
    engine = RadixEngine(
        limits,
        watched,
        runner.eos_ids,
        partial(open_text, tokenizer),
        runner.vocab_size,
    )
    outputs: queue.Queue[Output] = queue.Queue()

    def emit(step: Step) -> None:
        for output in step.outputs:
            outputs.put(output)

    engine.start(emit)
    try:
        for request in requests:
            engine.submit(request)
        texts = {request.id: "" for request in requests}
        cached, unfinished = 0, len(requests)
        while unfinished:
            output = outputs.get(timeout=PATIENCE_S)
            texts[output.id] += output.text
            cached += output.cached_tokens or 0
            if output.finish is not None:
                assert output.finish in (Finish.STOP, Finish.LENGTH), output.error
                unfinished -= 1
        return texts, cached, engine.load().evicted_blocks
    finally:
        engine.stop()


def requests(tokenizer: Tokenizer, reuse: bool) -> list[Request]:
    """A hundred prompts of ten families; without reuse each has a namespace of its own."""
    made = []
    for i, (subject, question) in enumerate((s, q) for s in SUBJECTS for q in QUESTIONS):
        ids = tokenizer.encode(CHAT.format(subject, question)).ids
        long = i % 10 == 0
        made.append(
            Request(
                id=i,
                namespace=Namespace("m", salt="" if reuse else str(i)),
                prompt=array("I", ids).tobytes(),
                sampling=Sampling(max_tokens=LONG if long else 5, ignore_eos=long),
                priority=0 if long else 1,  # the long ones grow side by side, beyond the pool
            )
        )
    random.Random(7).shuffle(made)
    return made


@pytest.mark.slow
def test_text_is_the_same_with_reuse_on_and_off(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    plain, none_cached, _ = generate(
        WatchedRunner(runner), tokenizer, requests(tokenizer, reuse=False), blocks=64
    )
    assert none_cached == 0
    watched = WatchedRunner(runner)
    reused, cached, evicted = generate(
        watched, tokenizer, requests(tokenizer, reuse=True), blocks=30
    )
    assert reused == plain
    assert len(set(plain.values())) > 60, "the prompts are told apart"
    # what the second run is there for did happen
    assert cached > 1000
    assert evicted > 50
    assert watched.recomputed > 0
    assert watched.mixed > 20
