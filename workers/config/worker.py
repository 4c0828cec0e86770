"""The identity, address and limits of one worker of a process."""

from dataclasses import dataclass

from events.fleet_key import FleetKey


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Identity, address and limits of one worker."""

    name: str
    instance: str
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    nvlink_domain: str = ""
    rail: str = ""
    kv_transport: str = "sockets"
    connections_max: int = 512
    connections_per_address_max: int = 256
    grace_s: float = 60.0  # seconds for a graceful shutdown, without the cleanup
    graceful_shutdown: bool = True  # a graceful shutdown also waits for decoding streams
    name_check_s: float = 0.0  # seconds to listen for another worker of this name before registering; 0: off
    migration_limit: int | None = None
    spare: bool = False  # starts as a spare
    account: str = ""  # broker account of this process; empty: the broker has no accounts
    chaos: bool = True
    shares_process: bool = False  # with other workers: what ends this one must not end the process
    key: FleetKey | None = None  # the fleet key; connections that do not know it are refused
    computes_on_gpus: bool = True  # False: only a server behind it does. True: it ends with a GPU that dies
