"""Computes each worker's usable share of its capacity, and its `BudgetRank` for the ejection budget."""

from collections.abc import Mapping, Sequence

from controller.deciders.budget import BudgetRank
from controller.deciders.fold import changed_since
from controller.deciders.worker import Worker
from events.decisions import HealthStatus
from events.observations import Profile

PROFILES_MAX = 1024  # distinct profiles kept for deduplication


class Shares:
    """Caches the workers' capacity shares and budget ranks, and recomputes them only for changed workers."""

    def __init__(self) -> None:
        self._workers: Mapping[str, Worker] = {}
        self._profiles: dict[Profile, Profile] = {}  # one object for all equal profiles
        self._places: dict[str, tuple[str, int]] = {}  # each worker's model and its index in its lists
        self._of: dict[str, list[tuple[Profile, float]]] = {}  # by model, in order of the workers' names
        self._ranks: dict[str, list[BudgetRank]] = {}  # by model, in order of the workers' names
        self._unranked: set[str] = set()  # workers with an outdated rank
        self._spares: set[str] = set()

    def of(self, workers: Mapping[str, Worker]) -> Mapping[str, list[tuple[Profile, float]]]:
        """Return, by model, each worker's profile and the share (0 to 1) of its capacity that it could carry.

        The workers of a model are sorted by name.
        """
        self._refresh(workers)
        return self._of

    def any_spare(self, workers: Mapping[str, Worker]) -> bool:
        """Return whether any worker is a spare without traffic."""
        self._refresh(workers)
        return bool(self._spares)

    def ranks(self, model: str, workers: Mapping[str, Worker]) -> list[BudgetRank]:
        """Return a `BudgetRank` for each worker of a model, sorted by the workers' names."""
        self._refresh(workers)
        for name in self._unranked:
            of, place = self._places[name]
            self._ranks[of][place] = standing(workers[name])
        self._unranked.clear()
        return [*self._ranks[model]]

    def _refresh(self, workers: Mapping[str, Worker]) -> None:
        before, self._workers = self._workers, workers
        if workers is before:
            return
        changed = changed_since(before, workers)
        places = self._places
        stay = all(name in places and places[name][0] == workers[name].joined.model for name in changed)
        if len(workers) != len(before) or not stay:
            self._rebuild(before, workers)
        self._unranked.update(changed)
        for name in changed:
            worker, (model, place) = workers[name], self._places[name]
            (self._spares.add if worker.spare.kept else self._spares.discard)(name)
            if (share := self._share(worker)) != self._of[model][place]:
                self._of[model] = [*self._of[model]]
                self._of[model][place] = share

    def _rebuild(self, before: Mapping[str, Worker], workers: Mapping[str, Worker]) -> None:
        """Assign new list indexes to all workers after workers have joined, left or changed their model."""
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
    """Return, by model, each worker's profile and the share (0 to 1) of its capacity that it could carry.

    This is `Shares.of` without a cache. Equal profiles are not replaced by one shared object, because this would cost more
    than it saves in a single use.
    """
    found: dict[str, list[tuple[Profile, float]]] = {}
    for name in sorted(workers):
        joined, carries = workers[name].joined, workers[name].carries
        found.setdefault(joined.model, []).append((joined.profile, carries))
    return found


def provisioned(workers: Mapping[str, Worker], model: str) -> Sequence[tuple[Profile, float]]:
    """Return the profiles of a model's workers that serve or should serve, each with the share 1.

    The workers are sorted by name.
    """
    mine = (workers[name] for name in sorted(workers))
    return [
        (worker.joined.profile, 1.0) for worker in mine if worker.joined.model == model and worker.expected
    ]


def standing(worker: Worker) -> BudgetRank:
    """Return the properties of a worker that the ejection budget uses.

    Workers are compared by `badness`: first by whether they are UNHEALTHY, then by the number of failed trials, then by the
    number of failed canaries.
    """
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
