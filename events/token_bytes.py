"""The bytes of a tokenizer's tokens, read from its tokenizer.json."""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

BUILTIN_FILE = Path(__file__).with_name("builtin_sim_tokenizer.json")
"""The tokenizer of the simulated engine."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""The name of a token that stands for a byte, in vocabularies such as Llama 2's."""
_SPACE = "▁"  # stands for a space in these vocabularies


@lru_cache(maxsize=1)
def byte_of_char() -> dict[str, int]:
    """Return the byte that each printable character stands for in byte-level BPE.

    For 188 bytes, the character's code is the byte itself. The other 68 bytes have characters with higher codes.
    """
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + n): byte for n, byte in enumerate(shifted)}


def bytes_of(token: str) -> bytes:
    """Return the bytes of a token, given the token's name in a byte-level vocabulary.

    A name with characters outside byte-level BPE, such as that of an added token, stands for its own text in UTF-8.
    """
    try:
        return bytes(map(byte_of_char().__getitem__, token))
    except KeyError:  # an added token, or a vocabulary of plain text
        return token.encode()


def read_token_bytes(file: Path) -> dict[int, bytes]:
    """Return the bytes of each token of a tokenizer.json, by token id and without special tokens.

    Raise OSError if the file cannot be read, and ValueError if it is no tokenizer.
    """
    whole = json.loads(file.read_text(encoding="utf-8"))
    try:
        byte_level = (whole.get("decoder") or {}).get("type") == "ByteLevel"
        found = {number: _bytes(name, byte_level) for number, name in _names(whole["model"]["vocab"])}
        for added in whole.get("added_tokens") or ():
            found.pop(added["id"], None)
            if not added["special"]:
                found[added["id"]] = added["content"].encode()
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no tokenizer: {error!r}") from error
    return found


def _names(vocabulary: Any) -> Iterator[tuple[int, str]]:
    """Yield the id and the name of each token.

    A BPE vocabulary maps names to ids. A Unigram vocabulary is a list of names with scores, in the order of the ids.
    """
    if isinstance(vocabulary, dict):
        return ((number, name) for name, number in vocabulary.items())
    return ((number, name) for number, (name, _) in enumerate(vocabulary))


def _bytes(name: str, byte_level: bool) -> bytes:
    if byte_level:
        return bytes_of(name)
    found = BYTE_TOKEN.fullmatch(name)
    return bytes.fromhex(found[1]) if found else name.replace(_SPACE, " ").encode()
