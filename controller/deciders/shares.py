"""The share of its capacity that each worker carries, and its rank in the ejection budget, by model."""

from collections.abc import Mapping, Sequence

from controller.deciders.budget import BudgetRank
from controller.deciders.fold import changed_since
from controller.deciders.worker import Worker
from events.decisions import HealthStatus
from events.observations import Profile

PROFILES_MAX = 1024  # that are told apart quickly


class Shares:
    """What the machines that look at many workers want of each: reckoned again only for those that have changed since."""

    def __init__(self) -> None:
        self._workers: Mapping[str, Worker] = {}
        self._profiles: dict[Profile, Profile] = {}  # one object for all that are equal
        self._places: dict[str, tuple[str, int]] = {}  # of each worker, its model and its place there
        self._of: dict[str, list[tuple[Profile, float]]] = {}  # by model, by the workers' names
        self._ranks: dict[str, list[BudgetRank]] = {}  # by model, by the workers' names
        self._unranked: set[str] = set()  # whose rank may be another now
        self._spares: set[str] = set()

    def of(self, workers: Mapping[str, Worker]) -> Mapping[str, list[tuple[Profile, float]]]:
        """Return, by model, each worker's profile and the share of it that it could carry, by the workers' names."""
        self._look(workers)
        return self._of

    def any_spare(self, workers: Mapping[str, Worker]) -> bool:
        """Say whether any worker is kept back."""
        self._look(workers)
        return bool(self._spares)

    def ranks(self, model: str, workers: Mapping[str, Worker]) -> list[BudgetRank]:
        """Return how a model's workers stand in the ejection budget, by their names."""
        self._look(workers)
        for name in self._unranked:
            of, place = self._places[name]
            self._ranks[of][place] = standing(workers[name])
        self._unranked.clear()
        return [*self._ranks[model]]

    def _look(self, workers: Mapping[str, Worker]) -> None:
        before, self._workers = self._workers, workers
        if workers is before:
            return
        changed = changed_since(before, workers)
        places = self._places
        stay = all(name in places and places[name][0] == workers[name].joined.model for name in changed)
        if len(workers) != len(before) or not stay:
            self._anew(before, workers)
        self._unranked.update(changed)
        for name in changed:
            worker, (model, place) = workers[name], self._places[name]
            (self._spares.add if worker.spare.kept else self._spares.discard)(name)
            if (share := self._share(worker)) != self._of[model][place]:
                self._of[model] = [*self._of[model]]
                self._of[model][place] = share

    def _anew(self, before: Mapping[str, Worker], workers: Mapping[str, Worker]) -> None:
        """Workers have come or gone: give each its place."""
        known = {
            name: (self._of[model][place], self._ranks[model][place])
            for name, (model, place) in self._places.items()
        }
        self._of, self._places, self._ranks = {}, {}, {}
        for name in sorted(workers):
            worker = workers[name]
            model = worker.joined.model
            shares, ranks = self._of.setdefault(model, []), self._ranks.setdefault(model, [])
            self._places[name] = (model, len(shares))
            same = before.get(name) is worker
            share, rank = known[name] if same else (self._share(worker), standing(worker))
            shares.append(share)
            ranks.append(rank)
        self._spares &= workers.keys()
        self._unranked &= workers.keys()

    def _share(self, worker: Worker) -> tuple[Profile, float]:
        profile = worker.joined.profile
        if len(self._profiles) >= PROFILES_MAX:
            self._profiles.clear()
        return self._profiles.setdefault(profile, profile), worker.carries


def weighted(workers: Mapping[str, Worker]) -> Mapping[str, list[tuple[Profile, float]]]:
    """Return, by model, what `Shares.of` does. To tell profiles apart would cost more than it saves for one settle."""
    found: dict[str, list[tuple[Profile, float]]] = {}
    for name in sorted(workers):
        joined, carries = workers[name].joined, workers[name].carries
        found.setdefault(joined.model, []).append((joined.profile, carries))
    return found


def provisioned(workers: Mapping[str, Worker], model: str) -> Sequence[tuple[Profile, float]]:
    """Return the profile of each of a model's workers that serve or should serve, at full weight, by the workers' names."""
    mine = (workers[name] for name in sorted(workers))
    return [
        (worker.joined.profile, 1.0) for worker in mine if worker.joined.model == model and worker.expected
    ]


def standing(worker: Worker) -> BudgetRank:
    """Return how a worker stands in the budget: the least bad has failed the fewest trials."""
    unhealthy = worker.health.status is HealthStatus.UNHEALTHY
    trials = max(worker.health.trials.failed, worker.breaker.trials_failed)
    cause = worker.health.cause if unhealthy else worker.breaker.cause
    badness = (unhealthy, trials, worker.health.canaries.failures)
    return BudgetRank(
        worker.budget,
        worker.in_doubt,
        worker.counts,
        badness,
        cause,
        serves=worker.natural_weight > 0.0,
        suspect=worker.suspect,
        limit=worker.health.limit,
        moved_by=worker.health.moved_by,
    )
