"""Processes become ranks, and ranks die: launchers, MPI, hosts, threads, topology.

Holds: `transport/` (messages over MPI), connecting, aborting the whole job, hosts and GPUs, thread limits,
and the topology that gives each rank its role.
May import: `base`, `algorithms`, `data`, `protocol`.
Must not know: what is trained, and with which framework.
"""
