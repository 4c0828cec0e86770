"""A lower bound of a text's tokens, from its length, so that a text that cannot fit into a context is never tokenised.

    tokens ≥ characters / reach        reach: the most characters of a text that one token can stand for

Each character of a text is a part of some token, unless the tokenizer drops it; so no text of more than `context` times
`reach` characters fits. Of a byte-level token those characters are counted whose first byte it has: each first byte lies in
one token. Normalisers that compose (NFC) make one character of four at most, and leave ASCII as it is. Blanks that are dropped
before the tokenizer reads words, or that an added token takes from beside it, are not counted.

Where the tokenizer may drop any number of characters, there is no bound, and a text is tokenised whatever its length. That is
so for normalisers that delete or rewrite at will (Strip, StripAccents, BertNormalizer, Nmt, Precompiled, Replace with a
pattern), and for models that make one token of any number of unknown characters (WordPiece, WordLevel, Unigram and BPE that
fuse them, without all 256 bytes to fall back to). See `normalizers`, `pre_tokenizers` and `models` of Hugging Face's tokenizers
0.23.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from controller.frontend.openai.text.detokenizer import byte_of_char

COMPOSED_MAX = 4  # characters of the longest canonical decomposition (U+1F82 and its like: Unicode's stability policy keeps it)
PIECE = 2**16  # characters that are looked at in one go
LOOKED_AT_MAX = 2**23  # characters of which blanks are told apart: 50 ms
BLANKS = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_KEEPS_LENGTH = {"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"}
_COMPOSES = {"NFC", "NFKC"}
_KEEPS_ALL = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength", "Sequence"}
_KEEPS_UNLESS_TOLD = {"Split", "Punctuation"}
_DROPS_BLANKS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}


@dataclass(frozen=True, slots=True)
class TokenReach:
    """The most characters that one token of a vocabulary can stand for."""

    ascii: int  # where the text is ASCII
    any: int
    drops_blanks: bool = False

    def tokens_min(self, text: str, enough: int) -> int:
        """Return how many tokens a text has at least: exact enough to say whether these are more than `enough`."""
        reach = self.ascii if text.isascii() else self.any
        if not self.drops_blanks or len(text) <= enough * reach:
            return 0 if self.drops_blanks else -(-len(text) // reach)
        found = 0
        for start in range(0, min(len(text), LOOKED_AT_MAX), PIECE):
            piece = text[start : start + PIECE]
            found += len(piece) - sum(map(piece.count, BLANKS))
            if found > enough * reach:
                break
        return -(-found // reach)


def reach_of(tokenizer: Tokenizer, config: Mapping[str, Any]) -> TokenReach | None:
    """Return the reach of a tokenizer with this JSON; None if one token can stand for any number of characters."""
    shrinks = _shrinks(config["normalizer"])
    words = list(parts_of(config["pre_tokenizer"]))
    if shrinks is None or config["truncation"] or not all(map(_keeps, words)):
        return None
    steps = (*words, *parts_of(config["normalizer"]))
    byte_of = byte_of_char() if any(part["type"] == "ByteLevel" for part in steps) else {}
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if not _knows_every_character(config["model"], vocabulary, byte_of):
        return None
    longest = max((_characters(token, byte_of) for token in vocabulary), default=1)
    drops = any(part["type"] in _DROPS_BLANKS for part in words)
    normal = tokenizer.normalizer
    for one in config["added_tokens"]:
        content = one["content"]
        longest = max(longest, len(content), len(normal.normalize_str(content)) if normal else 0)
        drops = drops or one["lstrip"] or one["rstrip"]
    plain, composed = shrinks
    return TokenReach(longest * plain, longest * plain * composed, drops)


def _shrinks(normalizer: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Return how many characters a normaliser makes into one at most, of any text, and how many times more if it is not
    ASCII; None: there is no bound."""
    plain = composed = 1
    for part in parts_of(normalizer):
        kind = part["type"]
        if kind in _COMPOSES:
            composed *= COMPOSED_MAX
        elif kind == "Replace":
            was, now = part["pattern"].get("String"), part["content"]
            if not was or not now:
                return None
            plain *= -(-len(was) // len(now))
        elif kind not in _KEEPS_LENGTH and kind != "Sequence":
            return None
    return plain, composed


def _keeps(part: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer drops nothing but blanks."""
    kind = part["type"]
    if kind in _KEEPS_UNLESS_TOLD:
        return bool(part["behavior"] != "Removed")
    return kind in _KEEPS_ALL or kind in _DROPS_BLANKS


def _knows_every_character(
    model: Mapping[str, Any], vocabulary: Mapping[str, int], stand_ins: Mapping[str, int]
) -> bool:
    """Return whether each character that a model is given ends up in a token of its own, or in a known one."""
    if model["type"] not in ("BPE", "Unigram"):
        return False
    if stand_ins and all(char in vocabulary for char in stand_ins):
        return True
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    return model["type"] == "BPE" and model.get("unk_token") is not None and not model.get("fuse_unk")


def _characters(token: str, byte_of: Mapping[str, int]) -> int:
    """Return how many characters of a text a token can stand for at most: of bytes, those that begin one."""
    if byte_of and all(char in byte_of for char in token):
        return sum(byte_of[char] & 0xC0 != 0x80 for char in token)
    return len(token)


def parts_of(config: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield a step of a tokenizer, as its JSON has it, and all steps in it, if it is a sequence."""
    if config is not None:
        yield config
        for name in ("normalizers", "pretokenizers", "processors"):
            for part in config.get(name) or ():
                yield from parts_of(part)
