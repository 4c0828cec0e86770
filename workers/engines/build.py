"""Builds a worker's engine from the worker's settings.

Each engine's module is imported only when that engine is used, because torch takes seconds to import, and aiohttp 0.2 s.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from workers.config.settings import WorkerSettings, non_null
from workers.config.settings_check import endpoints
from workers.config.upstream_route import LiveSettings, UpstreamRoute
from workers.engines.engine import Engine


@dataclass(frozen=True, slots=True)
class UpstreamEngine:
    """An openai engine with its limits, and the function that changes its settings while it runs."""

    engine: Engine
    adjust: Callable[[LiveSettings], None]


def build_engine(settings: WorkerSettings) -> Engine:
    """Return the engine for these settings, inside the wrappers that enforce the configured limits.

    The engine is not started yet. Raise HoldfastError if the engine cannot be built.
    """
    return _limited(_engine(settings), settings)


def build_upstream_engine(settings: WorkerSettings, route: UpstreamRoute, weight: float) -> UpstreamEngine:
    """Return the engine of one of many upstreams of a process, which can be adjusted while it runs.

    `weight` is its share of requests, compared with an upstream of weight 1.
    """
    inner = _openai(settings, route, weight)
    return replace(inner, engine=_limited(inner.engine, settings))


def _limited(engine: Engine, settings: WorkerSettings) -> Engine:
    if settings.adaptive_batch:
        from workers.engines.admission import AdaptiveEngine

        engine = AdaptiveEngine(engine)
    if settings.engine_request_limit is None:
        return engine
    from workers.engines.admission import LimitedEngine

    return LimitedEngine(engine, settings.engine_request_limit, settings.request_queue_limit)


def _engine(settings: WorkerSettings) -> Engine:
    match settings.engine:
        case "simulated":
            from workers.engines.simulated.build import build_simulated

            return build_simulated(settings)
        case "openai":
            return _openai(settings).engine
        case "transformers":
            return _transformers(settings)


def _openai(
    settings: WorkerSettings, route: UpstreamRoute | None = None, weight: float = 1.0
) -> UpstreamEngine:
    from workers.engines.openai.engine import OpenAIEngine
    from workers.engines.openai.identity import UpstreamSettings
    from workers.engines.openai.upstream_reports import AccountTimes

    found = non_null(settings, "context_tokens", "batch_max", "waiting_max", "kv_blocks", "block_tokens")
    engine = OpenAIEngine(
        UpstreamSettings(
            url=settings.upstream,
            key=settings.upstream_key,
            key_file=Path(settings.upstream_key_file) if settings.upstream_key_file else None,
            start_s=settings.ready_timeout,
            silent_s=settings.upstream_silent_s,
            retry_after_max_s=settings.upstream_retry_after_max_s,
            times=AccountTimes(identity_s=settings.upstream_identity_s),
            # an absolute path, because `up` and other workers identify the tokenizer by its absolute path
            tokenizer=str(Path(settings.model).resolve()),
            revision=settings.revision or "unknown",
            kv_events=endpoints(settings.upstream_kv_events),
            kv_replays=endpoints(settings.upstream_kv_replay),
            route=route or UpstreamRoute(),
            weight=weight,
            **found,
        )
    )
    return UpstreamEngine(engine, engine.adjust)


def _transformers(settings: WorkerSettings) -> Engine:
    from workers.engines.transformers.engine import TransformersEngine
    from workers.engines.transformers.settings import TransformersSettings

    found = non_null(
        settings,
        "device", "dtype", "threads", "context_tokens", "block_tokens", "batch_max", "waiting_max", "prefill_tokens_max",
        "prefix_caching",
    )  # fmt: skip
    return TransformersEngine(
        TransformersSettings(folder=Path(settings.model), load_s=settings.ready_timeout, **found)
    )
