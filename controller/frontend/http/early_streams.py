"""Streams of requests that are not answered yet, because they are queued or tokenised: their clients get the head and comments as
those do that wait for a first token."""

from collections.abc import Iterator
from contextlib import contextmanager

from controller.frontend.errors import ApiError
from controller.frontend.responses.response_format import event
from controller.frontend.responses.sse import SseStream


class EndedEarly(Exception):
    """The request was refused after its head had been sent: the error was the last event of its stream."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.code)
        self.error = error


class EarlyStreams:
    """The streams of one frontend that nothing answers yet."""

    def __init__(self) -> None:
        self._waiting: dict[SseStream, None] = {}

    @contextmanager
    def waiting(self, stream: SseStream | None) -> Iterator[None]:
        """Keep the client of this stream, if it is one, from waiting in silence. Raise EndedEarly."""
        if stream is None:
            yield
            return
        self._waiting[stream] = None
        try:
            yield
        except ApiError as error:
            if not stream.started:
                raise
            stream.end(event(error.body()))
            raise EndedEarly(error) from error
        except BaseException:
            if stream.started:
                stream.abort()  # nothing can follow what has been sent
            raise
        finally:
            del self._waiting[stream]

    def check(self, now: float) -> None:
        """Send what is due. `now`: monotonic seconds."""
        for stream in self._waiting:
            stream.await_token(now)
