"""The deciders' interface to the runtime: the fleet, which combines the state machines of all workers.

    fold.py           Fleet, evolve     what one recorded fact changes in the fleet
    settle.py         settle, SettleCache    the due decisions of all state machines; a cache for frequent calls
    shares.py         Shares            the share of its capacity that each worker carries
    worker.py         Worker            one worker with its state machines and its weight
    policy.py         FleetPolicy       all settings

Only these modules import the state machines (health, breaker, drain, budget, golden, degradation, incident, forgetting,
spares). The state machines do not depend on one another.
"""

from controller.deciders.fold import AwaitedWorker, Fleet, changed_since, evolve
from controller.deciders.policy import OLDEST, FleetPolicy, dump, load
from controller.deciders.settle import (
    ABSORB_AFTER,
    ABSORB_FACTS_MAX,
    DECIDERS_VERSION,
    SettleCache,
    absorbed,
    absorption_due,
    in_force,
    next_due,
    settle,
    settled,
)
from controller.deciders.shares import Shares
from controller.deciders.worker import Conviction, LastCanary, Worker

__all__ = [
    "ABSORB_AFTER",
    "ABSORB_FACTS_MAX",
    "DECIDERS_VERSION",
    "OLDEST",
    "AwaitedWorker",
    "Conviction",
    "Fleet",
    "FleetPolicy",
    "LastCanary",
    "SettleCache",
    "Shares",
    "Worker",
    "absorbed",
    "absorption_due",
    "changed_since",
    "dump",
    "evolve",
    "in_force",
    "load",
    "next_due",
    "settle",
    "settled",
]
