"""The fleet: combines all state machines, and is the deciders' interface to the runtime.

    fold.py           Fleet, evolve     what one recorded fact changes in the fleet
    settle.py         settle, SettleCache    the decisions due now, in the order of the state machines; cached if called often
    shares.py         Shares            what each worker carries of its model's capacity
    worker.py         Worker            one worker: its machines, its weight
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
