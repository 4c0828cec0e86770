"""Derives an engine's identity from the upstream's answers and the worker's settings."""

import hashlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from yarl import URL

from events.observations import Profile
from workers.config.upstream_route import UpstreamRoute
from workers.engines.engine import EngineIdentity
from workers.engines.openai.capabilities import Abilities
from workers.engines.openai.upstream_health import MAX_S, SILENT_S
from workers.engines.openai.upstream_reports import AccountTimes, UpstreamAccount

CONTEXT_TOKENS = 4096  # used if neither the settings nor the upstream contain a context length
MOST_TOKENS = 1 << 31
BLOCK_TOKENS = 16  # used if neither the settings nor the upstream contain a block size
PREFILL_TOKENS_PER_S = 5000.0  # an estimate for the profile, which no measurement corrects
# an estimate of the time per token in a full batch, as a multiple of that of a single stream
BATCH_SLOWDOWN = 2.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamSettings:
    """The settings of the openai engine: the server's address, limits, and values that replace the server's own reports."""

    url: str
    key: str = ""
    key_file: Path | None = None  # file with the API key, if `key` is empty
    tokenizer: str = ""
    revision: str = "unknown"
    context_tokens: int | None = None
    block_tokens: int | None = None  # `None` for this field and the next one: use the upstream's report
    kv_blocks: int | None = None
    kv_events: Sequence[str] = ()  # endpoints on which the upstream's DP ranks publish and replay KV events
    kv_replays: Sequence[str] = ()
    batch_max: int = 64
    waiting_max: int = 256
    start_s: float = 1800.0  # longest wait for the server at the start; a real server loads weights first
    retry_after_max_s: float = MAX_S  # the longest time for which a `Retry-After` closes the worker
    # seconds without a token or an answer to a health check after which the upstream is dead
    silent_s: float = SILENT_S
    # time limit for a KV handle, which costs the server one step with a mostly cached prompt
    handle_s: float = 1.0
    times: AccountTimes = field(default_factory=AccountTimes)
    route: UpstreamRoute = field(default_factory=UpstreamRoute)
    weight: float = 1.0  # share of requests, compared with a worker of weight 1


def identify(
    settings: UpstreamSettings, known: Abilities, account: UpstreamAccount | None = None
) -> EngineIdentity:
    """Return the engine identity of a server.

    Args:
        settings: values that replace or limit what the server reports.
        known: the server's own identity, and the extensions of OpenAI's API that it supports.
        account: the reader of the server's metrics and KV events; None before it has read them.
    """
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
        paths=known.paths,
        adapters=known.adapters,
    )


def config_digest(folder: Path) -> str:
    """Return a digest (16 hex digits) of the `generation_config.json` in a model's folder; empty if there is no such file."""
    try:
        return hashlib.sha256((folder / "generation_config.json").read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def server_address(url: str) -> str:
    """Return the `host:port` of a server's URL.

    A loopback address is replaced by this host's name, so that servers on different hosts have different addresses.
    """
    parsed = URL(url)
    host = parsed.host or ""
    local = host == "localhost" or host.startswith("127.") or host in ("::1", "0.0.0.0", "::")
    return f"{socket.gethostname() if local else host}:{parsed.port}"


def _block_tokens(given: int | None, account: UpstreamAccount | None) -> int:
    """Return the number of tokens per block: the configured number `given`, else the upstream's report, else 16 (BLOCK_TOKENS).

    If the worker receives the upstream's KV events, the upstream's value is used even if another one is configured.
    """
    said = None if account is None else account.block_tokens
    if account is not None and account.announces and said is not None and given not in (None, said):
        log.warning("block_tokens_differ", configured=given, upstream=said, advice="leave block_tokens out")
        return said
    return given or said or BLOCK_TOKENS
