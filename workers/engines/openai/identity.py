"""Derives an engine's identity from the upstream's answers and the worker's settings."""

import hashlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from yarl import URL

from events.observations import Profile
from workers.engines.engine import EngineIdentity
from workers.engines.openai.capabilities import Abilities
from workers.engines.openai.upstream_health import MAX_S, SILENT_S
from workers.engines.openai.upstream_reports import AccountTimes, UpstreamAccount

CONTEXT_TOKENS = 4096  # if the upstream does not report it
MOST_TOKENS = 1 << 31
BLOCK_TOKENS = 16  # if the upstream does not report it
PREFILL_TOKENS_PER_S = 5000.0  # an estimate for the profile; never corrected by measurements
BATCH_SLOWDOWN = 2.0  # an estimate: time per token of a full batch, as a multiple of a single stream's

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamSettings:
    """The server's address, settings that replace or supplement its own reports, and limits."""

    url: str
    key: str = ""
    key_file: Path | None = None  # file with the API key, if `key` is empty
    tokenizer: str = ""
    revision: str = "unknown"
    context_tokens: int | None = None
    block_tokens: int | None = None  # None, here and below: as the upstream reports
    kv_blocks: int | None = None
    kv_events: Sequence[str] = ()  # endpoints on which the upstream's DP ranks publish and replay KV events
    kv_replays: Sequence[str] = ()
    batch_max: int = 64
    waiting_max: int = 256
    start_s: float = 1800.0  # a real server loads weights first
    retry_after_max_s: float = MAX_S  # the longest time for which a `Retry-After` closes the worker
    # seconds without a token or an answer to a health check after which the upstream is dead
    silent_s: float = SILENT_S
    handle_s: float = 1.0  # for one step, most of it cached
    times: AccountTimes = field(default_factory=AccountTimes)


def identify(
    settings: UpstreamSettings, known: Abilities, account: UpstreamAccount | None = None
) -> EngineIdentity:
    """Return the identity of a server with these abilities and, if it has sent any yet, its own reports."""
    said = known.context_tokens
    context = min(settings.context_tokens or said or CONTEXT_TOKENS, said or MOST_TOKENS)
    block_tokens = _block_tokens(settings.block_tokens, account)
    reported = None if account is None else account.kv_blocks
    blocks = settings.kv_blocks or reported or -(-context * settings.batch_max // block_tokens)
    return EngineIdentity(
        model=known.model,
        revision=settings.revision,
        tokenizer=settings.tokenizer,
        engine="openai",
        engine_version=known.version,
        dtype="unknown",
        tp=1,
        device="upstream",
        context_tokens=context,
        exact=known.exact,
        root=known.root,
        also_served=known.also_served,
        generation_config=config_digest(Path(settings.tokenizer)) if settings.tokenizer else "",
        profile=Profile(
            kv_blocks=blocks,
            block_tokens=block_tokens,
            max_batch=settings.batch_max,
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
            tpot_ms=((1, known.token_ms), (max(2, settings.batch_max), known.token_ms * BATCH_SLOWDOWN)),
        ),
        dp=known.ranks,
        waiting_max=settings.waiting_max,
        server=server_address(settings.url),
        lineage=known.lineage,
    )


def config_digest(folder: Path) -> str:
    """Return a digest of the `generation_config.json` in a model's folder; empty if there is none."""
    try:
        return hashlib.sha256((folder / "generation_config.json").read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def server_address(url: str) -> str:
    """Return a server's host and port. A loopback address becomes this host's name, which no other host shares."""
    parsed = URL(url)
    host = parsed.host or ""
    local = host == "localhost" or host.startswith("127.") or host in ("::1", "0.0.0.0", "::")
    return f"{socket.gethostname() if local else host}:{parsed.port}"


def _block_tokens(given: int | None, account: UpstreamAccount | None) -> int:
    """Return the number of tokens of a block: as configured, or as the upstream reports.

    If the two values differ and the upstream's KV events name blocks, the upstream's value is used.
    """
    said = None if account is None else account.block_tokens
    if account is not None and account.announces and said is not None and given not in (None, said):
        log.warning("block_tokens_differ", configured=given, upstream=said, advice="leave block_tokens out")
        return said
    return given or said or BLOCK_TOKENS
