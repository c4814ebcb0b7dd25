"""Text out of tokens as they come: whole characters only, and never past a stop string."""

from collections.abc import Sequence

from tokenizers import Tokenizer

INCOMPLETE = "\ufffd"  # what a decoder puts in place of bytes that are no character yet
UNFINISHED = 3  # of them stand for one unfinished character, at most
CONTEXT = 6  # tokens of the prompt, enough for the start of a character
PENDING = 16  # tokens decoded beyond the context, at most; far more than a character has


class TextStream:
    """The text of one sequence. Pushed and flushed text, joined, is what decoding all ids gives,
    up to an incomplete last character and, after a match, up to the stop string; behind a `prompt`,
    what it adds to the prompt's text. `include_stop`: up to the end of the stop string. No stop
    string begins in the first `min_tokens`. `special_tokens` have a text, too.

    A token is decoded together with the few before it, because a decoder may treat the first token
    of a text differently, and one character may span several tokens. `tokenizers`' own DecodeStream
    does the same but holds a token's whole text back while its last character is incomplete, and
    cannot give it out at the end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        prompt: Sequence[int] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        special_tokens: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = StopScan(stop, include_stop)
        self._unscanned = min_tokens
        self._skips = not special_tokens
        self._ids: list[int] = []  # the window: context, then the tokens since
        self._text = ""  # the window's text
        for count in range(min(CONTEXT, len(prompt)), 0, -1):
            self._ids = list(prompt[-count:])
            self._text = self._decode()
            if INCOMPLETE not in self._text:  # begins and ends between characters
                break
        else:
            self._ids, self._text = [], ""
        self._context = len(self._ids)  # tokens of context
        self._sent = len(self._text)  # characters of the window's text that are out

    def push(self, token: int) -> tuple[str, str | None]:
        """Add a token; the text to send now, and the stop string that ended it, if one did."""
        before = self._text
        self._ids.append(token)
        self._text = self._decode()
        stable = self._text.rstrip(INCOMPLETE)
        full = len(self._ids) - self._context >= PENDING
        if full:  # such a run of bytes is no character and will not become one
            stable = self._text[: max(len(stable), len(self._text) - UNFINISHED)]
        new = stable[self._sent :]
        self._sent += len(new)
        if full or (new and stable == self._text):
            self._slide()
        elif self._text == before == stable and self._context:
            self._ids.pop()  # a special token; without this a run of them grows the window
        if self._unscanned:
            self._unscanned -= 1
            return new, None
        return self._stop.push(new)

    def flush(self) -> str:
        """The text held back, when generation ends for another reason than a stop string."""
        undecided = self._text[self._sent :]
        self._sent = len(self._text)
        text, matched = self._stop.push(undecided.removesuffix(INCOMPLETE))
        return text if matched else text + self._stop.flush()

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skips)

    def _slide(self) -> None:
        """The tokens since the context become the context; what is held back stays so."""
        held = len(self._text) - self._sent
        del self._ids[: self._context]
        self._context = len(self._ids)
        self._text = self._decode()
        self._sent = max(0, len(self._text) - held)


class StopScan:
    """Passes text on up to the first stop string, holding back only what may yet become one.

    The match that ends first wins, the longest of those that end together, so that the result does
    not depend on how the text was cut into pieces.
    """

    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        self._stop = tuple(sorted(filter(None, stop), key=len, reverse=True))
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may go out, and the stop string that was found behind it, or, where it is
        to be included, at its end."""
        if not text or not self._stop:
            return text, None
        text = self._held + text
        self._held = ""
        found = [(text.find(stop) + len(stop), stop) for stop in self._stop if stop in text]
        if found:
            end, stop = min(found, key=lambda match: match[0])
            return text[: end if self._include else end - len(stop)], stop
        held = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """What is still held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, the whole of it excluded."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
