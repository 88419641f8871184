"""Log handlers of the libraries under the engine, led to its log."""

from __future__ import annotations

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
    loggers = [
        logger
        for name, logger in list(logging.Logger.manager.loggerDict.items())
        if name.split(".")[0] in libraries and isinstance(logger, logging.Logger)
    ]
    found = (handler for logger in loggers for handler in logger.handlers)
    return [
        handler
        for handler in found
        if isinstance(handler, logging.StreamHandler)
        and not isinstance(handler, logging.FileHandler)
    ]
