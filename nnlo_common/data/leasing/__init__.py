"""Leases of parts of an epoch: the server's ledger, its record of each worker, and batches from leases."""
