"""Logs of a process: structlog to stderr, JSON lines when stderr is no terminal."""

import logging
import sys
from typing import TextIO, cast

import structlog

from events.process.stderr import Stderr


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
