"""The functions and rules that a test can replace to plant a fault, without monkeypatching.

Some fields of `Seams` order the journal's events, fold the events into the fleet state, or decide. Their defaults are production
code. The other fields are rules of the simulated servers and processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from controller.deciders import fleet
from controller.frontend.admission.queue import Line
from controller.frontend.request import step
from controller.frontend.request.events import Event
from controller.frontend.request.state import RequestState
from controller.frontend.request.step import Next
from controller.planner.planner import Planner
from controller.ports import Snapshot
from controller.router.endpoints import EndpointTable
from events.fact import Decision, Observation, Recorded
from events.order import Order


def snapshot(order: Order[fleet.Fleet]) -> Snapshot:
    """Return the part of a process's fleet state that the state store keeps."""
    return Snapshot(order.settled, order.position, dict(order.sources))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """The replaceable functions and rules. Each default is correct. To plant a fault, a test replaces one default."""

    evolve: Callable[[fleet.Fleet, Recorded], fleet.Fleet] = fleet.evolve
    settle: Callable[..., tuple[Decision, ...]] = fleet.settle
    frontend_order: type[Order[fleet.Fleet]] = Order  # the order in which frontends fold
    fenced: bool = True  # an append is rejected if a decision was stored since the appender read
    proposals_fenced: bool = True  # the same for planners' proposals
    lands: Callable[[Sequence[Decision]], Sequence[Decision]] = tuple  # all decisions of an append are stored
    links_veto: bool = True  # a frontend's live connection keeps a worker from being reported silent
    gives_up: Callable[[Observation], bool] = lambda fact: False  # no unacknowledged fact is dropped
    snapshot: Callable[[Order[fleet.Fleet]], Snapshot] = snapshot
    table: Callable[[], EndpointTable] = EndpointTable
    planner: Callable[..., Planner] = Planner
    lines: type[Line] = Line
    step: Callable[[RequestState, Event, float], Next] = step.step
    leaves_late: bool = True  # a request leaves the queue when its timeout has passed
    wakes: bool = True  # queued requests are retried when a worker may have room
