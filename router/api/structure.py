"""Structured output: what a reply has to look like, by any of the fields that clients know for it.

`response_format` is OpenAI's, `structured_outputs` is vLLM's, the `guided_` fields are what vLLM
had before. Whether a schema, an expression or a grammar is a good one, the engine says.
"""

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from hotbranch.v1.serve_pb2 import Structure
from router.api.errors import invalid
from router.api.fields import Fields

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
GUIDED = ("json", "regex", "choice", "grammar")
UNSUPPORTED = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


def read_structure(fields: Fields) -> tuple[Structure | None, str]:
    """The structure, and the field that asks for it; None where none does."""
    asked = {
        **_response_format(fields),
        **_structured_outputs(fields),
        **_constraints({kind: fields.raw(f"guided_{kind}") for kind in GUIDED}, "guided_"),
    }
    if not asked:
        return None, ""
    first, *others = asked
    if others:
        raise invalid(f"cannot go with {first}", others[0])
    return asked[first], first


def _response_format(fields: Fields) -> dict[str, Structure]:
    name = "response_format"
    if fields.raw(name) is None:
        return {}
    given = fields.mapping(name)
    kind = given.get("type")
    if kind not in FORMATS:
        raise invalid(f"must be one of {', '.join(FORMATS)}", f"{name}.type")
    if kind == "json_object":
        return {name: Structure(json_object=True)}
    if kind == "json_schema":
        schema = given.get("json_schema")
        if not isinstance(schema, dict):
            raise invalid("must be an object", f"{name}.json_schema")
        return {name: _schema(schema.get("schema"), f"{name}.json_schema.schema")}
    if kind == "structural_tag":
        return {name: _tag(given, name)}
    return {}


def _structured_outputs(fields: Fields) -> dict[str, Structure]:
    name = "structured_outputs"
    if fields.raw(name) is None:
        return {}
    given = fields.mapping(name)
    for option in UNSUPPORTED:
        if given.get(option):
            raise invalid("is not supported", f"{name}.{option}")
    asked = _constraints(given, f"{name}.")
    if not asked:
        raise invalid(f"must have one of {', '.join(_READERS)}", name)
    return asked


def _constraints(given: Mapping[str, Any], prefix: str) -> dict[str, Structure]:
    """Those of vLLM's constraints that are given."""
    return {
        prefix + kind: read(given[kind], prefix + kind)
        for kind, read in _READERS.items()
        if given.get(kind) is not None
    }


def _schema(value: Any, name: str) -> Structure:
    return Structure(json_schema=_json_object(value, name))


def _object(value: Any, name: str) -> Structure:
    if value is not True:
        raise invalid("must be true, or left out", name)
    return Structure(json_object=True)


def _regex(value: Any, name: str) -> Structure:
    if not isinstance(value, str):
        raise invalid("must be a string", name)
    return Structure(regex=value)


def _choice(value: Any, name: str) -> Structure:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise invalid("must be a list of at least one string", name)
    return Structure(choices=Structure.Choices(texts=value))


def _grammar(value: Any, name: str) -> Structure:
    if not isinstance(value, str) or not value.strip():
        raise invalid("must be a grammar", name)
    return Structure(grammar=value)


def _tag(value: Any, name: str) -> Structure:
    text = _json_object(value, name)
    tag = orjson.loads(text)
    if "format" not in tag and not ("structures" in tag and "triggers" in tag):
        raise invalid("must have a format, or structures and triggers", name)
    return Structure(structural_tag=text)


def _json_object(value: Any, name: str) -> str:
    """A JSON object, or the text of one, as text."""
    try:
        if isinstance(value, dict):
            return orjson.dumps(value).decode()
        if isinstance(value, str) and isinstance(orjson.loads(value), dict):
            return value
    except orjson.JSONEncodeError:
        raise invalid("is nested too deeply", name) from None
    except orjson.JSONDecodeError as error:
        raise invalid(f"is not valid JSON: {error}", name) from None
    raise invalid("must be an object, or the JSON text of one", name)


_READERS: Mapping[str, Callable[[Any, str], Structure]] = {
    "json": _schema,
    "json_object": _object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _tag,
}
