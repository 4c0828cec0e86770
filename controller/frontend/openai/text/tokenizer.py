"""The tokenizer of a model: encoding, decoding, sampling defaults, and the folders that may be loaded."""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import structlog
from tokenizers import Tokenizer

from controller.frontend.openai.text.chat_templates import ChatTemplate, load_template, special_names
from controller.frontend.openai.text.detokenizer import (
    ByteDetokenizer,
    ByteTable,
    Detokenizer,
    StreamDetokenizer,
)
from controller.frontend.openai.text.long_texts import LongTexts
from controller.frontend.openai.text.segment_cache import TEXT_MAX, SegmentCache
from controller.frontend.openai.text.token_count_bound import reach_of
from events.broker_users import account_of
from events.errors import HoldfastError
from events.grammar.utf8 import unfinished
from events.observations import IntrusionRefused, WorkerJoined
from events.token_bytes import BUILTIN_FILE, BYTE_TOKEN

BUILTIN = "builtin:sim"
BUILTIN_END = "</s>"  # the token that ends an answer of the simulated engine
# A batch of one text cannot be split among threads, so parallelism would only move the text to another thread.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
MARK = "\0"  # a character that does not merge with the following text
REMEMBERED_MAX = 4096  # number of folders, and of workers with a refused folder, that are remembered
DEFAULTS_FILE = "generation_config.json"
DEFAULTS_BYTES_MAX = 1024 * 1024
# the same bounds as for the fields of a request's body
DEFAULTS_BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-9, 1.0),
    "top_k": (-1.0, 2.0**31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-9, 10.0),
}

log = structlog.get_logger(__name__)


class TokenizerMissing(HoldfastError):
    """The model's tokenizer cannot be loaded. It must be a folder with tokenizer.json in it, or builtin:sim."""


class Tokens:
    """The tokenizer, chat template and sampling defaults of one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        defaults: Mapping[str, float] | None = None,
        ends: Collection[str] = (),
    ) -> None:
        """Wrap a tokenizer that is already loaded. `ends` are the names of the tokens that end an answer."""
        self.defaults = defaults or {}
        added = tokenizer.get_added_tokens_decoder()
        self.special = {  # the names of the special tokens that a text may show
            token: one.content for token, one in added.items() if one.special and one.content not in ends
        }
        self._tokenizer = tokenizer
        self.template = template
        self.size = ids_of(tokenizer)
        config = json.loads(tokenizer.to_str())
        byte_level = (config.get("decoder") or {}).get("type") == "ByteLevel"
        self.table = ByteTable(tokenizer, self.size) if byte_level else None
        # None if texts must always be tokenized whole
        self.segments = SegmentCache.of(tokenizer, config)
        self._reach = reach_of(tokenizer, config)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of `text`.

        If `special` is true, include the tokens that the tokenizer adds around a plain prompt.
        """
        # Only the batch methods can skip token offsets, which take a fifth of the time and are not needed, and release the GIL.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def encode_next(self, text: str) -> list[int]:
        """Return the tokens of a text that follows another text, without the leading space that some tokenizers add."""
        before, whole = self.encode(MARK, special=False), self.encode(MARK + text, special=False)
        if whole[: len(before)] == before:
            return whole[len(before) :]
        return self.encode(text, special=False)

    def word_tokens(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token sequences that spell these words at the beginning of a text or after a space, as vLLM's.

        The form after a space is left out if it begins with the same token as the other one, or has another length. A
        word that the tokenizer removes has no sequence.
        """
        found: list[list[int]] = []
        for word in (word.lstrip() for word in words):
            begun, spaced = self.encode(word, special=False), self.encode(f" {word}", special=False)
            if begun:
                found.append(begun)
            if begun and len(spaced) == len(begun) and spaced[0] != begun[0]:
                found.append(spaced)
        return found

    def tokens_min(self, text: str, enough: int) -> int:
        """Return a lower bound of the number of tokens of a text, computed from the text's length.

        The bound is computed only as far as needed to decide whether it exceeds `enough`. The result is 0 if the
        tokenizer has no bound.
        """
        return 0 if self._reach is None else self._reach.tokens_min(text, enough)

    async def encode_soon(
        self, text: str, threads: LongTexts, *, special: bool, shared: bool = True
    ) -> list[int]:
        """Return the tokens of `text`. A long text is tokenized in `threads`, so that the event loop is not blocked.

        `shared` permits the use of cached segments of earlier texts, and the caching of this text's segments.
        """
        segments = self.segments
        if shared and segments is not None and (segments.bare or not special) and len(text) < TEXT_MAX:
            return await segments.read(text, threads)
        return await threads.read(len(text), partial(self.encode, text, special=special))

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one answer."""
        return ByteDetokenizer(self.table) if self.table is not None else StreamDetokenizer(self._tokenizer)

    def text_of(self, token: int) -> str:
        """Return the text of a single token, as shown in logprobs."""
        if self.table is not None:
            return self.bytes_of(token).decode("utf-8", "replace")
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a single token. For a special token, return its name as bytes."""
        if self.table is not None and 0 <= token < len(self.table) and self.table.bytes[token]:
            return self.table.bytes[token]
        return (self._tokenizer.id_to_token(token) or "").encode()

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of `tokens`, decoded by the tokenizer in one call. All detokenizers must return the same text.

        If `special` is true, special tokens are shown by their names.
        """
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def whole_characters(self, tokens: Sequence[int]) -> int:
        """Return how many tokens are left if the tokens of an incomplete last character are removed."""
        count = len(tokens)
        while count and unfinished(b"".join(map(self._part_of, tokens[max(0, count - 4) : count]))):
            count -= 1
        return count

    def _part_of(self, token: int) -> bytes:
        """Return the bytes of a token, or a space if the token cannot be a part of a character.

        The caller searches only for incomplete characters, so a space can replace any complete text.
        """
        if self.table is not None:
            return self.table.bytes[token]
        found = BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token) or "")
        return bytes.fromhex(found[1]) if found else b" "

    def answer_text(self, prompt: Sequence[int], accepted: Sequence[int]) -> str:
        """Return the text of an answer, to which the answer's constraint applies.

        `accepted` are the answer's tokens. An incomplete character at their end becomes U+FFFD. In some vocabularies,
        the text also depends on the prompt's tokens, which precede the answer's.
        """
        if self.table is not None:
            return b"".join(map(self.table.bytes.__getitem__, accepted)).decode("utf-8", "replace")
        before, whole = self.decode(prompt), self.decode([*prompt, *accepted])
        return whole[len(before) :] if whole.startswith(before) else self.decode(accepted)

    def names_of(self, tokens: Sequence[int]) -> list[str]:
        """Return the vocabulary's name of each of these tokens."""
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]


async def ready_tokens(name: str) -> Tokens:
    """Return the tokenizer with this name. If it is not loaded yet, load it in a thread, because loading may take seconds.

    Raise TokenizerMissing if the tokenizer cannot be loaded.
    """
    return _loaded[name] if name in _loaded else await asyncio.to_thread(load_tokens, name)


def load_tokens(name: str) -> Tokens:
    """Return the tokenizer of a folder, or of "builtin:sim", with its chat template.

    Raise TokenizerMissing if the tokenizer cannot be loaded. Only one thread loads at a time, because parallel loads
    would starve the event loop.
    """
    if name not in _loaded:
        with _reading:
            if name not in _loaded:
                folder = None if name == BUILTIN else Path(name)
                tokenizer, template = load_tokenizer(name), load_template(folder)
                ends = read_ends(tokenizer, folder)
                _loaded[name] = Tokens(tokenizer, template, read_defaults(folder), ends)
    return _loaded[name]


def load_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer without its chat template. `name` is a folder, or "builtin:sim".

    Raise TokenizerMissing if the tokenizer cannot be loaded.
    """
    file = BUILTIN_FILE if name == BUILTIN else Path(name) / "tokenizer.json"
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises a bare Exception
        raise TokenizerMissing(f"{name!r}: {error}. {TokenizerMissing.__doc__}") from error


_loaded: dict[str, Tokens] = {}
_reading = threading.Lock()


def ids_of(tokenizer: Tokenizer) -> int:
    """Return the highest token id plus one. This can exceed the vocabulary's size, because vocabularies may have gaps."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def read_defaults(folder: Path | None) -> dict[str, float]:
    """Return a model's sampling defaults from `generation_config.json` in its folder, as vLLM reads this file.

    Return {} without that file. Values out of range are left out.
    """
    given = _generation_config(folder)
    found: dict[str, float] = {}
    for name, (least, most) in DEFAULTS_BOUNDS.items():
        value = given.get(name)
        if value is None:
            continue
        if type(value) not in (int, float) or not least <= value <= most:  # nan is never between them
            log.warning("generation_config_ignored", folder=str(folder), field=name, value=str(value)[:40])
            continue
        found[name] = max(0, int(value)) if name == "top_k" else float(value)
    return found


def read_ends(tokenizer: Tokenizer, folder: Path | None) -> set[str]:
    """Return the names of the tokens that end an answer: those of `generation_config.json`, and the tokenizer's own."""
    if folder is None:
        return {BUILTIN_END}
    given = _generation_config(folder).get("eos_token_id")
    numbers = given if isinstance(given, list) else [given]
    names = {tokenizer.id_to_token(one) for one in numbers if type(one) is int and 0 <= one < 2**32}
    return {name for name in (*names, special_names(folder).get("eos_token")) if name}


def _generation_config(folder: Path | None) -> dict[str, Any]:
    """Return the content of `generation_config.json` in a model's folder; {} without that file."""
    if folder is None:
        return {}
    try:
        with (folder / DEFAULTS_FILE).open("rb") as file:
            given = json.loads(file.read(DEFAULTS_BYTES_MAX))
    except OSError:
        return {}
    except ValueError as error:
        log.warning("generation_config_unreadable", folder=str(folder), error=str(error))
        return {}
    return given if isinstance(given, dict) else {}


class ModelFolders:
    """Decides from which folders tokenizers and chat templates may be loaded.

    A worker registers the folder of its model. A chat template is a program, so a frontend loads only templates from
    folders that the operator has configured (`--model-folders`). Workers that register another folder are reported.
    """

    def __init__(self, folders: Iterable[str], observe: Callable[[IntrusionRefused], object]) -> None:
        self._folders = [Path(folder).resolve() for folder in folders]
        self._observe = observe
        self._configured = lru_cache(REMEMBERED_MAX)(self._is_configured)
        self._refused: set[tuple[str, str]] = set()

    def allows(self, joined: WorkerJoined) -> bool:
        """Return whether this worker's tokenizer may be loaded. A refusal is logged and reported once per worker instance."""
        name = joined.tokenizer
        if name == BUILTIN or self._configured(name):
            return True
        life = (joined.worker, joined.instance)
        if life not in self._refused and len(self._refused) < REMEMBERED_MAX:
            self._refused.add(life)
            log.warning(
                "model_folder_refused",
                worker=joined.worker,
                folder=name,
                hint="to allow it, start frontends with --model-folders and this folder",
            )
            tried = f"make a frontend load the model folder {name[:200]!r}, which is not configured (--model-folders)"
            account = account_of(joined.worker, joined.account)
            self._observe(IntrusionRefused(who=account, tried=tried, times=1, worker=joined.worker))
        return False

    def _is_configured(self, name: str) -> bool:
        return any(Path(name).resolve().is_relative_to(folder) for folder in self._folders)
