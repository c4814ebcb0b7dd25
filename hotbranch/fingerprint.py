"""What identifies a model's way from messages to token ids: its tokenizer and its chat template.

Router and replica compute the fingerprint each from its own copy of the model. Equal fingerprints
mean that the ids the router sends are the ids the replica's weights were trained on.
"""

import json
from pathlib import Path
from typing import Any

from xxhash import xxh3_128


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty when there is no file. Raises ValueError on others."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name}: expected a JSON object")
    return content


def chat_templates(model_dir: Path) -> dict[str, str]:
    """Named chat templates, the usual one as `default`; empty for a model without.

    In the order transformers looks: chat_template.jinja, chat_template.json, tokenizer_config.json.
    """
    plain = model_dir / "chat_template.jinja"
    if plain.is_file():
        return {"default": plain.read_text(encoding="utf-8")}
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(model_dir / name).get("chat_template")
        if isinstance(template, str):
            return {"default": template}
        if isinstance(template, list):
            return {entry["name"]: entry["template"] for entry in template}
    return {}


def fingerprint(model_dir: Path) -> str:
    """32 hex digits over tokenizer.json and the chat templates. Raises OSError without it."""
    digest = xxh3_128((model_dir / "tokenizer.json").read_bytes())
    for name, template in sorted(chat_templates(model_dir).items()):
        digest.update(f"\0{name}\0{template}".encode())
    return digest.hexdigest()
