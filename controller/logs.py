"""Configures logging of a controller-side process: its own log and its libraries' logs in one format."""

import logging

import structlog

from events.process import logs

# aiohttp modules with the errors that a malformed request causes
CLIENTS_MISTAKES = ("aiohttp.http_exceptions", "aiohttp.web_protocol")


def configure() -> None:
    """Configure structlog for this process, and route library logs of level WARNING or above through structlog."""
    logs.configure()
    logging.basicConfig(handlers=[_Libraries()], level=logging.WARNING, force=True)


class _Libraries(logging.Handler):
    """Logging handler that converts library log records to structlog events.

    A malformed HTTP request is logged in one line. The error's text is left out, because it quotes the client's request.
    """

    def emit(self, record: logging.LogRecord) -> None:
        log, error = structlog.get_logger(record.name), record.exc_info[1] if record.exc_info else None
        if error is not None and type(error).__module__ in CLIENTS_MISTAKES:
            log.warning(record.getMessage(), library=record.name, error=type(error).__name__)
        else:
            log.log(record.levelno, record.getMessage(), library=record.name, exc_info=error)
