"""Reading a JSON object field by field; every error names its field, as OpenAI's `param` does."""

import math
from collections.abc import Collection
from typing import Any

import orjson

from router.api.errors import ApiError, invalid


class Fields:
    """The fields of a request body. A field that is absent and one that is null are the same."""

    def __init__(self, body: bytes) -> None:
        try:
            values = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise ApiError(
                400, f"the body is not valid JSON: {error}", code="invalid_json"
            ) from None
        if not isinstance(values, dict):
            raise ApiError(400, "the body must be a JSON object", code="invalid_json")
        self._values: dict[str, Any] = values

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def string(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is None or isinstance(value, str):
            return value
        raise invalid("must be a string", name)

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise invalid("must be true or false", name)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self._values.get(name)
        return None if value is None else integer(value, name, low, high)

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """A number from low to high, both included."""
        value = self._values.get(name)
        return default if value is None else number(value, name, low, high)

    def objects(self, name: str) -> list[dict[str, Any]] | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise invalid("must be a list", name)
        for i, item in enumerate(value):
            if not isinstance(item, dict):
                raise invalid("must be an object", f"{name}[{i}]")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._values.get(name)
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        raise invalid("must be an object", name)

    def refuse(self, names: Collection[str], why: str) -> None:
        """400 on the first of these fields that asks for anything; 0 does."""
        for name in names:
            value = self._values.get(name)
            if value is not None and value is not False and value not in ("", [], {}):
                raise invalid(why, name)


def integer(value: Any, name: str, low: int, high: int) -> int:
    """A whole number; 3.0 is one, true is not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid("must be a whole number", name)
    if not low <= value <= high:
        raise invalid(f"must be from {low} to {high}", name)
    return value


def number(value: Any, name: str, low: float, high: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise invalid("must be a number", name)
    if not low <= value <= high:
        raise invalid(f"must be from {low:g} to {high:g}", name)
    return float(value)


def token_ids(value: Any, name: str, vocab_size: int) -> list[int]:
    """A list of ids within the vocabulary."""
    if not isinstance(value, list):
        raise invalid("must be a list of token ids", name)
    for i, id in enumerate(value):
        if type(id) is not int:
            raise invalid("must be a token id", f"{name}[{i}]")
        if not 0 <= id < vocab_size:
            raise invalid(f"is outside the vocabulary of {vocab_size} ids", f"{name}[{i}]")
    return value
