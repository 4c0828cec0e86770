"""Logs of a controller-side process: structlog to stderr, JSON lines when stderr is no terminal."""

import logging
import sys
from typing import TextIO, cast

import structlog

from events.stderr import Stderr

CLIENTS_MISTAKES = (
    "aiohttp.http_exceptions",
    "aiohttp.web_protocol",
)  # the modules of aiohttp's errors for them


def quiet() -> None:
    """Keep a command's terminal for its answer: what a person must know is printed, or ends the command."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Stderr())),
    )


def configure() -> None:
    """Set structlog up for this process."""
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Stderr())),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(handlers=[_Libraries()], level=logging.WARNING, force=True)


class _Libraries(logging.Handler):
    """What libraries log, in our form.

    A request that is no HTTP is its client's mistake: one line, and never the error's own words, which quote it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        log, error = structlog.get_logger(record.name), record.exc_info[1] if record.exc_info else None
        if error is not None and type(error).__module__ in CLIENTS_MISTAKES:
            log.warning(record.getMessage(), library=record.name, error=type(error).__name__)
        else:
            log.log(record.levelno, record.getMessage(), library=record.name, exc_info=error)
