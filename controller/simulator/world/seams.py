"""The functions and rules that a test can replace to plant a fault, without monkeypatching.

By default, the fold, the deciders and the order are those of production. The other fields are rules of the simulated servers
and processes.
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
    """Return the decisions of an accepted append that are stored, which are all of them."""
    return batch


def gives_up(fact: Observation) -> bool:
    """Return whether a fact that was not acknowledged in time is dropped, which is never the case."""
    return False


def snapshot(order: Order[fleet.Fleet]) -> Stored:
    """Return what the state store keeps: the settled fold, its position, and each source's last settled fact."""
    return order.settled, order.position, dict(order.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """The replaceable functions and rules. Each default is correct, and a planted fault replaces one of them."""

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
