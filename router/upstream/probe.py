"""What a server says it is, and whether its token ids are ours."""

from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from router.prompt.models import Model
from router.prompt.render import Chat

TEXT = "  The river Ångerman, 460 km: it's wide.\n\n\tx = [1234567, 'ß']; 日本 🙂"
MESSAGES = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": TEXT},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "depth",
            "description": "How deep a river is.",
            "parameters": {
                "type": "object",
                "properties": {"river": {"type": "string"}, "at_km": {"type": "number"}},
                "required": ["river"],
            },
        },
    }
]

Post = Callable[[str, dict[str, Any]], Awaitable[tuple[int, bytes]]]
"""POST of a JSON body to a path; the status and the body of the answer."""


@dataclass(frozen=True, slots=True)
class Card:
    """An entry of /v1/models. `parent` is set for an adapter; `context` is 0 where it is not said,
    as `root` and `owner` are empty."""

    id: str
    root: str
    parent: str
    owner: str
    context: int


def cards(body: bytes) -> list[Card]:
    """Those of the answer to GET /v1/models that can be read; none of what is no such answer."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return []
    data = answer.get("data") if isinstance(answer, dict) else None
    entries = [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
    found = []
    for entry in entries:
        root, parent, owner = (_text(entry.get(name)) for name in ("root", "parent", "owned_by"))
        context = entry.get("max_model_len")
        if name := _text(entry.get("id")):
            room = context if isinstance(context, int) and context > 0 else 0
            found.append(Card(name, root, parent, owner, room))
    return found


def main_card(found: Sequence[Card], known: Mapping[str, Model]) -> Card | None:
    """The base model that we know, else the first one."""
    bases = [card for card in found if not card.parent] or list(found)
    return next((card for card in bases if card.id in known), bases[0] if bases else None)


def names(found: Sequence[Card], main: Card) -> dict[str, tuple[str, str]]:
    """By each name that is listed: our name of the base model, and the adapter upon it."""
    same = {card.id for card in found if not card.parent and card.root == main.root and main.root}
    same.add(main.id)
    named = {}
    for card in found:
        if card.id in same:
            named[card.id] = main.id, ""
        elif card.parent in same or (card.parent and card.parent == main.root):
            named[card.id] = main.id, card.id
        else:
            named[card.id] = card.id, ""
    return named


async def differing(post: Post, name: str, model: Model) -> list[str] | None:
    """Which kinds of prompts the server's /tokenize makes other ids of than we do; None where it
    has no such endpoint. What it refuses to tokenise is not compared."""
    renderer = model.renderer
    chat = {"messages": MESSAGES}
    probes: list[tuple[str, dict[str, Any], Callable[[], bytes]]] = [
        ("texts", {"prompt": TEXT}, lambda: renderer.text(TEXT)),
        ("chats", chat, lambda: renderer.chat(Chat(MESSAGES))),
        ("tools", {**chat, "tools": TOOLS}, lambda: renderer.chat(Chat(MESSAGES, TOOLS))),
    ]
    compared, differ = False, []
    for kind, body, ours in probes:
        status, answer = await post("/tokenize", {"model": name, **body})
        ids = _ids(answer) if status == 200 else None
        if ids is None:
            continue
        compared = True
        if ids != array("I", ours()).tolist():
            differ.append(kind)
    return differ if compared else None


def _ids(answer: bytes) -> list[int] | None:
    try:
        ids = orjson.loads(answer).get("tokens")
    except (orjson.JSONDecodeError, AttributeError):
        return None
    return ids if isinstance(ids, list) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
