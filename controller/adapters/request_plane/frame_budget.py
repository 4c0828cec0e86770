"""The traffic budget of one worker's connection: frames and bytes per second, far above any engine's."""

from events.intrusion.send_budget import Rate, TrafficBudget, TrafficLimit

FRAMES = TrafficLimit(
    # a step is one frame; those of one millisecond leave together
    messages=Rate(per_s=20_000.0, burst=100_000.0),
    size=Rate(per_s=64 * 1024 * 1024.0, burst=512 * 1024 * 1024.0),  # 256 answers with 20 logprobs: 6 MB/s
)


SHARE = 0.01  # share of a burst that is counted before the budget is checked


class FrameBudget:
    """The traffic that a worker may send on one connection. `exceeded` stays set.

    The connection counts `frames` and `size` (bytes) at each read, and calls `spend` only once one of them exceeds its step, so
    most reads make no call.
    """

    __slots__ = ("_traffic", "exceeded", "frames", "frames_step", "size", "size_step")

    def __init__(self, now: float, limit: TrafficLimit = FRAMES) -> None:
        self._traffic = TrafficBudget(limit, now)
        self.exceeded = False
        self.frames = self.size = 0
        self.frames_step = limit.messages.burst * SHARE
        self.size_step = limit.size.burst * SHARE

    def spend(self, now: float) -> str:
        """Charge the counted traffic to the budget. Return why the connection must be closed; empty if it need not be."""
        within = self._traffic.take(self.frames, self.size, now)
        self.frames = self.size = 0
        if within:
            return ""
        self.exceeded = True
        return "the worker sends more than an engine can compute"
