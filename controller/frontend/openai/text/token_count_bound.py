"""A lower bound of the number of tokens of a text, computed from its length.

With this bound, a text that cannot fit into a context is refused without being tokenized.

    tokens ≥ characters / reach        reach: the largest number of characters that one token can stand for

Each character of a text is part of some token, unless the tokenizer drops the character. So no text with more than
`context` times `reach` characters fits. In a byte-level vocabulary, a character counts for the token that has its
first byte, because each first byte is in one token. Normalizers that compose (NFC) make one character of at most
four, and leave ASCII unchanged. Blanks do not count if they are dropped before the tokenizer splits words, or if an
added token strips them.

If the tokenizer may drop any number of characters, there is no bound, and a text of any length is tokenized. This is
the case for normalizers that delete or rewrite freely (Strip, StripAccents, BertNormalizer, Nmt, Precompiled, Replace
with a pattern). It is also the case for models that make one token of any number of unknown characters: WordPiece,
WordLevel, and Unigram and BPE with fused unknowns, without all 256 bytes as a fallback. See `normalizers`,
`pre_tokenizers` and `models` of Hugging Face's tokenizers 0.23.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from controller.frontend.openai.text.detokenizer import byte_of_char

TokenizerJson = Mapping[str, Any]
"""A tokenizer.json, or a part of it."""
# number of characters in the longest canonical decomposition (for example of U+1F82), which Unicode's stability
# policy guarantees
COMPOSED_MAX = 4
PIECE = 2**16  # characters examined at a time
LOOKED_AT_MAX = 2**23  # characters in which blanks are counted, which takes 50 ms
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
    """The largest number of characters for which one token of a vocabulary can stand."""

    ascii: int  # for ASCII text
    any: int  # for any text
    drops_blanks: bool = False

    def tokens_min(self, text: str, enough: int) -> int:
        """Return a lower bound of the number of tokens of a text, exact enough to decide whether the text has more than
        `enough`.
        """
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


def reach_of(tokenizer: Tokenizer, config: TokenizerJson) -> TokenReach | None:
    """Return the reach of a tokenizer with this JSON, or None if one token can stand for any number of characters."""
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


def _shrinks(normalizer: TokenizerJson | None) -> tuple[int, int] | None:
    """Return the largest number of characters that a normalizer merges into one, and a further factor for text that is
    not ASCII.

    Return None if the number has no limit.
    """
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


def _keeps(part: TokenizerJson) -> bool:
    """Return whether a pre-tokenizer drops no characters except blanks."""
    kind = part["type"]
    if kind in _KEEPS_UNLESS_TOLD:
        return bool(part["behavior"] != "Removed")
    return kind in _KEEPS_ALL or kind in _DROPS_BLANKS


def _knows_every_character(
    model: TokenizerJson, vocabulary: Mapping[str, int], stand_ins: Mapping[str, int]
) -> bool:
    """Return whether each character of a model's input becomes a token of its own, or a part of a token in the
    vocabulary.
    """
    if model["type"] not in ("BPE", "Unigram"):
        return False
    if stand_ins and all(char in vocabulary for char in stand_ins):
        return True
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    return model["type"] == "BPE" and model.get("unk_token") is not None and not model.get("fuse_unk")


def _characters(token: str, byte_of: Mapping[str, int]) -> int:
    """Return the largest number of characters for which a token can stand.

    Of bytes, only those that start a character count.
    """
    if byte_of and all(char in byte_of for char in token):
        return sum(byte_of[char] & 0xC0 != 0x80 for char in token)
    return len(token)


def parts_of(config: TokenizerJson | None) -> Iterator[TokenizerJson]:
    """Yield a step of a tokenizer's JSON, followed by all nested steps if the step is a sequence."""
    if config is not None:
        yield config
        for name in ("normalizers", "pretokenizers", "processors"):
            for part in config.get(name) or ():
                yield from parts_of(part)
