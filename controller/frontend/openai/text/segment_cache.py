"""A cache of tokenised text segments, for texts that mostly repeat earlier ones, as the next turn of a conversation does.

    text ── cut at the added tokens ──▶ segments ── kept ──────────────────────────▶ tokens, joined
                                            └── others ── the tokenizer, at once ──▶ kept

A tokenizer cuts a text at its added tokens (`<|im_start|>`) before it does anything else, and then reads each segment as if
there were no other: so the system's prompt and all earlier turns need not be read again. That holds for added tokens that
are looked for in the text as it is (not `normalized`) and take nothing from beside them; the `normalized` ones are looked
for within a segment. Not for all tokenizers: `SegmentCache.of` says for which. See `AddedVocabulary::extract_and_normalize`
and `TokenizerImpl::post_process` of Hugging Face's tokenizers 0.23.

What it saves: the next turn of a conversation of 20,000 tokens takes 2.2 ms instead of 31.
"""

import re
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain
from typing import Any

from tokenizers import Tokenizer

from controller.frontend.openai.text.long_texts import LongTexts
from controller.frontend.openai.text.token_reach import parts_of

KEPT_BYTES = 16 * 2**20  # of texts and tokens, per tokenizer
# A segment that takes more than this part of it is not kept: it would drive out all others
SEGMENT_SHARE = 64
ENTRY_BYTES = 320  # what keeping a segment takes besides its text and its tokens
CHAR_BYTES = 8  # of a text that is not ASCII: wide characters, and UTF-8 beside them
TEXT_MAX = 262_144  # characters from which a text is not cut: that would hold up the loop for milliseconds
CUTS_MAX = 2000  # in one text; what follows is one segment, which the tokenizer cuts
ADDED_MAX = 100  # characters of an added token
_WITHIN_A_SEGMENT = {  # what splits further: each split for itself, wherever it stands (except one kind of Metaspace)
    "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation", "Sequence",
    "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit",
}  # fmt: skip
_AROUND_ALL = {"BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"}


class SegmentCache:
    """The segments of texts that one tokenizer has read lately. Touched by the loop only."""

    def __init__(
        self, added: dict[str, int], tokenizer: Tokenizer, kept_bytes: int = KEPT_BYTES, *, bare: bool = True
    ) -> None:
        """Begin empty. `added`: the tokenizer's added tokens; `kept_bytes`: how much is kept."""
        cut = re.compile(f"({_longest_of(added)})")
        self._cut = partial(cut.split, maxsplit=CUTS_MAX) if added else lambda text: [text]
        self._added: dict[str, Sequence[int]] = {"": ()} | {text: (token,) for text, token in added.items()}
        self.bare = bare  # the tokenizer puts nothing around a text, even with `special`
        self._tokenizer = tokenizer
        self._segment_bytes_max = kept_bytes // SEGMENT_SHARE
        self._kept: OrderedDict[str, array[int]] = OrderedDict()  # the latest last
        self._room = kept_bytes

    @property
    def kept(self) -> Collection[str]:
        """The segments that are kept, the one that was used longest ago first."""
        return self._kept.keys()

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, config: dict[str, Any], kept_bytes: int = KEPT_BYTES
    ) -> "SegmentCache | None":
        """Return an empty cache for a tokenizer with this JSON; None if it may read a segment otherwise than alone."""
        if not _reads_segments_alone(config):
            return None
        added = [one for one in config["added_tokens"] if not one["normalized"]]
        if any(one["lstrip"] or one["rstrip"] or one["single_word"] for one in added):
            return None
        ids = {one["content"]: one["id"] for one in added}
        if any(not text or len(text) > ADDED_MAX or tokenizer.token_to_id(text) != ids[text] for text in ids):
            return None
        bare = all(part["type"] in ("ByteLevel", "Sequence") for part in parts_of(config["post_processor"]))
        return cls(ids, tokenizer, kept_bytes, bare=bare)

    async def read(self, text: str, threads: LongTexts) -> list[int]:
        """Return the tokens of a text, without those that a tokenizer puts around it. `threads` read what is not kept."""
        parts = self._cut(text)
        tokens: list[int] = []
        for part in parts:
            known = self._known(part)
            if known is None:
                return await self._read_rest(parts, threads)
            tokens += known
        return tokens

    async def _read_rest(self, parts: list[str], threads: LongTexts) -> list[int]:
        known = {part: self._known(part) for part in parts}
        missing = [part for part, tokens in known.items() if tokens is None]
        read = await threads.read(sum(map(len, missing)), partial(self._encode, missing))
        for part, tokens in zip(missing, read, strict=True):
            known[part] = tokens
            self._keep(part, tokens)
        return list(chain.from_iterable(known[part] or () for part in parts))

    def _encode(self, texts: list[str]) -> list[Sequence[int]]:
        return [one.ids for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _known(self, part: str) -> Sequence[int] | None:
        tokens = self._kept.get(part)
        if tokens is None:
            return self._added.get(part)
        self._kept.move_to_end(part)
        return tokens

    def _keep(self, segment: str, tokens: Sequence[int]) -> None:
        if segment in self._kept:  # another request read it meanwhile
            return
        kept = array("I", tokens)
        takes = _takes(segment, kept)
        if takes > self._segment_bytes_max:
            return
        self._kept[segment] = kept
        self._room -= takes
        while self._room < 0:
            self._room += _takes(*self._kept.popitem(last=False))


def _takes(segment: str, tokens: "array[int]") -> int:
    """Return how many bytes keeping a segment takes at most, the same at any time."""
    char_bytes = 1 if segment.isascii() else CHAR_BYTES
    return ENTRY_BYTES + len(segment) * char_bytes + len(tokens) * tokens.itemsize


def _reads_segments_alone(config: dict[str, Any]) -> bool:
    """Say whether a tokenizer reads each segment as if there were no other, and the same at any time."""
    if config["truncation"] or config["padding"] or config["model"].get("dropout"):
        return False
    for part in parts_of(config["pre_tokenizer"]):
        if part["type"] not in _WITHIN_A_SEGMENT or part.get("prepend_scheme") == "first":
            return False
    for part in parts_of(config["post_processor"]):
        texts = sum("Sequence" in one for one in part.get("single", ()))  # of a template
        if part["type"] not in _AROUND_ALL or (part["type"] == "TemplateProcessing" and texts != 1):
            return False
    return True


def _longest_of(words: Collection[str]) -> str:
    """Return the regular expression of the longest of these words: a tree, because thousands of branches would all be tried
    at every `<` of a text."""
    ends = "" in words
    rests: dict[str, list[str]] = {}
    for word in words:
        if word:
            rests.setdefault(word[0], []).append(word[1:])
    branches = [re.escape(char) + _longest_of(rest) for char, rest in rests.items()]
    if len(branches) == 1 and not ends:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if ends else ''}" if branches else ""
