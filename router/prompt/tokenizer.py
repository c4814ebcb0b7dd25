"""Text to token ids and back, exactly as the model's own tokenizer does it."""

import json
import secrets
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from router.prompt.control import Control

assert sys.byteorder == "little", "token ids travel as little-endian uint32"


class Tokenizer:
    """A model's tokenizer.json. Ids go in and out as little-endian uint32 bytes.

    `vocab_size` counts the ids the tokenizer knows; a model's embedding may have more rows.
    """

    def __init__(self, definition: str) -> None:
        self._parsing = tokenizers.Tokenizer.from_str(definition)
        self._parsing.no_truncation()
        self._parsing.no_padding()
        self.vocab_size = self._parsing.get_vocab_size(with_added_tokens=True)
        added = self._parsing.get_added_tokens_decoder()
        self._added = {id: token.content for id, token in added.items()}
        self.control = Control(added)
        # The second copy reads control tokens as text; the alias stands for a genuine one.
        self._alias = f"control{secrets.token_hex(8)}"
        self._plain = tokenizers.Tokenizer.from_str(self._parsing.to_str())
        self._plain.encode_special_tokens = True
        self._plain.add_tokens([tokenizers.AddedToken(self._alias, normalized=False)])
        self._alias_id = self._plain.token_to_id(self._alias)
        self._byte_level = "ByteLevel" in json.dumps(json.loads(definition).get("decoder"))

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Raises OSError without a tokenizer.json, ValueError on one that cannot be read."""
        definition = (model_dir / "tokenizer.json").read_text(encoding="utf-8")
        try:
            return cls(definition)
        except Exception as error:  # the binding raises a bare Exception
            raise ValueError(f"tokenizer.json: {error}") from error

    def encode_text(self, text: str, add_special_tokens: bool = True) -> bytes:
        """Ids of text in which nothing is a control token; the model's own BOS is added."""
        return array(
            "I", self._plain.encode(text, add_special_tokens=add_special_tokens).ids
        ).tobytes()

    def encode_trusted(self, text: str, add_special_tokens: bool = False) -> bytes:
        """Ids of text in which every control token is meant as one."""
        return array(
            "I", self._parsing.encode(text, add_special_tokens=add_special_tokens).ids
        ).tobytes()

    def encode_guarded(self, text: str, guard: str, add_special_tokens: bool = False) -> bytes:
        """Ids of text in which `guard` breaks the control tokens that are only text.

        One call for the whole text, so that what stands around a control token is tokenised as the
        model does it (a space prefix at the start of the text only, for instance).
        """
        marked, genuine = self.control.replace(text, self._alias)
        encoded = self._plain.encode(
            marked.replace(guard, ""), add_special_tokens=add_special_tokens
        )
        ids = iter(genuine)
        return array(
            "I", (next(ids) if id == self._alias_id else id for id in encoded.ids)
        ).tobytes()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ids; an id outside the vocabulary adds nothing."""
        return self._parsing.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, id: int) -> bytes:
        """The bytes one id stands for; empty for an id outside the vocabulary.

        Byte-level vocabularies spell bytes as printable characters (GPT-2, `bytes_to_unicode`);
        sentencepiece ones write a space as U+2581 and a lone byte as <0xNN>.
        """
        if (content := self._added.get(id)) is not None:
            return content.encode()
        token = self._parsing.id_to_token(id)
        if token is None:
            return b""
        if self._byte_level:
            return b"".join(
                _BYTE_OF[char].to_bytes() if char in _BYTE_OF else char.encode() for char in token
            )
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's table: a printable byte is its own character, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF = _bytes_of_characters()
