"""What does a worker say of itself when it joins the fleet?"""

import os
import socket
from typing import Any

from events.observations import Topology, WorkerJoined, canary_key
from workers.config.worker import WorkerConfig
from workers.engines.engine import Engine
from workers.migration.moves import layout


def registration(
    config: WorkerConfig, engine: Engine, url: str, gpus: tuple[str, ...], *, kv_events: bool
) -> WorkerJoined:
    """Return the fact by which all others know a worker, whose engine has started: where frontends reach it, what it serves and
    how fast, and what lies near it."""
    i = engine.identity
    kind: dict[str, Any] = {
        "model": i.model, "revision": i.revision, "tokenizer": i.tokenizer, "engine": i.engine,
        "engine_version": i.engine_version, "dtype": i.dtype, "tp": i.tp, "device": i.device,
        "lineage": i.lineage,
    }  # fmt: skip
    return WorkerJoined(
        worker=config.name,
        instance=config.instance,
        **kind,
        url=url,
        profile=i.profile,
        canary_key=canary_key(**kind),
        pid=os.getpid(),
        topology=Topology(
            host=socket.gethostname(),
            nvlink_domain=config.nvlink_domain,
            rail=config.rail,
            gpus=gpus,
        ),
        migration_limit=config.migration_limit,
        context_tokens=i.context_tokens,
        exact=i.exact,
        root=i.root,
        also_served=i.also_served,
        generation_config=i.generation_config,
        kv=layout(engine.kv),
        dp=i.dp,
        kv_events=kv_events,
        waiting_max=i.waiting_max,
        spare=config.spare,
        server=i.server,
        account=config.account,
    )
