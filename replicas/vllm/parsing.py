"""Tool calls and reasoning in replies, found by vLLM's own parsers as its server does it."""

from collections.abc import Sequence
from typing import Any

import orjson
from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import Parser, ParserManager
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike

from replicas.engine import Output, Request, ToolCall

# Of the calls that a conversation has, some parsers want to know how many there are.
_EARLIER_CALL = {"id": "", "type": "function", "function": {"name": "", "arguments": "{}"}}


class Parsers:
    """Opens a parser for each reply. Raises ValueError for names that vLLM has no parser of."""

    def __init__(
        self, tools: str, reasoning: str, tokenizer: TokenizerLike, config: ModelConfig
    ) -> None:
        try:
            parser = ParserManager.get_parser(
                tool_parser_name=tools or None,
                reasoning_parser_name=reasoning or None,
                enable_auto_tools=bool(tools),
                model_name=config.model,
                is_harmony=config.hf_config.model_type == "gpt_oss",
                tokenizer=tokenizer,
            )
        except TypeError as error:
            raise ValueError(f"--engine-args: {error}") from None
        assert parser is not None, "there is a name"
        self._parser = parser
        self._tokenizer = tokenizer
        self._config = config

    def open(self, request: Request, params: SamplingParams) -> "Parsing | None":
        """The parsing of one reply, None where none is wanted. What the tools demand of the reply
        enters `params`. Raises ValueError for a chat that vLLM refuses."""
        if not request.chat:
            return None
        told = orjson.loads(request.chat)
        calls = [_EARLIER_CALL] * told.pop("history_tool_calls", 0)
        earlier = [{"role": "assistant", "content": "", "tool_calls": calls}] if calls else []
        chat = ChatCompletionRequest.model_validate(
            {"messages": earlier, "model": self._config.model, **told}
        )
        chat.structured_outputs = params.structured_outputs
        chat.skip_special_tokens = params.skip_special_tokens
        kwargs = dict(chat.chat_template_kwargs or {})
        parser = self._parser(
            self._tokenizer,
            chat.tools,
            chat_template_kwargs=kwargs,
            model_config=self._config,
        )
        reasons = parser.reasoning_parser is not None
        if chat.tool_choice != "none" or reasons or parser.always_adjust_request:
            adjusted = parser.adjust_request(chat)
            assert isinstance(adjusted, ChatCompletionRequest)
            chat = adjusted
        params.structured_outputs = chat.extract_structured_outputs()
        params.skip_special_tokens = chat.skip_special_tokens
        prompt: list[int] = memoryview(request.prompt).cast("I").tolist()
        parser.set_prompt_token_ids(prompt)
        return Parsing(parser, chat, prompt, kwargs)


class Parsing:
    """The parsing of one reply, piece by piece."""

    def __init__(
        self,
        parser: Parser,
        chat: ChatCompletionRequest,
        prompt: Sequence[int],
        template_kwargs: dict[str, Any],
    ) -> None:
        self._parser = parser
        self._chat = chat
        self._prompt = list(prompt)
        self.arguments = self._arguments(template_kwargs)

    def _arguments(self, template_kwargs: dict[str, Any]) -> dict[str, Any]:
        """What `AsyncLLM.generate` wants to know: a structure holds from the end of reasoning."""
        reasons = self._parser.reasoning_parser is not None
        return {
            "reasoning_ended": self._chat.resolve_reasoning_ended(self._parser, self._prompt),
            "reasoning_parser_kwargs": (
                {"chat_template_kwargs": template_kwargs} if reasons else None
            ),
        }

    def push(self, output: Output) -> None:
        """Take what the parser finds out of the text of an output."""
        found = self._parser.parse_delta(
            delta_text=output.text,
            delta_token_ids=output.tokens,
            request=self._chat,
            prompt_token_ids=self._prompt,
            finished=output.finish is not None,
        )
        output.text = (found.content or "") if found else ""
        if not self._chat.include_reasoning:
            output.logprobs = None
        if found is None:
            return
        if self._chat.include_reasoning:
            output.reasoning = found.reasoning or ""
        output.tool_calls = [
            ToolCall(
                call.index,
                call.id or "",
                (call.function.name or "") if call.function else "",
                (call.function.arguments or "") if call.function else "",
            )
            for call in found.tool_calls
        ]
