"""A model's chat template, in the sandbox and with the helpers that transformers gives it.

The environment is the one of transformers' `utils/chat_template_utils.py`: an immutable sandbox,
blocks trimmed, `break` and `continue`, `raise_exception`, `strftime_now`, JSON without HTML
escapes, and a `generation` block that renders its body.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.prompt.errors import PromptError

_PROBE = "probe text"


class ChatTemplate:
    """One compiled template. Raises ValueError when it is not a template.

    `special_tokens` are the variables bos_token, eos_token and their like. `takes_parts` says
    whether the template reads content as a list of parts; otherwise content has to be a string.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime],
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"chat template: {error}") from error
        self._special_tokens = special_tokens
        self.takes_parts = self._takes_parts()

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt's text. Raises PromptError on `messages` with the template's own message."""
        try:
            return self._template.render({**self._special_tokens, **variables})
        except Exception as error:  # a template is a program: it fails in any way a program can
            raise PromptError(
                f"the model's chat template refuses this conversation: {error}",
                "messages",
            ) from error

    def _takes_parts(self) -> bool:
        """A template that expects a string fails on a list, or prints it."""
        content = [{"type": "text", "text": _PROBE}]
        try:
            text = self.render({"messages": [{"role": "user", "content": content}]})
        except PromptError:
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote; a prompt only needs its text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
