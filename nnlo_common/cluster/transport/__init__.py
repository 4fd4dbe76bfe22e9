"""Transport of messages between ranks over MPI.

    _endpoint     the interface of every transport
    _world, _mpi  the transport over MPI; only `_world` imports mpi4py

`nnlo_common.testing` has the other transports: ranks as threads, and the virtual cluster. This package
imports nothing, so that importing it does not load MPI.
"""
