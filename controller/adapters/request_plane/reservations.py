"""Who carries which stream of one connection: to this worker, which has reserved room for it, or away from it."""

from controller.ports import Sink, TransferSink
from events import wire


class StreamReservations:
    """The streams of one connection that are being moved."""

    def __init__(self) -> None:
        self.reserved: dict[int, TransferSink] = {}  # here, and nothing of it has begun
        self.shipping: dict[int, TransferSink] = {}  # open here, and on its way elsewhere

    def take(self, frame: wire.ToFrontend) -> None:
        """Pass on what the worker says of a move. What was given up meanwhile is dropped."""
        if isinstance(frame, wire.Reserved) and (sink := self.reserved.get(frame.stream)):
            sink.reserved(frame)
        elif isinstance(frame, wire.Declined):
            here = self.reserved.pop(frame.stream, None) or self.shipping.pop(frame.stream, None)
            if here is not None:
                here.declined(frame.stream, frame.reason)

    def forget(self, stream: int) -> bool:
        """Carry a stream no further. Return whether it was only reserved here."""
        self.shipping.pop(stream, None)
        return self.reserved.pop(stream, None) is not None

    def clear(self) -> dict[int, Sink]:
        """Forget everything: the connection is of no use any more. Return what was reserved here, to be told."""
        self.shipping.clear()
        reserved: dict[int, Sink] = {**self.reserved}
        self.reserved.clear()
        return reserved
