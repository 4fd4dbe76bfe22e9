"""The order in which a server has handled requests, written down: all that a replay of the training needs."""

from __future__ import annotations

import json
from pathlib import Path

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.protocol import Server

__all__ = ["Recording"]


class Recording:
    """The file that a server's order is to be written to, once the training is over.

    Args:
        path: the file, as the user names it; servers but the first add their shard to the name.
        server: has the order.

    Raises:
        ConfigurationError: it could not be written when the training is over.
    """

    def __init__(self, path: Path, server: Server) -> None:
        self._server = server
        self._final = path.with_name(f"{path.name}.shard{server.shard}") if server.shard else path
        self._fresh = self._final.with_name(f"{self._final.name}.part")
        try:
            self._fresh.write_text("")
        except OSError as error:
            raise ConfigurationError(
                f"log_order={str(path)!r} cannot be written ({error.strerror}); name a file in a folder "
                "that exists and is writable on the server's host"
            ) from None

    def write(self) -> None:
        """Write the order, whole or not at all."""
        self._fresh.write_text(json.dumps({"shard": self._server.shard, "handled": self._server.handled}))
        self._fresh.replace(self._final)
