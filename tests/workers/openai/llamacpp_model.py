"""Writes the tiny model (`holdfast model tiny`) as GGUF, in fp32.

    python tests/workers/openai/llamacpp_model.py GGUF_PY_FOLDER MODEL_DIR OUT.gguf

llama.cpp's own converter rejects this vocabulary: it recognises tokenizers by name, and this one is trained by the tests.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import load_file

OF_A_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write(gguf: Any, model: Path, out: Path) -> None:
    """Write the model in `model` to `out` atomically: a file that exists is complete."""
    config = json.loads((model / "config.json").read_text())
    draft = out.with_suffix(".part")
    writer = gguf.GGUFWriter(draft, "llama")
    _describe(writer, config)
    _vocabulary(gguf, writer, model)
    for name, values in tensors(model, config):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    draft.rename(out)


def tensors(model: Path, config: dict[str, Any]) -> Iterator[tuple[str, numpy.ndarray]]:
    """Yield the weights with llama.cpp's names, and its order of a head's dimensions."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in load_file(model / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if count := heads.get(stem.rpartition(".")[2]):
            values = _pairs(values, count)
        if stem in WHOLE:
            yield f"{WHOLE[stem]}.weight", values
        else:
            _, _, layer, part = stem.split(".", 3)
            yield f"blk.{layer}.{OF_A_LAYER[part]}.weight", values


def _pairs(values: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Interleave the two halves that a rotary embedding rotates together, as in llama.cpp."""
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return numpy.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def _describe(writer: Any, config: dict[str, Any]) -> None:
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(0)  # all fp32


def _vocabulary(gguf: Any, writer: Any, model: Path) -> None:
    described = json.loads((model / "tokenizer.json").read_text())
    by_id = sorted(described["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in described["added_tokens"]}
    merges = described["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in by_id])
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token, _ in by_id]
    )
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(json.loads((model / "tokenizer_config.json").read_text())["chat_template"])


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])  # the sources of llama.cpp contain the package that writes its format
    import gguf

    write(gguf, Path(sys.argv[2]), Path(sys.argv[3]))
