"""Programs inside a host of `tests.helpers.hosts`: its first process, and the remote shell between hosts.

Both use the standard library only, and start in a few hundredths of a second.
"""
