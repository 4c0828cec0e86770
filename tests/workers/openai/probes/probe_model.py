"""The tiny model, with a chat template for tools and documents, and with tokens for reasoning."""

import json
import shutil
import struct
from pathlib import Path

ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}{{ '### tools\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
{{- 'Call a tool with <tool_call>\\n{"name": …, "arguments": …}\\n</tool_call>\\n' }}
{%- endif %}
{%- for document in documents or [] %}{{ '### ' + document['title'] + '\\n' + document['text'] + '\\n' }}{% endfor %}
{%- for message in messages %}{{ '### ' + message['role'] + '\\n' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] %}
{{- '<tool_call>\\n' + ({'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson) }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '### assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
"""Hermes' format of tool calls, as Qwen's templates have it."""


def build(tiny: Path, folder: Path) -> Path:
    """Write a copy of the tiny model, with this template and with tokens of their own for its tags."""
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    first = config["vocab_size"]
    config["vocab_size"] = first + len(ADDED)
    (folder / "config.json").write_text(json.dumps(config))
    about = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": CHAT_TEMPLATE}))
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    same = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    vocabulary["added_tokens"] += [
        {"id": first + place, "content": text, **same} for place, text in enumerate(ADDED)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    _widen(folder / "model.safetensors", first, first + len(ADDED))
    return folder


def _widen(weights: Path, before: int, after: int) -> None:
    """Append rows of zeros to the two matrices with a row for each token. Their logits are 0, so they are rarely chosen."""
    data = weights.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    head, values, at = json.loads(data[8 : 8 + size]), data[8 + size :], 0
    parts = []
    for name, about in sorted(head.items(), key=lambda item: item[1].get("data_offsets", [-1])[0]):
        if name == "__metadata__":
            continue
        begin, end = about["data_offsets"]
        part = values[begin:end]
        if about["shape"][0] == before:
            about["shape"][0] = after
            part += bytes(len(part) // before * (after - before))
        about["data_offsets"] = [at, at + len(part)]
        at += len(part)
        parts.append(part)
    told = json.dumps(head).encode()
    told += b" " * (-len(told) % 8)
    weights.write_bytes(struct.pack("<Q", len(told)) + told + b"".join(parts))
