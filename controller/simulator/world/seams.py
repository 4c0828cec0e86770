"""The replaceable pieces of the system, so that planted faults need no monkeypatching.

The defaults are production functions where production has one: the fold, the deciders, the order. The others are rules of
the simulated servers and processes.
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
from controller.router.endpoints import EndpointTable
from events.fact import Decision, Observation, Recorded
from events.order import Last, Order, Position

Stored = tuple[fleet.Fleet, Position, dict[str, Last]]  # the part of a fold that the state store keeps


def lands(batch: Sequence[Decision]) -> Sequence[Decision]:
    """Return the part of an accepted batch that is stored: all of it."""
    return batch


def gives_up(fact: Observation) -> bool:
    """Return whether a fact without an acknowledgement is dropped: never."""
    return False


def snapshot(order: Order[fleet.Fleet]) -> Stored:
    """Return the state store's contents: the settled fold, its position, and the sources as settled."""
    return order.settled, order.position, dict(order.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """One field per replaceable piece."""

    evolve: Callable[[fleet.Fleet, Recorded], fleet.Fleet] = fleet.evolve
    settle: Callable[..., tuple[Decision, ...]] = fleet.settle
    frontend_order: type[Order[fleet.Fleet]] = Order  # the order in which frontends fold
    fenced: bool = True  # an append is rejected if a decision was stored since the appender read
    proposals_fenced: bool = True  # the same for planners' proposals
    lands: Callable[[Sequence[Decision]], Sequence[Decision]] = lands
    links_veto: bool = True  # a frontend's live connection keeps a worker from being reported silent
    gives_up: Callable[[Observation], bool] = gives_up
    snapshot: Callable[[Order[fleet.Fleet]], Stored] = snapshot
    table: Callable[[], EndpointTable] = EndpointTable
    planner: Callable[..., Planner] = Planner
    lines: type[Line] = Line
    step: Callable[[RequestState, Event, float], Next] = step.step
    leaves_late: bool = True  # a request leaves the queue when its timeout has passed
    wakes: bool = True  # queued requests are retried when a worker may have room
