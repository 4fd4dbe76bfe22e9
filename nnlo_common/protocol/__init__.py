"""Protocol between workers and servers as pure state machines: an event in, a list of actions out.

Holds: frozen messages, the server, the worker and its shard clients, queries, and the checkpoint round.
May import: `base`, `algorithms`, `data`.
Must not know: MPI, frameworks, clocks, threads. The same machines run in the virtual cluster and over MPI.
"""

from __future__ import annotations

from nnlo_common.protocol._averages import Averages, Moves, Moving
from nnlo_common.protocol._events import Action, Compute, Event, Lost, Received, Release, Send, Story, Wait
from nnlo_common.protocol._lease_queries import Leasing, LedgerClient
from nnlo_common.protocol._messages import ONE_WAY, REPLIES, Kind, Message, decode, encode
from nnlo_common.protocol._queries import (
    Answers,
    Broadcasts,
    EpochMeans,
    Handlers,
    Means,
    Notes,
    PausesBetween,
    Places,
    QueryClient,
    QueryHandler,
    QueryService,
)
from nnlo_common.protocol._query_messages import QUERY_NUMBERS
from nnlo_common.protocol._server import Server
from nnlo_common.protocol._shard_client import Phase, Shard, ShardClient, shards_without
from nnlo_common.protocol._sub_server import SubServer
from nnlo_common.protocol._wire import Wire
from nnlo_common.protocol._worker import Activity, Worker, check_weight
from nnlo_common.protocol._worker_records import AWAITED, Standing

__all__ = [
    "AWAITED",
    "Action",
    "Activity",
    "Answers",
    "Averages",
    "Broadcasts",
    "Compute",
    "EpochMeans",
    "Event",
    "Handlers",
    "Kind",
    "Leasing",
    "LedgerClient",
    "Lost",
    "Means",
    "Message",
    "Moves",
    "Moving",
    "Notes",
    "ONE_WAY",
    "PausesBetween",
    "Phase",
    "Places",
    "QUERY_NUMBERS",
    "QueryClient",
    "QueryHandler",
    "QueryService",
    "REPLIES",
    "Received",
    "Release",
    "Send",
    "Server",
    "Shard",
    "ShardClient",
    "Standing",
    "Story",
    "SubServer",
    "Wait",
    "Wire",
    "Worker",
    "check_weight",
    "decode",
    "encode",
    "shards_without",
]
