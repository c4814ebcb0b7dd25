"""Structured output: every way to ask for it, as it reaches a replica."""

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio
from api_site import BODY, HELLO, Site, running
from hypothesis import given
from hypothesis import strategies as st

from hotbranch.v1.serve_pb2 import Structure
from router.api.errors import ApiError
from router.api.fields import Fields
from router.api.structure import read_structure
from router.generation import Ability

SCHEMA = {"type": "object", "properties": {"lock": {"type": "integer"}}}
SCHEMA_TEXT = orjson.dumps(SCHEMA).decode()
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "lock"}}
TAG_TEXT = orjson.dumps(TAG).decode()
OLD_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}
LOCKS = ["upper", "lower"]
CHOICES = Structure(choices=Structure.Choices(texts=LOCKS))
GRAMMAR = 'root ::= "lock"'

ASKED: list[tuple[dict[str, Any], Structure, str]] = [
    ({"response_format": {"type": "json_object"}}, Structure(json_object=True), "response_format"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "lock", "schema": SCHEMA, "strict": True},
            }
        },
        Structure(json_schema=SCHEMA_TEXT),
        "response_format",
    ),
    ({"response_format": TAG}, Structure(structural_tag=TAG_TEXT), "response_format"),
    (
        {"response_format": OLD_TAG},
        Structure(structural_tag=orjson.dumps(OLD_TAG).decode()),
        "response_format",
    ),
    (
        {"structured_outputs": {"json": SCHEMA}},
        Structure(json_schema=SCHEMA_TEXT),
        "structured_outputs.json",
    ),
    (
        {"structured_outputs": {"json_object": True, "regex": None}},
        Structure(json_object=True),
        "structured_outputs.json_object",
    ),
    (
        {"structured_outputs": {"regex": "[ab]+"}},
        Structure(regex="[ab]+"),
        "structured_outputs.regex",
    ),
    ({"structured_outputs": {"choice": LOCKS}}, CHOICES, "structured_outputs.choice"),
    (
        {"structured_outputs": {"grammar": GRAMMAR}},
        Structure(grammar=GRAMMAR),
        "structured_outputs.grammar",
    ),
    (
        {"structured_outputs": {"structural_tag": TAG_TEXT}},
        Structure(structural_tag=TAG_TEXT),
        "structured_outputs.structural_tag",
    ),
    ({"guided_json": SCHEMA_TEXT}, Structure(json_schema=SCHEMA_TEXT), "guided_json"),
    ({"guided_regex": "a?"}, Structure(regex="a?"), "guided_regex"),
    ({"guided_choice": LOCKS}, CHOICES, "guided_choice"),
    ({"guided_grammar": GRAMMAR}, Structure(grammar=GRAMMAR), "guided_grammar"),
]

FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": 3}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": {}}}, "structured_outputs.regex"),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"guided_json": 3}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", 3]}, "guided_choice"),
    ({"guided_grammar": " "}, "guided_grammar"),
]


@pytest_asyncio.fixture
async def site(smollm2: Path) -> AsyncIterator[Site]:
    async with running(smollm2) as site:
        yield site


@pytest.mark.parametrize(("fields", "structure", "field"), ASKED)
async def test_each_way_to_ask_reaches_the_engine(
    site: Site, fields: dict[str, Any], structure: Structure, field: str
) -> None:
    client = site.openai()
    await client.chat.completions.create(
        model="smol", messages=HELLO, max_tokens=1, n=2, extra_body=fields
    )
    await client.completions.create(model="smol", prompt="hi", max_tokens=1, extra_body=fields)
    for prompt, samplings in site.fleet.opened:
        assert prompt.needs == {Ability.STRUCTURES: field}
        assert all(sampling.structure == structure for sampling in samplings)
    assert [len(samplings) for _, samplings in site.fleet.opened] == [2, 1]


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}])
async def test_without_a_structure_any_replica_will_do(site: Site, fields: dict[str, Any]) -> None:
    await site.openai().chat.completions.create(
        model="smol", messages=HELLO, max_tokens=1, extra_body=fields
    )
    prompt, (sampling,) = site.fleet.opened[0]
    assert not prompt.needs
    assert not sampling.HasField("structure")


async def test_a_wrong_structure_names_its_field(site: Site) -> None:
    async with site.http() as http:
        for path in ("/v1/chat/completions", "/v1/completions"):
            for change, param in FAULTS:
                answer = await http.post(path, json={**BODY, "prompt": "hi", **change})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not site.fleet.opened


async def test_a_schema_that_is_nested_too_deeply_is_a_400(site: Site) -> None:
    deep: Any = {}
    for _ in range(400):
        deep = {"not": deep}
    async with site.http() as http:
        answer = await http.post("/v1/chat/completions", json={**BODY, "guided_json": deep})
    assert answer.json()["error"]["message"] == "guided_json: is nested too deeply"


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """The constraint in structured_outputs."""
    return {name: value for name, value in fields["structured_outputs"].items() if value}


def test_one_structure_is_enough() -> None:
    for (one, _, first), (other, _, second) in itertools.permutations(ASKED, 2):
        if one.keys() == other.keys() == {"structured_outputs"}:
            both = {"structured_outputs": {**other["structured_outputs"], **_given(one)}}
        elif one.keys() == other.keys():
            continue
        else:
            both = {**one, **other}
        with pytest.raises(ApiError) as refused:
            read_structure(Fields(orjson.dumps(both)))
        assert {refused.value.param, refused.value.message.rpartition(" ")[2]} == {first, second}


JSON = st.recursive(
    st.none() | st.booleans() | st.text(max_size=5) | st.integers(-9, 9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_any_schema_arrives_as_it_was_sent(schema: dict[str, Any]) -> None:
    for given_as in (schema, orjson.dumps(schema).decode()):
        structure, _ = read_structure(Fields(orjson.dumps({"guided_json": given_as})))
        assert structure is not None
        assert orjson.loads(structure.json_schema) == schema
