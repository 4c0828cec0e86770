"""The budget of one worker's connection: frames and bytes per second, far above what any engine sends."""

from events.intrusion.send_budget import Rate, TrafficBudget, TrafficLimit

FRAMES = TrafficLimit(
    messages=Rate(
        per_s=20_000.0, burst=100_000.0
    ),  # a step is a frame; those within a millisecond leave together
    size=Rate(per_s=64 * 1024 * 1024.0, burst=512 * 1024 * 1024.0),  # 256 answers with 20 logprobs: 6 MB/s
)


class FrameBudget:
    """What a worker may send on one connection. `exceeded` stays set."""

    __slots__ = ("_traffic", "exceeded")

    def __init__(self, now: float, limit: TrafficLimit = FRAMES) -> None:
        self._traffic = TrafficBudget(limit, now)
        self.exceeded = False

    def take(self, frames: int, size: int, now: float) -> str:
        """Count what has arrived. Return why the connection must be closed; empty if it need not be."""
        if self._traffic.take(frames, size, now):
            return ""
        self.exceeded = True
        return "the worker sends more than an engine can compute"
