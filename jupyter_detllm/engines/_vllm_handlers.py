"""Log handlers of the libraries under the engine, led to its log."""

from __future__ import annotations

import functools
import logging
from typing import Any, TextIO

__all__ = ["lead", "rebind_logger", "stream_handlers"]


def rebind_logger(log: TextIO) -> None:
    """Make every stream handler of vLLM's loggers write to `log`."""
    lead(stream_handlers(("vllm",)), log)


def lead(
    handlers: list[logging.StreamHandler[Any]], log: TextIO
) -> list[tuple[logging.StreamHandler[Any], Any]]:
    """Make `handlers` write to `log`; return them with the streams they had."""
    return [(handler, handler.setStream(log)) for handler in handlers if handler.stream is not log]


def stream_handlers(
    libraries: tuple[str, ...] = ("vllm", "transformers", "huggingface_hub"),
) -> list[logging.StreamHandler[Any]]:
    """Return what writes the log messages of `libraries` to a stream.

    Such a handler holds the stream that stood when its library was imported, so that
    replacing ``sys.stderr`` does not reach it.
    """
    known = logging.Logger.manager.loggerDict
    loggers = [
        logger
        for logger in map(known.get, _names(libraries, len(known)))
        if isinstance(logger, logging.Logger) and logger.handlers
    ]
    found = (handler for logger in loggers for handler in logger.handlers)
    return [
        handler
        for handler in found
        if isinstance(handler, logging.StreamHandler)
        and not isinstance(handler, logging.FileHandler)
    ]


@functools.lru_cache(maxsize=8)
def _names(libraries: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Return the names under `libraries`, of which there are thousands, kept by their count.

    A name stays where it is once it is known; whether a logger stands behind it may change.
    """
    del count
    names = tuple(logging.Logger.manager.loggerDict)
    return tuple(name for name in names if name.partition(".")[0] in libraries)
