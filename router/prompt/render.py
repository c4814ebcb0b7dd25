"""Messages, or plain text, to the token ids a model would have been given by its own tokenizer."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from hotbranch.fingerprint import chat_templates, read_json
from router.prompt.errors import PromptError
from router.prompt.messages import normalise
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer

RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
    }
)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as the client sent it: JSON values, messages and tools not yet checked."""

    messages: list[Any]
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False


class Renderer:
    """The tokenizer and the chat templates of one model. Pure after `load`, safe in threads.

    With `guards` a control token in what a client sends is text. Other servers obey it; without,
    ids are as theirs.
    """

    def __init__(
        self, tokenizer: Tokenizer, templates: Mapping[str, ChatTemplate], guards: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        self._templates = templates
        self._guards = guards

    @classmethod
    def load(
        cls,
        model_dir: Path,
        now: Callable[[], datetime] = datetime.now,
        guards: bool = True,
    ) -> "Renderer":
        """Raises OSError without a tokenizer.json, ValueError on files that cannot be read."""
        names = _special_tokens(model_dir)
        templates = {
            name: ChatTemplate(source, names, now)
            for name, source in chat_templates(model_dir).items()
        }
        return cls(Tokenizer.load(model_dir), templates, guards)

    def text(self, text: str, add_special_tokens: bool = True) -> bytes:
        """Ids of a completion prompt, all of it text: a control token in it is spelled, not obeyed
        (unless nothing `guards`).

        Who wants control tokens in a completion sends token ids. The begin-of-sequence token is
        added where the model's tokenizer adds it.
        """
        if not self._guards:
            return self.tokenizer.encode_trusted(text, add_special_tokens)
        return self.tokenizer.encode_text(text, add_special_tokens)

    def chat(self, chat: Chat) -> bytes:
        """Ids of a conversation. Raises PromptError naming the field."""
        template = self._template(chat)
        messages = normalise(chat.messages, template.takes_parts)
        values = {**chat.template_kwargs, "messages": messages}
        values |= {"tools": chat.tools, "documents": chat.documents}
        guard = ""
        if self._guards and self.tokenizer.control.threatens(values):
            guard = secrets.token_hex(8)
            values = {
                name: self.tokenizer.control.guarded(value, guard) for name, value in values.items()
            }
        values["add_generation_prompt"] = chat.add_generation_prompt
        text = (
            _continued(template, values) if chat.continue_final_message else template.render(values)
        )
        if guard:
            return self.tokenizer.encode_guarded(text, guard, chat.add_special_tokens)
        return self.tokenizer.encode_trusted(text, chat.add_special_tokens)

    def _template(self, chat: Chat) -> ChatTemplate:
        if reserved := RESERVED & chat.template_kwargs.keys():
            raise PromptError(f"may not set {min(reserved)}", "chat_template_kwargs")
        template = self._templates.get("tool_use") if chat.tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise PromptError("this model has no chat template; use /v1/completions", "messages")
        if chat.continue_final_message and chat.add_generation_prompt:
            raise PromptError("cannot go with add_generation_prompt", "continue_final_message")
        return template


def _continued(template: ChatTemplate, values: dict[str, Any]) -> str:
    """The prompt up to the end of the final message's text, so that the model goes on writing it.

    A mark is put behind that text, and the prompt is cut at the mark. The mark ends in a space:
    where the template trimmed it, it would have trimmed the text's own white space as well.
    """
    mark = secrets.token_hex(8)
    final = dict(values["messages"][-1])
    content = final["content"]
    if isinstance(content, str):
        final["content"] = content + mark + " "
    elif content:
        last = {**content[-1], "text": content[-1]["text"] + mark + " "}
        final["content"] = [*content[:-1], last]
    text = template.render({**values, "messages": [*values["messages"][:-1], final]})
    end = text.rfind(mark)
    if end < 0:
        raise PromptError("the final message has no text to continue", "continue_final_message")
    return text[:end] if text.startswith(mark + " ", end) else text[:end].rstrip()


def _special_tokens(model_dir: Path) -> dict[str, str]:
    """`bos_token`, `eos_token` and their like, from the tokenizer's configuration."""
    config = read_json(model_dir / "special_tokens_map.json")
    config |= read_json(model_dir / "tokenizer_config.json")
    names = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            names[name] = content
    return names
