"""The engine's logits against Hugging Face's, on tiny models of each family and on a real one."""

import argparse
import inspect
import json
import os
import textwrap
import time
from array import array
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tiny_models
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hotbranch.settings import ReplicaSettings
from replicas.engine import Namespace, Request, Sampling
from replicas.radix.config import ModelConfig, UnsupportedModel, parse_config, read_config
from replicas.radix.native_ops import NativeOps
from replicas.radix.ops import TorchOps
from replicas.radix.runner import ModelRunner, choose_dtype, load
from replicas.radix.sequence import Chunk, Sequence

BLOCK = 16
TOLERANCE = 1e-3


class Blocks:
    """Hands out every block once, in an order that no table can take for contiguous."""

    def __init__(self, runner: ModelRunner) -> None:
        blocks = list(range(runner.capacity_blocks))
        Random(0).shuffle(blocks)
        self._free = iter(blocks)

    def take(self, tokens: int) -> list[int]:
        return [next(self._free) for _ in range(-(-tokens // BLOCK))]


def sequence(ids: list[int], blocks: list[int], sampling: Sampling | None = None) -> Sequence:
    request = Request(0, Namespace("m"), b"", sampling or Sampling(max_tokens=1))
    return Sequence(request, array("I", ids), len(ids), arrival=0.0, blocks=blocks)


def settings(**changes: Any) -> ReplicaSettings:
    defaults = {"threads": 1, "block_size": BLOCK, "kv_tokens": 2048, "dtype": "float32"}
    return ReplicaSettings(**{**defaults, "device": "cpu", **changes})


@torch.inference_mode()
def reference_hidden(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model.model(input_ids=torch.tensor([ids])).last_hidden_state[0]


@torch.inference_mode()
def difference(model: PreTrainedModel, hidden: Tensor, logits: Tensor) -> float:
    """Largest difference of `logits` from the reference at the same positions."""
    assert logits.shape == (len(hidden), model.config.vocab_size)
    return float((model.lm_head(hidden) - logits).abs().max())


def random_ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 320, (length,), generator=generator).tolist()


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@pytest.mark.parametrize("ops", [TorchOps, NativeOps])
def test_every_family_matches_transformers_whole_chunked_and_mixed(
    family: str, ops: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ops is TorchOps:
        monkeypatch.setattr("replicas.radix.native.load", lambda cache_dir: None)
    model = tiny_models.make(family, tmp_path, wide=ops is NativeOps)
    runner = load(tmp_path, settings())
    assert type(runner._model.ops) is ops
    free = Blocks(runner)
    long, short, tail = random_ids(300, 1), random_ids(37, 2), random_ids(21, 3)
    references = {len(ids): reference_hidden(model, ids) for ids in (long, short, tail)}

    whole = sequence(long, free.take(300))
    (logits,) = runner.logits([Chunk(whole, 0, 300)])
    assert difference(model, references[300], logits) <= TOLERANCE
    assert logits.std() > 0.5, "flat logits would agree by being small"

    # The same tokens in chunks that end inside blocks, beside a decode and another prefill.
    chunked = sequence(long, free.take(300))
    decoding, other = sequence(short, free.take(37)), sequence(tail, free.take(21))
    runner.logits([Chunk(decoding, 0, 35)])
    runner.logits([Chunk(chunked, 0, 101)])
    step = [Chunk(chunked, 101, 250), Chunk(decoding, 35, 36), Chunk(other, 0, 21)]
    for chunk, logits in zip(step, runner.logits(step), strict=True):
        reference = references[len(chunk.sequence.tokens)][chunk.start : chunk.end]
        assert difference(model, reference, logits) <= TOLERANCE
    step = [Chunk(decoding, 36, 37), Chunk(chunked, 250, 300)]
    for chunk, logits in zip(step, runner.logits(step), strict=True):
        reference = references[len(chunk.sequence.tokens)][chunk.start : chunk.end]
        assert difference(model, reference, logits) <= TOLERANCE


def test_sharded_weights_are_the_same_weights(tmp_path: Path) -> None:
    model = tiny_models.make("qwen2", tmp_path, shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    runner = load(tmp_path, settings())
    ids = random_ids(40, 4)
    (logits,) = runner.logits([Chunk(sequence(ids, Blocks(runner).take(40)), 0, 40)])
    assert difference(model, reference_hidden(model, ids), logits) <= TOLERANCE


@pytest.mark.parametrize("wide", [False, True])
def test_one_decode_batch_of_many_lengths(wide: bool, tmp_path: Path) -> None:
    """Padding and grouping: contexts from 1 to 500 in one step, each the last of its own text."""
    model = tiny_models.make("llama3", tmp_path, wide=wide)
    runner = load(tmp_path, settings(kv_tokens=4096))
    free = Blocks(runner)
    lengths = [500, 1, 2, 128, 15, 16, 300, 17, 31, 32, 33, 63, 64, 100, 100, 127]
    texts = [random_ids(length, seed) for seed, length in enumerate(lengths)]
    sequences = [sequence(ids, free.take(len(ids))) for ids in texts]
    runner.logits([Chunk(s, 0, len(s.tokens) - 1) for s in sequences if len(s.tokens) > 1])
    step = [Chunk(s, len(s.tokens) - 1, len(s.tokens)) for s in sequences]
    computed = runner.logits(step)
    for ids, logits in zip(texts, computed, strict=True):
        assert difference(model, reference_hidden(model, ids)[-1:], logits) <= TOLERANCE
    unfinished = Chunk(sequence(random_ids(40, 99), free.take(40)), 0, 30)
    sampled = runner.run([*step[:5], unfinished, *step[5:]])
    assert sampled.pop(5) is None
    expected = [int(logits.argmax()) for logits in computed]
    assert [s.token for s in sampled if s is not None] == expected
    assert len(set(expected)) > 8


def test_run_samples_where_a_chunk_ends_its_sequence(tmp_path: Path) -> None:
    """Greedy generation, step by step, is what transformers generates."""
    model = tiny_models.make("qwen3", tmp_path)
    runner = load(tmp_path, settings())
    prompt = random_ids(50, 6)
    generated = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        use_cache=True,
    )[0, 50:].tolist()
    one = sequence(prompt, Blocks(runner).take(64))
    assert runner.run([]) == []
    assert runner.run([Chunk(one, 0, 20)]) == [None]
    start = 20
    for expected in generated:
        (sampled,) = runner.run([Chunk(one, start, len(one.tokens))])
        assert sampled is not None
        assert sampled.token == expected
        start = len(one.tokens)
        one.tokens.append(sampled.token)


def test_facts_come_from_the_model_and_the_settings(tmp_path: Path) -> None:
    tiny_models.make("llama_tied", tmp_path)
    runner = load(tmp_path, settings(kv_tokens=1000, max_context=200))
    assert (runner.block_size, runner.capacity_blocks) == (16, 62)
    assert (runner.vocab_size, runner.max_context, runner.eos_ids) == (320, 200, {1, 7})
    config = json.loads((tmp_path / "config.json").read_text())
    assert parse_config(config, {"eos_token_id": 5}).eos_ids == {5}
    assert parse_config(config, {}).context == 1024
    assert parse_config(config, {}, max_context=4096).context == 1024


def config_file(**changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], **tiny_models.SHAPE}
    return raw | changes


def test_both_spellings_of_rope_scaling_are_read() -> None:
    scaling = {k: v for k, v in tiny_models.LLAMA3_ROPE.items() if k != "rope_theta"}
    old = parse_config(config_file(rope_theta=10000.0, rope_scaling=scaling), {})
    new = parse_config(config_file(rope_parameters=tiny_models.LLAMA3_ROPE), {})
    assert old == new
    assert old.rope.kind == "llama3"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None}, "unsupported architecture: none"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 4}, "no multiple of 4"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, "window of 512"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
            },
            "window of 9",
        ),
    ],
)
def test_what_is_unsupported_is_named_in_one_line(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        parse_config(config_file(**changes), {})
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sliding_window_that_never_slides_is_supported() -> None:
    mistral = config_file(architectures=["MistralForCausalLM"], sliding_window=512)
    assert parse_config(mistral, {}, max_context=512).context == 512
    qwen = config_file(architectures=["Qwen2ForCausalLM"], sliding_window=512)
    assert parse_config(qwen, {}).qkv_bias


def test_broken_directories_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json: no such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="not JSON"):
        read_config(tmp_path)
    tiny_models.make("llama3", tmp_path)
    shape = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shape | {"intermediate_size": 96}))
    with pytest.raises(UnsupportedModel, match=r"gate_proj.weight has shape \(80, 48\)"):
        load(tmp_path, settings())
    (tmp_path / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 4}))
    with pytest.raises(UnsupportedModel, match=r"no tensor model\.layers\.3"):
        load(tmp_path, settings())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors: no such file"):
        load(tmp_path, settings())


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"device": "tpu9"}, "tpu9"), ({"kv_tokens": 8}, "less than one block")],
)
def test_settings_that_cannot_work_are_named(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    tiny_models.make("llama3", tmp_path)
    with pytest.raises(UnsupportedModel, match=named):
        load(tmp_path, settings(**changes))


def test_dtype_follows_the_device_and_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: ModelConfig = parse_config(config_file(dtype="float16"), {})
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_dtype("auto", config, cuda) is torch.float16
    assert choose_dtype("bfloat16", config, cpu) is torch.bfloat16
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert choose_dtype("auto", config, cpu) is torch.bfloat16
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False})
    assert choose_dtype("auto", config, cpu) is torch.float32


@torch.inference_mode()
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@pytest.mark.parametrize("native", [False, True])
def test_bfloat16_stays_as_near_to_float32_as_transformers(
    family: str, native: bool, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same weights in float32. The kernels sum up in float32, and come nearer."""
    if not native:
        monkeypatch.setattr("replicas.radix.native.load", lambda cache_dir: None)
    tiny_models.make(family, tmp_path, wide=native)
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    exact = deepcopy(narrow).float()
    narrow.save_pretrained(tmp_path)
    runner = load(tmp_path, settings(dtype="bfloat16", threads=threads))
    assert runner.dtype == torch.bfloat16
    if torch.cpu.get_capabilities().get("avx512_bf16"):
        assert isinstance(runner._model.ops, NativeOps) == native
    elif native:
        pytest.skip("the kernels of this machine have no bfloat16")
    ids = random_ids(160, 8)
    free = Blocks(runner)
    one, beside = sequence(ids, free.take(160)), sequence(ids[:43], free.take(43))
    steps = [
        [Chunk(one, 0, 77)],
        [Chunk(one, 77, 158), Chunk(beside, 0, 41)],
        [Chunk(one, 158, 159), Chunk(beside, 41, 42)],
        [Chunk(one, 159, 160), Chunk(beside, 42, 43)],
    ]
    ours: dict[int, list[Tensor]] = {160: [], 43: []}
    for step in steps:
        for chunk, logits in zip(step, runner.logits(step), strict=True):
            ours[len(chunk.sequence.tokens)].append(logits)
    for length, parts in ours.items():
        tokens = torch.tensor([ids[:length]])
        reference, theirs = exact(tokens).logits[0], narrow(tokens).logits[0].float()
        error, usual = torch.cat(parts) - reference, theirs - reference
        assert error.square().mean() < (0.7 if native else 1.1) * usual.square().mean()
        assert error.abs().max() < 1.2 * usual.abs().max()
    torch.set_num_threads(1)


def test_loading_leaves_no_threads_waiting(tmp_path: Path) -> None:
    """The thread that computes the steps gets its own; with those of another, none would spin."""
    tiny_models.make("llama3", tmp_path, wide=True)
    before = len(os.listdir("/proc/self/task"))
    runner = load(tmp_path, settings(threads=2))
    assert isinstance(runner._model.ops, NativeOps)
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) <= before
    runner.logits([Chunk(sequence([7], [0]), 0, 1)])
    assert len(os.listdir("/proc/self/task")) <= before + 1
    torch.set_num_threads(1)


# The real model.

LENGTHS = [5, 7, 9, 12, 15, 16, 17, 20, 25, 32, 33, 40, 50, 64, 80, 100, 130, 200, 400, 3000]


def real_texts() -> Iterator[str]:
    """English and code that ships with Python, as prompts begin: many different first words."""
    documented = (argparse, json, inspect, textwrap, pytest)
    source = "\n".join(inspect.getsource(module) for module in documented[:4])
    prose = "\n\n".join(
        inspect.getdoc(member) or ""
        for module in documented
        for _, member in inspect.getmembers(module, callable)
    )
    return (
        (prose if turn % 2 else source)[turn * 1500 :] if turn < 19 else source
        for turn in range(20)
    )


@pytest.fixture(scope="module")
def real(smollm2: Path) -> tuple[PreTrainedModel, ModelRunner, list[list[int]]]:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    texts = zip(real_texts(), LENGTHS, strict=True)
    prompts = [tokenizer.encode(text[: 12 * length]).ids[:length] for text, length in texts]
    assert [len(ids) for ids in prompts] == LENGTHS
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    return model, load(smollm2, settings(kv_tokens=16384)), prompts


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_model_matches_transformers_with_and_without_a_prefix(
    real: tuple[PreTrainedModel, ModelRunner, list[list[int]]],
) -> None:
    """20 prompts whole or in chunks; then each again, behind the shared blocks of its first half;
    then the last token of all of them in one step, with a prefill beside them."""
    model, runner, prompts = real
    free = Blocks(runner)
    worst: dict[str, float] = {"whole": 0.0, "suffix": 0.0, "mixed": 0.0}
    decodes, references = [], []
    for ids in prompts:
        length = len(ids)
        reference = reference_hidden(model, ids)
        first = sequence(ids, free.take(length))
        for start in range(0, length, 700):
            chunk = Chunk(first, start, min(start + 700, length))
            (logits,) = runner.logits([chunk])
            found = difference(model, reference[chunk.start : chunk.end], logits)
            worst["whole"] = max(worst["whole"], found)

        shared = (length - min(length // 2, 100)) // BLOCK
        if shared:
            second = sequence(ids, first.blocks[:shared] + free.take(length - shared * BLOCK))
            (logits,) = runner.logits([Chunk(second, shared * BLOCK, length)])
            found = difference(model, reference[shared * BLOCK :], logits)
            worst["suffix"] = max(worst["suffix"], found)
        decodes.append(Chunk(first, length - 1, length))
        references.append(reference[-1:])

    prefill = Chunk(sequence(prompts[15], free.take(100)), 0, 100)
    step = [*decodes[:7], prefill, *decodes[7:]]
    references.insert(7, reference_hidden(model, prompts[15]))
    for reference, logits in zip(references, runner.logits(step), strict=True):
        worst["mixed"] = max(worst["mixed"], difference(model, reference, logits))
    assert {name: found for name, found in worst.items() if found > TOLERANCE} == {}
