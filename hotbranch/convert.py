"""A Llama in a GGUF file -> a Hugging Face model directory, without torch.

Writes config.json, generation_config.json, model.safetensors, tokenizer.json and
tokenizer_config.json. Quantised weights are dequantised by `gguf` and stored as bfloat16.
"""

import json
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFReader, TokenType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from hotbranch.progress import Report

Metadata = dict[str, Any]

BF16_BYTES = 2

# GGUF names (gguf-py, MODEL_TENSOR for LLAMA) and Hugging Face's.
OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INSIDE_LAYERS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def gguf_to_hf(source: Path, target: Path, report: Report) -> None:
    """Convert `source` into the existing directory `target`.

    Raises ValueError when the file is not a Llama with a byte-level BPE tokenizer, and OSError when
    `target` cannot be written.
    """
    report("reading the model", 0.0)
    reader = GGUFReader(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    kind = (metadata["general.architecture"], metadata["tokenizer.ggml.model"])
    if kind != ("llama", "gpt2"):
        raise ValueError(f"{source.name}: expected a llama with a gpt2 tokenizer, found {kind}")
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_json(target / "config.json", _config(metadata, tied))
    _write_json(target / "generation_config.json", _generation_config(metadata))
    _write_json(target / "tokenizer_config.json", _tokenizer_config(metadata))
    _tokenizer(metadata).save(str(target / "tokenizer.json"))
    _write_weights(reader, metadata, target / "model.safetensors", report)


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(metadata: Metadata, tied: bool) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": _decimal(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _decimal(metadata["llama.rope.freq_base"]),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        **_token_ids(metadata),
    }


def _decimal(value: float) -> float:
    """The decimal number that a float32 was written as: 9.99999974e-06 -> 1e-05."""
    return float(f"{value:.6g}")


def _token_ids(metadata: Metadata) -> dict[str, object]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _generation_config(metadata: Metadata) -> dict[str, object]:
    return {"_from_model_config": True, **_token_ids(metadata)}


def _tokenizer_config(metadata: Metadata) -> dict[str, object]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        # The plain class takes tokenizer.json as it is; GPT2Tokenizer builds its own pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _tokenizer(metadata: Metadata) -> Tokenizer:
    """Byte-level BPE; digits stand alone, as `tokenizer.ggml.pre = smollm` says."""
    if metadata["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"unknown pre-tokenizer {metadata['tokenizer.ggml.pre']!r}")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = (
        token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    return tokenizer


def _write_weights(reader: GGUFReader, metadata: Metadata, path: Path, report: Report) -> None:
    """The safetensors format: header length as uint64, a JSON header, the tensors end to end."""
    heads = metadata["llama.attention.head_count"]
    kv_heads = metadata["llama.attention.head_count_kv"]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in reader.tensors:
        start, end = end, end + BF16_BYTES * int(tensor.n_elements)
        shape = [int(size) for size in reversed(tensor.shape)]
        entry = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        header[_hf_name(tensor.name)] = entry
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for done, tensor in enumerate(reader.tensors, 1):
            weight = dequantize(tensor.data, tensor.tensor_type)
            if tensor.name.endswith("attn_q.weight"):
                weight = half_rotation(weight, heads)
            elif tensor.name.endswith("attn_k.weight"):
                weight = half_rotation(weight, kv_heads)
            file.write(quantize(weight, GGMLQuantizationType.BF16).tobytes())
            report("converting the weights", done / len(reader.tensors))


def _hf_name(name: str) -> str:
    if name in OUTSIDE_LAYERS:
        return OUTSIDE_LAYERS[name]
    block, layer, rest = name.split(".", 2)
    if block != "blk" or rest not in INSIDE_LAYERS:
        raise ValueError(f"unknown tensor {name!r}")
    return f"model.layers.{layer}.{INSIDE_LAYERS[rest]}"


def half_rotation(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of a q or k projection [heads * head_dim, hidden], in the order of HF's RoPE.

    GGUF keeps the pairs that RoPE rotates side by side (0, 1), (2, 3), ...; Hugging Face rotates
    the first half of a head against the second. The inverse of `permute` in llama.cpp's
    convert_hf_to_gguf.py.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)
