"""Cluster: from processes to ranks. Launchers, MPI, hosts, threads, topology, deaths.

Holds: `transport/` (messages over MPI), connecting, aborting the whole job, hosts and GPUs, thread limits,
and the topology that gives each rank its role.
May import: `base`, `algorithms`, `data`, `protocol`.
Must not know: the model and the framework.
"""
