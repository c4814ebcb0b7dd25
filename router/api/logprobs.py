"""Log probabilities in OpenAI's two formats: chat, and the older one of completions."""

from collections.abc import Iterable
from typing import Any

from hotbranch.v1.serve_pb2 import TokenLogprobs
from router.prompt.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity; the value vLLM uses


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TokenLogprobs]) -> dict[str, Any]:
    content = []
    for token in tokens:
        entry = _entry(tokenizer, token.token_id, token.logprob)
        top = zip(token.top_ids, token.top_logprobs, strict=True)
        entry["top_logprobs"] = [_entry(tokenizer, id, logprob) for id, logprob in top]
        content.append(entry)
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Iterable[TokenLogprobs], offset: int
) -> tuple[dict[str, Any], int]:
    """The logprobs object, and the offset in characters behind its last token."""
    texts: list[str] = []
    chosen: list[float] = []
    top: list[dict[str, float]] = []
    offsets: list[int] = []
    for token in tokens:
        text = _text(tokenizer, token.token_id)
        texts.append(text)
        chosen.append(max(token.logprob, LOWEST))
        ranked = zip(token.top_ids, token.top_logprobs, strict=True)
        likely = {_text(tokenizer, id): max(logprob, LOWEST) for id, logprob in ranked}
        top.append({**likely, text: chosen[-1]})
        offsets.append(offset)
        offset += len(text)
    result = {
        "tokens": texts,
        "token_logprobs": chosen,
        "top_logprobs": top,
        "text_offset": offsets,
    }
    return result, offset


def _entry(tokenizer: Tokenizer, id: int, logprob: float) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(id)
    return {
        "token": spelled.decode("utf-8", "replace"),
        "logprob": max(logprob, LOWEST),
        "bytes": list(spelled),
    }


def _text(tokenizer: Tokenizer, id: int) -> str:
    return tokenizer.token_bytes(id).decode("utf-8", "replace")
