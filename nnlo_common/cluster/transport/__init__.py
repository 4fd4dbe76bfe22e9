"""Transport of messages between ranks over MPI.

    _endpoint     what every transport offers
    _world, _mpi  over MPI; `_world` is the only module that imports mpi4py
    _memory       ranks as threads of one process, with faults and gates at named `_points`
    _virtual      many ranks in one thread, in the order that one of the `_schedules` chooses

Nothing is imported here, so that importing this package does not load MPI.
"""
