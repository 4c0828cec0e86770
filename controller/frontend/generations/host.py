"""What does a generation need of the frontend that it is part of? The director has it."""

from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

from controller.frontend.errors import ApiError
from controller.frontend.generations.dispatcher import Dispatched, Dispatcher
from controller.frontend.generations.pending import PendingGenerations, Waiting
from controller.frontend.generations.reports import MigrationReports
from controller.frontend.health.exposure import Exposures
from controller.frontend.request.generation_request import GenerationRequest
from controller.frontend.request_metrics import RequestMetrics
from controller.frontend.settings import FrontendSettings
from controller.router.endpoints import Key
from controller.router.selection.filter import NoWorker


class Hosted(Waiting, Dispatched, Protocol):
    """What is sent, and waits: a generation."""


G = TypeVar("G", bound=Hosted)


class GenerationHost(Protocol[G]):
    """The parts of a frontend that its generations use."""

    @property
    def now(self) -> Callable[[], float]: ...
    @property
    def dispatcher(self) -> Dispatcher[G]: ...
    @property
    def pending(self) -> PendingGenerations[G]: ...
    @property
    def reports(self) -> MigrationReports: ...
    @property
    def exposures(self) -> Exposures: ...
    @property
    def request_metrics(self) -> RequestMetrics: ...
    @property
    def settings(self) -> FrontendSettings: ...

    def stands_in(self, request: GenerationRequest, without: Collection[Key]) -> bool:
        """Return whether a worker that canaries keep out of service, none of `without`, will serve this request in a moment."""
        ...

    def no_worker(self, error: NoWorker, request: GenerationRequest) -> ApiError:
        """Return what a client is told when nobody can take his request."""
        ...
