"""LoRA adapters in the endpoint table: the workers behind an adapter's name, and changes of them."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from fleet_story import joined

from controller.deciders.fleet import Fleet, evolve
from controller.router.endpoints import EndpointTable, Lineage, adapters_of
from events.decisions import HealthChanged, HealthStatus
from events.fact import Fact, Recorded
from events.intrusion.registration import NAME_MAX, NAMES_MAX
from events.observations import AdaptersChanged, WorkerJoined, WorkerLeft

AT = datetime(2026, 1, 1, tzinfo=UTC)


class TableOfFacts:
    """An endpoint table that is fed with facts."""

    def __init__(self, *facts: Fact) -> None:
        self.fleet = Fleet()
        self.table = EndpointTable()
        self.seq = 0
        self.tell(*facts)

    def tell(self, *facts: Fact) -> None:
        for fact in facts:
            self.seq += 1
            self.fleet = evolve(self.fleet, Recorded(self.seq, AT, fact, f"e{self.seq}"))
        self.change = self.table.absorb(self.fleet)

    def of(self, served: str) -> list[str]:
        """Return the names of the workers behind a name."""
        return [endpoint.worker for endpoint in self.table.serving(served)]


def worker(name: str, *adapters: str, model: str = "m") -> WorkerJoined:
    return replace(joined(name), model=model, adapters=adapters)


def changed(name: str, *adapters: str, instance: str = "") -> AdaptersChanged:
    return AdaptersChanged(worker=name, instance=instance or joined(name).instance, adapters=adapters)


def healthy(name: str) -> HealthChanged:
    return HealthChanged(
        worker=name, instance=joined(name).instance, before=HealthStatus.SUSPICIOUS, after=HealthStatus.HEALTHY,
        reason="r", weight=1.0, decided_at=AT,
    )  # fmt: skip


def lineage_of(told: TableOfFacts) -> Lineage:
    return next(iter(told.table.endpoints.values())).lineage


def test_an_adapter_stands_for_the_workers_that_registered_it() -> None:
    told = TableOfFacts(worker("w1", "sql"), worker("w2"), worker("w3", "sql", "legal"))
    assert (told.of("m"), told.of("sql"), told.of("legal")) == (["w1", "w2", "w3"], ["w1", "w3"], ["w3"])
    assert told.of("unknown") == []
    assert (told.table.model_of("sql"), told.table.adapter_of("sql")) == ("m", "sql")
    assert (told.table.model_of("m"), told.table.adapter_of("m")) == ("m", "")


def test_a_change_replaces_the_list_and_is_announced() -> None:
    told = TableOfFacts(worker("w1", "sql"), worker("w2"))
    lineage = lineage_of(told)
    assert told.table.group("sql", lineage) is not None
    told.tell(changed("w1"), changed("w2", "legal"))
    assert told.change.adapters and told.change
    assert (told.of("sql"), told.of("legal")) == ([], ["w2"])
    assert told.table.group("sql", lineage) is None, "groups of the old list must not stay"
    told.tell(changed("w2", "legal"))
    assert not told.change


def test_only_the_current_instance_changes_the_list() -> None:
    told = TableOfFacts(worker("w1", "sql"), changed("w1", "legal", instance="an-older-one"))
    assert (told.of("sql"), told.of("legal")) == (["w1"], [])


def test_a_worker_that_leaves_takes_its_adapters_along() -> None:
    told = TableOfFacts(worker("w1", "sql"), worker("w2", "sql"), healthy("w1"))
    assert told.table.served_adapters == ["sql"]
    dead = HealthChanged(
        worker="w1", instance=joined("w1").instance, before=HealthStatus.HEALTHY, after=HealthStatus.DEAD,
        reason="r", weight=0.0, decided_at=AT,
    )  # fmt: skip
    told.tell(WorkerLeft(worker="w1", instance=joined("w1").instance, mode="graceful"), dead)
    assert told.of("sql") == ["w2"]
    assert told.table.served_adapters == [], "w2 is not in service yet"


@pytest.mark.parametrize("names", [[f"a{n}" for n in range(NAMES_MAX + 1)], ["x" * (NAME_MAX + 1)]])
def test_a_list_that_no_server_has_is_ignored(names: list[str]) -> None:
    told = TableOfFacts(worker("w1", "sql"), changed("w1", *names))
    assert told.fleet.workers["w1"].joined.adapters == ("sql",)
    assert TableOfFacts(worker("w2", *names)).fleet.workers == {}


def test_models_have_precedence_and_an_adapter_has_one_model() -> None:
    told = TableOfFacts(
        worker("w1", "m2", "sql"), worker("w2", "sql", model="m2"), worker("w3", "sql", model="m2")
    )
    assert (told.of("m2"), told.of("sql")) == (["w2", "w3"], ["w2", "w3"])
    assert told.table.model_of("sql") == "m2"
    told.tell(changed("w3"))
    assert told.table.model_of("sql") == "m", "of two models with equally many workers, the first by name"


def test_a_fixed_list_of_workers_can_have_adapters() -> None:
    table = EndpointTable()
    table.set_static([worker("w1", "sql"), worker("w2")])
    assert [endpoint.worker for endpoint in table.serving("sql")] == ["w1"]


def test_without_adapters_nothing_is_indexed() -> None:
    told = TableOfFacts(worker("w1"), worker("w2"))
    assert adapters_of(told.table.endpoints.values(), told.table.models) == {}
