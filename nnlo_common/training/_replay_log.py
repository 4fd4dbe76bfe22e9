"""Replay log: the order in which a server handled requests, which is all that a replay needs."""

from __future__ import annotations

import json
from pathlib import Path

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import new_file
from nnlo_common.protocol import Server

__all__ = ["Recording"]


class Recording:
    """File for a server's order, written when the training is over.

    Args:
        path: the file, as the user names it; servers other than the first append their shard.
        server: the server whose order is written.

    Raises:
        ConfigurationError: the file cannot be written; checked at the start.
    """

    def __init__(self, path: Path, server: Server) -> None:
        self._server = server
        self._final = path.with_name(f"{path.name}.shard{server.shard}") if server.shard else path
        self._fresh = self._final.with_name(f"{self._final.name}.part")
        try:
            new_file(self._fresh).close()
        except OSError as error:
            raise ConfigurationError(
                f"log_order={str(path)!r} cannot be written ({error.strerror}); choose a file in an existing "
                "folder that is writable on the server's host"
            ) from None

    def write(self) -> None:
        """Write the order atomically."""
        content = {"shard": self._server.shard, "handled": self._server.handled}
        with new_file(self._fresh) as file:
            file.write(json.dumps(content).encode())
        self._fresh.replace(self._final)
