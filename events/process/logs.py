"""Configures the logs of a process: structlog to stderr, as JSON lines or for a terminal.

No log contains a user's text. An exception's message may quote such text: an undecodable body, or a prompt that no tokenizer
accepts. So the log of an unexpected exception has the exception's type and traceback, but not its message.
"""

import atexit
import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from typing import TextIO, cast

import structlog


def quiet() -> None:
    """Suppress a command's logs on the terminal. The command itself prints what is important, or ends with an error."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Stderr())),
    )


def configure() -> None:
    """Configure structlog for this process: JSON lines, or coloured text on a terminal, from level INFO on."""
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.ExceptionRenderer(exception_without_text),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Stderr())),
        cache_logger_on_first_use=True,
    )


def exception_without_text(exc_info: structlog.typing.ExcInfo) -> str:
    """Return the types and the tracebacks of an exception and of its causes, as text.

    The messages of exceptions are left out, except for the operating system's text in an OSError.
    """
    return "".join(_lines(exc_info[1], set()))


def _lines(error: BaseException, seen: set[int]) -> Iterator[str]:
    """Yield the lines of text about an exception, after the lines about its cause or context."""
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen:
        yield from _lines(before, seen)
        yield "\nand then:\n\n"
    yield from traceback.format_tb(error.__traceback__)
    reason = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
    yield f"{type(error).__module__}.{type(error).__qualname__}{reason}\n"
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            if id(one) not in seen:
                yield from _lines(one, seen)


class Stderr:
    """The process's stderr as a stream that never raises."""

    def write(self, text: str) -> int:
        """Write the text. If stderr cannot be written, drop the text."""
        try:
            sys.stderr.write(text)
        except (OSError, ValueError):
            ignore_exit_flush_errors()
        return len(text)

    def flush(self) -> None:
        """Flush the written text. If stderr cannot be written, drop the text."""
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            ignore_exit_flush_errors()


def ignore_exit_flush_errors() -> None:
    """Let the process exit with its own exit code, even if stderr cannot be written. Text that stderr cannot accept is
    discarded at exit.

    Python flushes stderr at exit. Without this function, a failure of that flush would change the exit code.
    """
    atexit.unregister(_settle)
    atexit.register(_settle)


def _settle() -> None:
    try:
        sys.stderr.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    except ValueError:
        pass  # stderr is closed, so there is no text to flush
