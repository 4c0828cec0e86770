"""The tokenizer of a model: encoding, decoding, sampling defaults, and the folders that may be loaded."""

import asyncio
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import structlog
from tokenizers import Tokenizer

from controller.frontend.openai.text.chat_templates import ChatTemplate, load_template
from controller.frontend.openai.text.detokenizer import (
    ByteDetokenizer,
    ByteTable,
    Detokenizer,
    StreamDetokenizer,
)
from controller.frontend.openai.text.long_texts import LongTexts
from controller.frontend.openai.text.segment_cache import KEPT_BYTES, TEXT_MAX, SegmentCache
from controller.frontend.openai.text.token_count_bound import reach_of
from events.broker_users import account_of
from events.errors import HoldfastError
from events.observations import IntrusionRefused, WorkerJoined

BUILTIN = "builtin:sim"
BUILTIN_FILE = Path(__file__).with_name("builtin_sim_tokenizer.json")
# A batch of one text cannot be split among threads, so parallelism would only move the text to another thread.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
MARK = "\0"  # a character that does not merge with the following text
REMEMBERED_MAX = 4096  # number of workers with a refused folder that are remembered
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
        kept_bytes: int = KEPT_BYTES,
        defaults: Mapping[str, float] | None = None,
    ) -> None:
        """Wrap a tokenizer that was loaded from its file. `kept_bytes` is the size of the cache of recent segments."""
        self.defaults = defaults or {}
        self._tokenizer = tokenizer
        self.template = template
        self.size = ids_of(tokenizer)
        config = json.loads(tokenizer.to_str())
        byte_level = (config.get("decoder") or {}).get("type") == "ByteLevel"
        self.table = ByteTable(tokenizer, self.size) if byte_level else None
        # None if texts must always be tokenized whole
        self.segments = SegmentCache.of(tokenizer, config, kept_bytes)
        self._reach = reach_of(tokenizer, config)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of `text`. With `special`, include the tokens that the tokenizer adds around a plain prompt."""
        # Only the batch methods can skip token offsets, which take a fifth of the time and are not needed, and release the GIL.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def encode_next(self, text: str) -> list[int]:
        """Return the tokens of a text that follows another text, without the leading space that some tokenizers add."""
        before, whole = self.encode(MARK, special=False), self.encode(MARK + text, special=False)
        if whole[: len(before)] == before:
            return whole[len(before) :]
        return self.encode(text, special=False)

    def tokens_min(self, text: str, enough: int) -> int:
        """Return a lower bound of the number of tokens of a text, exact enough to decide whether the text has more than
        `enough`.

        The bound is computed from the text's length. It is 0 if the tokenizer has no bound.
        """
        return 0 if self._reach is None else self._reach.tokens_min(text, enough)

    async def encode_soon(
        self, text: str, threads: LongTexts, *, special: bool, shared: bool = True
    ) -> list[int]:
        """Return the tokens of `text` without blocking the event loop, because `threads` tokenize long texts.

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
        """Return the text of `tokens`, decoded at once by the tokenizer. All detokenizers must return the same text.

        With `special`, special tokens are shown by their names.
        """
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def names_of(self, tokens: Sequence[int]) -> list[str]:
        """Return the name of each token in the vocabulary."""
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]


async def ready_tokens(name: str) -> Tokens:
    """Return the tokenizer with this name, loaded in a thread if necessary, because a large vocabulary takes seconds.

    Raise TokenizerMissing if the tokenizer cannot be loaded.
    """
    return _loaded[name] if name in _loaded else await asyncio.to_thread(load_tokens, name)


def load_tokens(name: str) -> Tokens:
    """Return the tokenizer of a folder, or of "builtin:sim", with its chat template.

    Raise TokenizerMissing if it cannot be loaded. Only one thread loads at a time, because parallel loads would
    starve the event loop.
    """
    if name not in _loaded:
        with _reading:
            if name not in _loaded:
                folder = None if name == BUILTIN else Path(name)
                tokenizer, template = load_tokenizer(name), load_template(folder)
                _loaded[name] = Tokens(tokenizer, template, defaults=read_defaults(folder))
    return _loaded[name]


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of `name` without the chat template. Raise TokenizerMissing if it cannot be loaded."""
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
    found: dict[str, float] = {}
    for name, (least, most) in DEFAULTS_BOUNDS.items():
        value = given.get(name) if isinstance(given, dict) else None
        if value is None:
            continue
        if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:
            log.warning("generation_config_ignored", folder=str(folder), field=name, value=str(value)[:40])
            continue
        found[name] = max(0, int(value)) if name == "top_k" else float(value)
    return found


class ModelFolders:
    """Decides from which folders tokenizers and chat templates may be loaded, and reports workers that register another
    folder.

    A worker registers the folder of its model. A chat template is a program, so a frontend loads only templates from
    folders that the operator has configured (`--model-folders`).
    """

    def __init__(self, folders: Iterable[str], observe: Callable[[IntrusionRefused], object]) -> None:
        self._folders = [Path(folder).resolve() for folder in folders]
        self._observe = observe
        self._allowed: dict[str, bool] = {BUILTIN: True}
        self._refused: set[tuple[str, str]] = set()

    def allows(self, joined: WorkerJoined) -> bool:
        """Return whether this worker's tokenizer may be loaded. A refusal is logged and reported once per worker instance."""
        name = joined.tokenizer
        if len(self._allowed) >= REMEMBERED_MAX:
            self._allowed = {BUILTIN: True}
        if name not in self._allowed:
            self._allowed[name] = any(Path(name).resolve().is_relative_to(folder) for folder in self._folders)
        if self._allowed[name]:
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
