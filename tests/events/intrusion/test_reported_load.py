"""An impossible load report of a worker does not affect others' requests."""

import math

import msgspec
import pytest

from events.intrusion.reported_load import counts, impossible_beat
from events.wire import Beat, Load


@pytest.mark.parametrize(
    ("beat", "why"),
    [
        (Beat("decode", 1.5, load=Load(running=3, waiting=2, closed_s=60.0)), ""),
        (Beat("idle", math.nan), "step_age_ms = nan"),
        (Beat("idle", -1.0), "step_age_ms = -1.0"),
        (Beat("idle", 0.0, load=Load(running=-1000)), "running = -1000"),
        (Beat("idle", 0.0, load=Load(closed_s=-1e9)), "closed_s = -1000000000.0"),
        (Beat("idle", 0.0, load=Load(closed_s=math.nan)), "closed_s = nan"),
        (Beat("idle", 0.0, load=Load(weight=0.25)), ""),
        (Beat("idle", 0.0, load=Load(weight=2.0)), "weight = 2.0"),
        (Beat("idle", 0.0, load=Load(weight=math.nan)), "weight = nan"),
        (Beat("idle", 0.0, ranks=[Load(), Load(kv_used=2**60)]), f"kv_used = {2**60}"),
    ],
)
def test_loads_that_no_engine_can_report_are_refused(beat: Beat, why: str) -> None:
    assert impossible_beat(beat) == why


def test_every_load_that_a_worker_sends_is_accepted_on_the_bus() -> None:
    """A new field of `Load` must not make the heartbeats of all workers invalid."""
    load = Load(running=1, waiting=2, closed_s=0.5, weight=0.5)
    assert counts(msgspec.structs.asdict(load))["waiting"] == 2


def test_a_heartbeat_on_the_bus_keeps_the_counts_that_are_known() -> None:
    assert counts({"running": 2, "closed_s": 1.5, "made up": 7}) == {"running": 2}
    for bad in ({"running": -1}, {"waiting": 10**30}, {"kv_used": "7"}, {"kv_used": 1.5}):
        with pytest.raises(ValueError, match="="):
            counts(bad)
