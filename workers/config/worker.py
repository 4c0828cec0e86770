"""Where and as whom does one worker of a process serve?"""

from dataclasses import dataclass

from events.fleet_key import FleetKey


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Where and as whom a worker serves."""

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
    grace_s: float = 60.0  # for a graceful shutdown, cleanup not included
    graceful_shutdown: bool = True  # such a shutdown waits for streams that decode, too
    name_check_s: float = (
        0.0  # it listens so long for another worker of its name before it registers; 0: not at all
    )
    migration_limit: int | None = None
    spare: bool = False  # it begins as a spare of the fleet's
    account: str = ""  # broker user of this process; empty: the broker knows no users
    chaos: bool = True
    shares_process: bool = False  # with other workers: what ends this one must not end the process
    key: FleetKey | None = None  # the fleet's: who does not know it is not let in
    computes_on_gpus: bool = True  # itself, not only a server behind it: it ends with a GPU that dies
