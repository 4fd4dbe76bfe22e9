"""Leases of parts of an epoch: the ledger on the server, the holder's entry, and batches read from leases."""
