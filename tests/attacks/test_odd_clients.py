"""Whatever clients send, a whole fleet answers them, serves the others as usual, and does not fail."""

from pathlib import Path

from fleet import running

from benchmarks.attack.fuzz import FLAGS, SHORT, came_through, fuzzed
from benchmarks.attack.odd_requests import odd_request

REQUESTS = 520  # each field of the API once; `python -m benchmarks fuzz` has more


async def test_no_odd_request_breaks_a_fleet_or_is_noticed_by_others(tmp_path: Path) -> None:
    async with running(tmp_path / "fleet", *FLAGS, environment=SHORT) as fleet:
        found = await fuzzed(fleet, [odd_request(0, number) for number in range(REQUESTS)], at_once=8)
    assert came_through(found), found
    assert found["fields"] > 200 and found["statuses"]["200"] > 20 and found["statuses"]["400"] > 100, found
