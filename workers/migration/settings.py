"""Settings of KV moves: addresses, reservations, copy sizes and transport."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from events.fleet_key import FleetKey
from workers.kv_transfer.ledger import ReservationPolicy
from workers.kv_transfer.messages import Transport
from workers.kv_transfer.receiver import ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMoveSettings:
    """How one worker sends and receives KV caches."""

    host: str = "127.0.0.1"  # address to listen on
    advertise: str = ""  # address announced to sources; empty: the same as `host`
    root: Path = ROOT  # directory of the regions
    policy: ReservationPolicy | None = None  # None: the receiver's default
    piece_bytes: int = 16 << 20  # copied out of an engine at once, per shard
    take_bytes: int = 64 << 20  # copied into an engine at once, per shard
    key: FleetKey | None = None  # the fleet key: both ends of a transfer prove that they know it
    transport: Callable[[], Transport] | None = (
        None  # builds a transport besides shared memory and sockets; may take seconds
    )
