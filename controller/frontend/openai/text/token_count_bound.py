"""A lower bound of the number of tokens of a text, computed from its length.

With this bound, a text that cannot fit into a context is refused without being tokenized.

    tokens ≥ characters / reach        reach: the largest number of characters that one token can stand for

Each character of a text is part of some token, unless the tokenizer drops the character. So no text with more than
`context` times `reach` characters fits. In a byte-level vocabulary, a character is counted for the token that
contains its first byte, because exactly one token does. A normalizer that composes characters (NFC, NFKC) merges at most
four characters into one, and leaves ASCII unchanged. Blanks do not count if the tokenizer drops them when it splits a
text into words, or if an added token strips them.

If a tokenizer can drop any number of characters, or merge any number into one token, there is no bound. A text of any
length is then tokenized. These parts of a tokenizer have this effect:

- Normalizers that delete or rewrite freely: Strip, StripAccents, BertNormalizer, Nmt, Precompiled, and Replace with a
  pattern.
- The models WordPiece and WordLevel.
- Unigram without a token for each of the 256 bytes, because it merges unknown characters.
- BPE without these 256 tokens, because it merges or drops unknown characters. BPE with an `unk_token` and without
  `fuse_unk` does neither.

See `normalizers`, `pre_tokenizers` and `models` of Hugging Face's tokenizers 0.23.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from events.token_bytes import byte_of_char, bytes_of

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
_KEEPS_ALL = {  # unless their behavior is "Removed"
    "ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength", "Sequence", "Split", "Punctuation",
}  # fmt: skip
_DROPS_BLANKS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}


@dataclass(frozen=True, slots=True)
class TokenReach:
    """The largest number of characters for which one token of a vocabulary can stand."""

    ascii: int  # for ASCII text
    any: int  # for any text
    drops_blanks: bool = False

    def tokens_min(self, text: str, enough: int) -> int:
        """Return a lower bound of the number of tokens of a text.

        The bound is computed only as far as needed to decide whether it exceeds `enough`.
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
    """Return the reach of a tokenizer: the largest number of characters for which one token can stand.

    `config` is the tokenizer's JSON. Return None if one token can stand for any number of characters.
    """
    shrinks = _shrinks(config["normalizer"])
    words = list(parts_of(config["pre_tokenizer"]))
    if shrinks is None or config["truncation"] or not all(map(_keeps, words)):
        return None
    steps = (*words, *parts_of(config["normalizer"]))
    byte_level = any(part["type"] == "ByteLevel" for part in steps)
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if not _knows_every_character(config["model"], vocabulary, byte_level=byte_level):
        return None
    longest = max(map(_characters if byte_level else len, vocabulary), default=1)
    drops = any(part["type"] in _DROPS_BLANKS for part in words)
    normal = tokenizer.normalizer
    for one in config["added_tokens"]:
        content = one["content"]
        longest = max(longest, len(content), len(normal.normalize_str(content)) if normal else 0)
        drops = drops or one["lstrip"] or one["rstrip"]
    plain, composed = shrinks
    return TokenReach(longest * plain, longest * plain * composed, drops)


def _shrinks(normalizer: TokenizerJson | None) -> tuple[int, int] | None:
    """Return two factors by which a normalizer can shrink a text, or None if there is no limit.

    The first factor is the largest number of characters merged into one. The second is a further factor for text that
    is not ASCII.
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
    """Return whether a pre-tokenizer keeps all characters that are not blanks."""
    return part.get("behavior") != "Removed" and part["type"] in _KEEPS_ALL | _DROPS_BLANKS


def _knows_every_character(model: TokenizerJson, vocabulary: Mapping[str, int], *, byte_level: bool) -> bool:
    """Return whether a model neither drops a character of its input, nor merges unknown characters into one token.

    Each character then becomes a token of its own, or a part of a token in the vocabulary.
    """
    if model["type"] not in ("BPE", "Unigram"):
        return False
    if byte_level and all(char in vocabulary for char in byte_of_char()):
        return True
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    return model["type"] == "BPE" and model.get("unk_token") is not None and not model.get("fuse_unk")


def _characters(token: str) -> int:
    """Return the largest number of characters for which a token of a byte-level vocabulary can stand.

    This is how many of the token's bytes start a UTF-8 character.
    """
    return sum(byte & 0xC0 != 0x80 for byte in bytes_of(token))


def parts_of(config: TokenizerJson | None) -> Iterator[TokenizerJson]:
    """Yield `config`, a step of a tokenizer's JSON, and all steps nested in it. Yield nothing for None."""
    if config is not None:
        yield config
        for name in ("normalizers", "pretokenizers", "processors"):
            for part in config.get(name) or ():
                yield from parts_of(part)
