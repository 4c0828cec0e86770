"""A report names the broker account of a worker's process, and that account is withdrawn.

So it is whatever rights and however many workers the process has.
"""

from pathlib import Path

import pytest

from controller.adapters.embedded.nats_users import BrokerUsers
from events.broker_users import account_of
from events.nats import keys


@pytest.mark.parametrize(
    ("worker", "registered", "account"),
    [
        ("w3", "", "worker-w3"),
        ("w3", "worker-w3", "worker-w3"),
        ("w3", "worker-w0+8", "worker-w0+8"),
        ("w3", "worker-w0+3", "worker-w3"),
        ("w3", "worker-w1", "worker-w3"),
        ("w3", "controller", "worker-w3"),
        ("w3", "worker-w3+x", "worker-w3"),
    ],
)
def test_a_worker_is_reported_under_an_account_that_may_publish_for_it(
    worker: str, registered: str, account: str
) -> None:
    assert account_of(worker, registered) == account


@pytest.mark.parametrize(
    ("named", "out"),
    [
        ("worker-w0+8", ["worker-w0+8"]),
        ("worker-w3", ["worker-w0+8"]),
        ("worker-x0", ["worker-x0"]),
        ("worker-y0", []),
    ],
)
def test_the_account_of_a_process_of_many_workers_is_withdrawn(
    tmp_path: Path, named: str, out: list[str]
) -> None:
    users = BrokerUsers(tmp_path)
    users.make(["worker-w0+8", "worker-x0", "worker-x1"])
    before = users.names_by_key()
    worker = "w3" if "w" in named[7:] else named[7:]
    assert users.withdraw(named, worker) == out
    assert users.names_by_key() == before, "later log lines about them still have their names"
    left = {"worker-w0+8", "worker-x0", "worker-x1"} - set(out)
    assert left == {name for name in keys.users(tmp_path) if name.startswith("worker-")}
