"""Streams of requests that are not answered yet, because they are queued or tokenised: their clients get the head and comments as
those do that wait for a first token."""

from controller.frontend.errors import ApiError
from controller.frontend.responses.response_format import event
from controller.frontend.responses.sse import SseStream


class EarlyStreams:
    """The streams of one frontend that nothing answers yet."""

    def __init__(self) -> None:
        self._waiting: dict[SseStream, None] = {}

    def begin(self, stream: SseStream) -> None:
        """Keep the client of this stream from waiting in silence."""
        self._waiting[stream] = None

    def end(self, stream: SseStream) -> None:
        """The request is answered from now on, or was refused."""
        self._waiting.pop(stream, None)

    def refuse(self, stream: SseStream, error: BaseException) -> ApiError | None:
        """End the stream of a request that was not let in, if its head has been sent. Return the error that was its last event;
        None: the error is still to be answered."""
        if not stream.started:
            return None
        if isinstance(error, ApiError):
            stream.end(event(error.body()))
            return error
        stream.abort()  # nothing can follow what has been sent
        return None

    def check(self, now: float) -> None:
        """Send what is due. `now`: monotonic seconds."""
        for stream in self._waiting:
            stream.await_token(now)
