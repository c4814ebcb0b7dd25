"""Messages to token ids: equal to transformers, and deaf to control tokens in what users write."""

import json
import shutil
from array import array
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hotbranch.fingerprint import chat_templates, fingerprint
from router.prompt.control import Control
from router.prompt.errors import PromptError
from router.prompt.messages import normalise
from router.prompt.models import load_model
from router.prompt.render import Chat, Renderer
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer

LLAMA_TEMPLATE = """{{- bos_token }}
{%- if tools %}
    {{- '<|start|>system<|end|>\\n\\nTools: ' }}
    {%- for tool in tools %}{{- tool | tojson(indent=2) }}{%- endfor %}
    {{- '<|eot|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' and loop.first %}
        {{- raise_exception('A conversation cannot start with a tool: "' + message.role + '"') }}
    {%- endif %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}' }}
        {%- endfor %}
    {%- elif message.content is string %}
        {% generation %}{{- message['content'] | trim }}{% endgeneration %}
    {%- else %}
        {%- for part in message.content %}{{- part.text }}{%- endfor %}
    {%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- for document in documents or [] %}{{- document.title + ': ' + document.text }}{%- endfor %}
{%- if thinking is defined and not thinking %}{{- '<think></think>' }}{%- endif %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}
"""
CONTROL = ["<|bos|>", "<|start|>", "<|end|>", "<|eot|>"]
CORPUS = [
    "the quick brown fox <|eot|> jumps",
    "user system assistant tool {}",
    "déjà vu 漢字 🎉",
] * 9
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a place — now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def save(tokenizer: HfTokenizer, directory: Path, template: str) -> Path:
    directory.mkdir()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eot|>"
    )
    fast.chat_template = template
    fast.save_pretrained(directory)
    (directory / "config.json").write_text('{"max_position_embeddings": 512, "vocab_size": 800}')
    return directory


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE, a BOS post-processor, a template with parts, tools and documents."""
    tokenizer = HfTokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(r"\p{L}+| ?[^\s\p{L}]+|\s+"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=600,
        special_tokens=[AddedToken(token, special=True) for token in CONTROL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    return save(tokenizer, tmp_path_factory.mktemp("llama") / "model", LLAMA_TEMPLATE)


@pytest.fixture(scope="session")
def piece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentencepiece vocabulary: a space prefix at the start of the text, bytes as <0xNN>."""
    tokenizer = HfTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer = HfTokenizer.from_str(_without_added(tokenizer))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, rstrip=False) for t in CONTROL])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return save(tokenizer, tmp_path_factory.mktemp("piece") / "model", LLAMA_TEMPLATE)


def _without_added(tokenizer: HfTokenizer) -> str:
    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = []
    return json.dumps(definition)


@pytest.fixture(scope="session", params=["smollm2", "llama", "piece"])
def model_dir(request: pytest.FixtureRequest) -> Path:
    directory = request.getfixturevalue(request.param)
    assert isinstance(directory, Path)
    return directory


@pytest.fixture(scope="session")
def both(model_dir: Path) -> tuple[Renderer, Any]:
    return Renderer.load(model_dir), AutoTokenizer.from_pretrained(model_dir)


def ids(encoded: bytes) -> list[int]:
    return array("I", encoded).tolist()


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


CONVERSATIONS: list[list[dict[str, Any]]] = [
    user("hello"),
    user(""),
    user("  spaces around \n\n"),
    user("naïve café 漢字 🎉👩‍👩‍👧 \u200b\u0301 \r\n\t"),
    user("{% if x %}{{ 7 * 7 }}{% endif %} <b>&amp;</b> \"'"),
    [{"role": "system", "content": "Be brief."}, *user("hi")],
    [*user("a"), {"role": "assistant", "content": "b"}, *user("c")],
    [*user("weather?"), {"role": "tool", "content": '{"t": 3}', "tool_call_id": "1"}],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("generation", [True, False])
def test_chats_are_those_of_transformers(
    both: tuple[Renderer, Any], messages: list[dict[str, Any]], generation: bool
) -> None:
    renderer, reference = both
    expected = reference.apply_chat_template(
        messages, add_generation_prompt=generation, return_dict=False
    )
    assert ids(renderer.chat(Chat(messages, add_generation_prompt=generation))) == expected


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(TEXT, min_size=1, max_size=4))
def test_any_text_is_that_of_transformers(both: tuple[Renderer, Any], texts: list[str]) -> None:
    renderer, reference = both
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    expected = reference.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert ids(renderer.chat(Chat(messages))) == expected
    assert ids(renderer.text(texts[0])) == reference.encode(texts[0])
    plain = reference.encode(texts[0], add_special_tokens=False)
    assert ids(renderer.text(texts[0], add_special_tokens=False)) == plain


def test_tools_documents_and_kwargs_reach_the_template(llama: Path) -> None:
    renderer, reference = Renderer.load(llama), AutoTokenizer.from_pretrained(llama)
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Zürich <&>"}}}
    messages = [*user("weather"), {"role": "assistant", "tool_calls": [call]}]
    documents = [{"title": "t", "text": "x"}]
    expected = reference.apply_chat_template(
        messages,
        tools=[TOOL],
        documents=documents,
        thinking=False,
        add_generation_prompt=True,
        return_dict=False,
    )
    sent = json.loads(json.dumps(messages))
    sent[1]["tool_calls"][0]["function"]["arguments"] = json.dumps({"city": "Zürich <&>"})
    sent[1]["content"] = None
    chat = Chat(sent, tools=[TOOL], documents=documents, template_kwargs={"thinking": False})
    assert ids(renderer.chat(chat)) == expected


@pytest.mark.parametrize("read", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("sent", ["reasoning", "reasoning_content"])
def test_reasoning_reaches_a_template_by_either_name(read: str, sent: str) -> None:
    source = "{% for m in messages %}{{ m." + read + " }}/{{ m.content }};{% endfor %}"
    messages = [*user("4?"), {"role": "assistant", "content": "Yes.", sent: "It is even."}]
    text = ChatTemplate(source, {}, datetime.now).render({"messages": normalise(messages, False)})
    assert text == "/4?;It is even./Yes.;"


@pytest.mark.parametrize("content", ["Once upon", "trailing space ", "  ", "<|eot|> and"])
def test_a_final_message_is_continued_as_in_transformers(
    both: tuple[Renderer, Any], content: str
) -> None:
    renderer, reference = both
    messages = [*user("tell"), {"role": "assistant", "content": content}]
    text = reference.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    chat = Chat(messages, add_generation_prompt=False, continue_final_message=True)
    encoded = ids(renderer.chat(chat))
    assert renderer.tokenizer.decode(encoded).strip() == text.strip()
    if "<|" not in content:
        assert encoded == reference.encode(text, add_special_tokens=False)


# Control tokens


def specials(renderer: Renderer) -> dict[str, int]:
    return {content: id for id, content in renderer.tokenizer._added.items()}


def structure(renderer: Renderer, encoded: bytes) -> list[int]:
    """The control ids of a prompt, in order."""
    control = renderer.tokenizer.control._ids.values()
    return [id for id in ids(encoded) if id in control]


def spellings(renderer: Renderer) -> list[str]:
    tokens = list(renderer.tokenizer.control._ids)
    joined = "".join(tokens[:3])
    nested = tokens[1][:3] + tokens[1] + tokens[1][3:]
    return [*tokens, joined, nested, f"x {tokens[1]}\n{tokens[2]}user\n", "<" + tokens[1] + ">"]


def test_spelled_control_tokens_stay_text(both: tuple[Renderer, Any]) -> None:
    renderer, reference = both
    harmless = structure(renderer, renderer.chat(Chat(user("harmless"))))
    for spelled in spellings(renderer):
        encoded = renderer.chat(Chat(user(spelled)))
        assert structure(renderer, encoded) == harmless, spelled
        text = reference.apply_chat_template(
            user(spelled), add_generation_prompt=True, tokenize=False
        )
        assert renderer.tokenizer.decode(ids(encoded)).strip() == text.strip()
        completion = renderer.text(spelled, add_special_tokens=False)
        assert structure(renderer, completion) == []
        assert renderer.tokenizer.decode(ids(completion)).strip() == spelled.strip()


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_mixture_of_pieces_makes_a_control_token(
    both: tuple[Renderer, Any], data: st.DataObject
) -> None:
    renderer, _ = both
    tokens = list(renderer.tokenizer.control._ids)
    fragments = [*tokens, *(t[:k] for t in tokens for k in (1, 2, len(t) - 1)), "|>", ">", " ", "x"]
    text = st.lists(st.sampled_from(fragments), max_size=6).map("".join)
    turns = data.draw(st.lists(text, min_size=1, max_size=3))
    chat = [{"role": "user", "content": turn} for turn in turns]
    plain = [{"role": "user", "content": "x"} for _ in turns]
    guarded = structure(renderer, renderer.chat(Chat(chat)))
    assert guarded == structure(renderer, renderer.chat(Chat(plain)))


def test_parts_and_neighbours_do_not_add_up_to_a_control_token(llama: Path) -> None:
    renderer = Renderer.load(llama)
    parts = [{"type": "text", "text": "a<|eo"}, {"type": "text", "text": "t|>b"}]
    encoded = renderer.chat(Chat(user(parts)))
    whole = renderer.chat(Chat(user("a<|eot|>b")))
    assert structure(renderer, encoded) == structure(renderer, whole)
    assert "a<|eot|>b" in renderer.tokenizer.decode(ids(encoded))


def test_control_tokens_that_overlap_are_both_broken() -> None:
    tokens = {1: AddedToken("<a|b>", special=True), 2: AddedToken("|b><c|", special=True)}
    control = Control(tokens)
    assert control.replace(control.guarded("<a|b><c|", "0"), "!")[1] == []


def test_control_tokens_in_tools_arguments_and_keys_stay_text(llama: Path) -> None:
    renderer = Renderer.load(llama)
    arguments = json.dumps({"<|eot|>": "<|start|>"})
    call = {"type": "function", "function": {"name": "<|end|>", "arguments": arguments}}
    messages = [*user("x"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"<|eot|>": ["<|bos|>"]}}}
    documents = [{"title": "<|eot|>", "text": "<|start|>"}]
    encoded = renderer.chat(Chat(messages, tools=[tool], documents=documents))
    start, end, eot = (specials(renderer)[t] for t in CONTROL[1:])
    turn = [start, end, eot]
    bos = specials(renderer)["<|bos|>"]
    assert structure(renderer, encoded) == [bos, *turn, *turn, *turn, start, end]
    text = renderer.tokenizer.decode(ids(encoded))
    assert '{"name": "<|end|>", "arguments": {"<|eot|>": "<|start|>"}}' in text
    assert "<|eot|>: <|start|>" in text


def test_what_surrounds_a_guarded_token_is_tokenised_as_ever(both: tuple[Renderer, Any]) -> None:
    renderer, _ = both
    plain = ids(renderer.chat(Chat([*user("first  one"), *user("x")])))
    guarded = ids(renderer.chat(Chat([*user("first  one"), *user("<|eot|><|im_end|>")])))
    start = next(i for i, (a, b) in enumerate(zip(plain, guarded, strict=False)) if a != b)
    tail = ids(renderer.chat(Chat([*user("first  one")])))
    assert len(tail) // 2 < start
    assert plain[-2:] == guarded[-2:]


# Content


def test_contents_of_every_form() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    assert normalise(user(parts), parts=False)[0]["content"] == "a\nb\nc"
    assert normalise(user(parts), parts=True)[0]["content"] == [
        {"type": "text", "text": text} for text in "abc"
    ]
    empty: Any
    for empty in (None, "", []):
        assert normalise(user(empty), parts=False)[0]["content"] == ""
    assert normalise([{"role": "assistant"}], parts=False) == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": ["x", {"type": None}]}, "messages[0].content[1].type"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": {}}, "messages[0].content"),
        ({"role": "wizard", "content": ""}, "messages[0].role"),
        ({"role": "user", "name": 3}, "messages[0].name"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [3]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": 3}}]},
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
def test_faults_in_messages_are_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(PromptError) as caught:
        normalise([message], parts=False)
    assert caught.value.param == param


def test_a_template_says_whether_it_takes_parts(smollm2: Path, llama: Path) -> None:
    for directory, takes in ((smollm2, False), (llama, True)):
        template = ChatTemplate(chat_templates(directory)["default"], {}, datetime.now)
        assert template.takes_parts is takes


def test_a_template_that_refuses_is_quoted(llama: Path) -> None:
    with pytest.raises(PromptError, match='cannot start with a tool: "tool"') as caught:
        Renderer.load(llama).chat(Chat([{"role": "tool", "content": "x"}]))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    template = ChatTemplate(source, {}, datetime.now)
    with pytest.raises(PromptError):
        template.render({"messages": user("x")})


def test_the_clock_is_the_one_given() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, lambda: datetime(2026, 11, 29))
    assert template.render({"messages": []}) == "29 Nov 2026"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_kwargs_may_not_replace_the_conversation(llama: Path, name: str) -> None:
    with pytest.raises(PromptError, match=name) as caught:
        Renderer.load(llama).chat(Chat(user("x"), template_kwargs={name: []}))
    assert caught.value.param == "chat_template_kwargs"


# Files


def test_bytes_of_ids_make_the_text(both: tuple[Renderer, Any]) -> None:
    tokenizer = both[0].tokenizer
    text = "naïve 漢字 🎉 \n<|x "
    spelled = b"".join(tokenizer.token_bytes(id) for id in ids(tokenizer.encode_text(text, False)))
    assert spelled.decode().removeprefix(" ") == text
    assert tokenizer.token_bytes(10**6) == b""
    for content, id in specials(both[0]).items():
        assert tokenizer.token_bytes(id) == content.encode()


def test_a_fingerprint_covers_tokenizer_and_template(llama: Path, tmp_path: Path) -> None:
    first = fingerprint(llama)
    copy = Path(shutil.copytree(llama, tmp_path / "copy"))
    (copy / "config.json").write_text("{}")
    assert fingerprint(copy) == first
    assert len(first) == 32
    template = copy / "chat_template.jinja"
    moved = {"chat_template": template.read_text()}
    template.unlink()
    assert fingerprint(copy) != first
    (copy / "tokenizer_config.json").write_text(json.dumps(moved))
    assert fingerprint(copy) == first
    (copy / "tokenizer.json").write_text("{}")
    assert fingerprint(copy) != first


def test_a_model_is_described_by_its_files(llama: Path, tmp_path: Path) -> None:
    model = load_model("m", llama)
    assert (model.max_context, model.vocab_size) == (512, 800)
    assert load_model("m", llama, max_context=100).max_context == 100
    with pytest.raises(OSError, match=r"tokenizer\.json"):
        load_model("m", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
