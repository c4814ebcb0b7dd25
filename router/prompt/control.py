"""Control tokens, and how to keep text that spells one from becoming one.

A control token is an added token that the tokenizer marks as special. Added tokens without the mark
(`<think>`, `<tool_call>`) are ordinary vocabulary, which clients send back in assistant turns, and
are read as the model was trained to.

The text of a control token inside a user's string is broken by a guard, a random string that no
user can know, before the template sees it. What still spells a control token after rendering was
written by the template.
"""

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken

from router.prompt.errors import PromptError

MAX_DEPTH = 64  # of JSON values that reach the template


class Control:
    """The control tokens of one tokenizer, from its added tokens by id."""

    def __init__(self, added: Mapping[int, AddedToken]) -> None:
        # One character cannot be broken in two; no published tokenizer has such a control token.
        tokens = {t.content: (i, t) for i, t in added.items() if t.special and len(t.content) > 1}
        longest_first = sorted(tokens, key=len, reverse=True)
        self._ids = {content: id for content, (id, _) in tokens.items()}
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._genuine = re.compile(
            "|".join(_with_spaces(tokens[content][1]) for content in longest_first) or r"(?!)"
        )
        self._first = {content[0] for content in tokens}
        self._starts = {content[:end] for content in tokens for end in range(1, len(content))}
        self._longest = max(map(len, self._starts), default=0)

    def threatens(self, value: Any, depth: int = 0) -> bool:
        """Whether a string inside a JSON value spells a control token, or ends in the start of one.

        Raises PromptError where the value is nested too deeply to be walked.
        """
        _check_depth(depth)
        if isinstance(value, str):
            return any(first in value for first in self._first) and (
                self._spelled.search(value) is not None or self._open_end(value) is not None
            )
        if isinstance(value, dict):
            return any(
                self.threatens(k, depth + 1) or self.threatens(v, depth + 1)
                for k, v in value.items()
            )
        return isinstance(value, list) and any(self.threatens(item, depth + 1) for item in value)

    def guarded(self, value: Any, guard: str, depth: int = 0) -> Any:
        """A copy of a JSON value whose strings, keys too, have every control token broken."""
        _check_depth(depth)
        if isinstance(value, str):
            return self._guarded_text(value, guard)
        if isinstance(value, dict):
            return {
                self._guarded_text(key, guard): self.guarded(item, guard, depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.guarded(item, guard, depth + 1) for item in value]
        return value

    def replace(self, text: str, alias: str) -> tuple[str, list[int]]:
        """Text with `alias` for each control token, and the ids of these, in order."""
        ids: list[int] = []

        def note(match: re.Match[str]) -> str:
            token = self._spelled.search(match[0])
            assert token is not None
            ids.append(self._ids[token[0]])
            return alias

        return self._genuine.sub(note, text), ids

    def _guarded_text(self, text: str, guard: str) -> str:
        while self._spelled.search(text):  # breaking one may leave another that overlapped it
            text = self._spelled.sub(lambda match: match[0][0] + guard + match[0][1:], text)
        end = self._open_end(text)
        return text if end is None else text[:end] + guard + text[end:]

    def _open_end(self, text: str) -> int | None:
        """Where a string's last word ends, if the next string could complete a control token."""
        end = len(text.rstrip())
        tail = text[max(0, end - self._longest) : end]
        return end if any(tail[i:] in self._starts for i in range(len(tail))) else None


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise PromptError(f"nested more than {MAX_DEPTH} levels deep", "messages")


def _with_spaces(token: AddedToken) -> str:
    """A pattern of the token and the white space that it takes with it."""
    before = r"\s*" if token.lstrip else ""
    after = r"\s*" if token.rstrip else ""
    return before + re.escape(token.content) + after
