"""Where does a worker take KV caches in, and how much of one is copied at once?"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from events.fleet_key import FleetKey
from workers.kv_transfer.ledger import ReservationPolicy
from workers.kv_transfer.receiver import ROOT
from workers.kv_transfer.transport import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMoveSettings:
    """How one worker moves KV caches, out and in."""

    host: str = "127.0.0.1"  # to listen on
    advertise: str = ""  # where sources are told to come; empty: the same
    root: Path = ROOT  # where the regions are
    policy: ReservationPolicy | None = None  # None: the receiver's own
    piece_bytes: int = 16 << 20  # copied out of an engine at once, for each shard
    take_bytes: int = 64 << 20  # copied into an engine at once, for each shard
    key: FleetKey | None = None  # the fleet's: both ends of a transfer prove that they know it
    transport: Callable[[], Transport] | None = (
        None  # makes a way besides shared memory and sockets; may take seconds
    )
