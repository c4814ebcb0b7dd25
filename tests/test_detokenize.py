"""Streaming text against decoding everything at once, for both kinds of tokenizer in the family."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from replicas.radix.detokenize import INCOMPLETE, StopScan, TextStream

CORPUS = [
    "the quick brown fox; the slow dog",
    "naïve café — “quotes”",
    "日本語 テスト 👍🏽👩‍👩‍👧 ok",
] * 3


@cache
def byte_level() -> Tokenizer:
    """As in Llama 3, Qwen and SmolLM2: bytes, so that a character may span several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def sentence_piece() -> Tokenizer:
    """As in Llama 2 and Mistral: a text's first space is dropped, unknown characters are bytes."""
    words = ["▁the", "▁", "t", "h", "e", "▁quick", "s", ".", "▁é"]
    vocab = {"<unk>": 0, "<eos>": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    vocab |= {word: 258 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


def stream(tokenizer: Tokenizer, ids: list[int], *stop: str) -> tuple[list[str], str | None]:
    """The pieces that went out, the flushed one last, and the stop string that matched."""
    text_stream, pieces = TextStream(tokenizer, stop), []
    for token in ids:
        piece, matched = text_stream.push(token)
        pieces.append(piece)
        if matched is not None:
            return pieces, matched
    return [*pieces, text_stream.flush()], None


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, 359), max_size=60))
@settings(max_examples=400, deadline=None)
def test_any_ids_stream_to_what_decoding_gives(ids: list[int]) -> None:
    tokenizer = byte_level()
    whole = decode(tokenizer, ids)
    pieces, _ = stream(tokenizer, ids)
    assert "".join(pieces) == whole.removesuffix(INCOMPLETE)


@given(st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_streams_whole_characters_and_no_replacement(text: str) -> None:
    for tokenizer in (byte_level(), sentence_piece()):
        ids = tokenizer.encode(text).ids
        pieces, _ = stream(tokenizer, ids)
        assert "".join(pieces) == decode(tokenizer, ids).removesuffix(INCOMPLETE)
        if INCOMPLETE not in text:
            assert not any(INCOMPLETE in piece for piece in pieces)


def test_a_character_waits_for_its_last_byte_and_no_longer() -> None:
    tokenizer = byte_level()
    alphabet = {token: i for token, i in tokenizer.get_vocab().items() if len(token) == 1}
    table = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = [alphabet[c] for c in table.pre_tokenize_str("a👍b")[0][0]]
    pieces, _ = stream(tokenizer, ids)
    assert pieces == ["a", "", "", "", "👍", "b", ""]


def test_text_before_an_unfinished_character_goes_out_at_once_or_at_the_end() -> None:
    """A token may end in the middle of a character and still carry text that is finished."""
    tokenizer = Tokenizer(models.BPE(vocab={"aâĤ": 0, "¬": 1, "b": 2}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    assert decode(tokenizer, [0, 1]) == "a€"
    assert stream(tokenizer, [0, 1, 2])[0] == ["a", "€", "b", ""]
    assert stream(tokenizer, [2, 0])[0] == ["b", "a", ""]


def test_sentence_piece_keeps_inner_spaces_and_joins_bytes() -> None:
    tokenizer = sentence_piece()
    vocab = tokenizer.get_vocab()
    thumb = [vocab[f"<0x{byte:02X}>"] for byte in "👍".encode()]
    ids = [
        vocab["▁the"],
        vocab["▁quick"],
        *thumb,
        *thumb,
        vocab["▁the"],
        vocab["<eos>"],
        vocab["▁the"],
    ]
    pieces, _ = stream(tokenizer, ids)
    assert pieces == ["the", " quick", *["", "", "", "👍"] * 2, " the", "", " the", ""]


def test_special_tokens_are_silent_and_do_not_grow_the_window() -> None:
    tokenizer = byte_level()
    eos = tokenizer.token_to_id("<eos>")
    ids = tokenizer.encode("the fox").ids
    text_stream = TextStream(tokenizer)
    for token in ids:
        text_stream.push(token)
    assert {text_stream.push(eos) for _ in range(500)} == {("", None)}
    assert len(text_stream._ids) < 20
    assert "".join(text_stream.push(token)[0] for token in ids) + text_stream.flush() == "the fox"


def test_special_tokens_at_the_start_do_not_grow_the_window() -> None:
    for tokenizer in (byte_level(), sentence_piece()):
        text_stream = TextStream(tokenizer)
        for _ in range(500):
            assert text_stream.push(tokenizer.token_to_id("<eos>")) == ("", None)
        assert len(text_stream._ids) < 40
        ids = tokenizer.encode("the quick").ids
        assert "".join(text_stream.push(token)[0] for token in ids) == "the quick"


def test_bytes_that_are_no_character_go_out_and_do_not_grow_the_window() -> None:
    first = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = byte_level()
    vocab = tokenizer.get_vocab()
    lead, *rest = (vocab[c] for c in first.pre_tokenize_str("👍")[0][0])
    text_stream, text = TextStream(tokenizer), ""
    for _ in range(500):
        text += text_stream.push(rest[0])[0]
        assert len(text_stream._ids) < 40
    assert len(text) > 450
    ids = [lead, *rest, vocab["a"]]
    text += "".join(text_stream.push(token)[0] for token in ids)
    assert text == INCOMPLETE * 500 + "👍a"


def by_definition(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Character by character: the first stop string to be complete, the longest of several."""
    for end in range(1, len(text) + 1):
        matched = [s for s in stop if text[:end].endswith(s)]
        if matched:
            longest = max(matched, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text("abc", max_size=5), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3, unique=True),
)
@settings(max_examples=600, deadline=None)
def test_stop_strings_are_found_across_any_cut(pieces: list[str], stop: list[str]) -> None:
    expected = by_definition("".join(pieces), stop)
    scan, sent, pushed = StopScan(tuple(stop)), "", ""
    for piece in pieces:
        text, matched = scan.push(piece)
        sent, pushed = sent + text, pushed + piece
        if matched:
            assert (sent, matched) == expected
            return
        held = pushed[len(sent) :]
        assert pushed == sent + held
        could_become = [n for n in range(len(pushed) + 1) for s in stop if s.startswith(pushed[n:])]
        assert len(sent) == min(could_become, default=len(pushed)), (
            "held more, or less, than needed"
        )
    assert expected == (sent + scan.flush(), None)


@given(st.text(max_size=30), st.text(min_size=1, max_size=3), st.text(max_size=10))
@settings(max_examples=200, deadline=None)
def test_streams_end_before_a_stop_string(before: str, stop: str, after: str) -> None:
    tokenizer = byte_level()
    text = before + stop + after
    pieces, matched = stream(tokenizer, tokenizer.encode(text).ids, stop)
    if INCOMPLETE in text:
        return
    assert ("".join(pieces), matched) == (text[: text.index(stop)], stop)


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3))
@settings(max_examples=200, deadline=None)
def test_a_stop_string_that_is_included_ends_the_text(text: str, stop: list[str]) -> None:
    scan = StopScan(tuple(stop), include=True)
    sent, matched = scan.push(text)
    before, expected = by_definition(text, stop)
    assert matched == expected
    assert sent + scan.flush() == before + (expected or "")


def test_no_stop_string_begins_in_the_first_tokens() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("the fox the fox").ids
    least = ids.index(tokenizer.encode(" the").ids[0])
    for count, text in ((0, "the "), (least, "the fox the ")):
        text_stream, sent = TextStream(tokenizer, ("fox",), min_tokens=count), ""
        for token in ids:
            piece, matched = text_stream.push(token)
            sent += piece
            if matched:
                break
        assert (sent, matched) == (text, "fox")


def test_special_tokens_are_shown_on_demand() -> None:
    tokenizer = byte_level()
    text_stream = TextStream(tokenizer, special_tokens=True)
    ids = tokenizer.encode("the<eos>fox").ids
    assert "".join(text_stream.push(id)[0] for id in ids) + text_stream.flush() == "the<eos>fox"


def test_text_held_for_a_stop_string_is_flushed() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("the quick brown").ids
    pieces, matched = stream(tokenizer, ids, "brown fox", "")
    assert ("".join(pieces), matched) == ("the quick brown", None)
    assert pieces[-1].endswith("brown")


@pytest.mark.parametrize(
    "text", ["Grüße, 世界! 👩‍👩‍👧‍👦 naïve — code:\n\tif x:\n        pass\n", "   leading"]
)
def test_the_real_tokenizer_streams_what_it_decodes(smollm2: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    pieces, _ = stream(tokenizer, tokenizer.encode(text).ids)
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) > 1


@pytest.mark.parametrize("tokenizer", [byte_level(), sentence_piece()])
@given(text=st.text(alphabet="the quick.é👍 ", min_size=2, max_size=30), data=st.data())
@settings(deadline=None)
def test_text_behind_a_prompt_is_what_it_adds(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    ids = tokenizer.encode(text).ids
    cut = data.draw(st.integers(0, len(ids)))
    before = tokenizer.decode(ids[:cut])
    assume(INCOMPLETE not in before)
    text_stream = TextStream(tokenizer, (), ids[:cut])
    added = "".join(text_stream.push(token)[0] for token in ids[cut:]) + text_stream.flush()
    assert before + added == tokenizer.decode(ids).rstrip(INCOMPLETE)


def test_a_completion_keeps_the_space_before_its_first_word() -> None:
    tokenizer = sentence_piece()
    text_stream = TextStream(tokenizer, (), tokenizer.encode("the").ids)
    assert text_stream.push(tokenizer.token_to_id("▁quick")) == (" quick", None)
