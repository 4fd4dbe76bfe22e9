"""Stand-in: what a launcher starts in place of a program; a fork of the nursery runs that."""

import array
import json
import os
import signal
import socket
import sys

PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}

address, *command = sys.argv[1:]
request = json.dumps(
    {"command": command, "folder": os.getcwd(), "environment": dict(os.environ)}  # noqa: PTH109
).encode()
signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(address)
    connection.sendall(len(request).to_bytes(8, "big"))
    streams = array.array("i", [0, 1, 2])
    if "PMI_FD" in os.environ:  # MPICH's launcher speaks to its ranks by a descriptor that they inherit
        streams.append(int(os.environ["PMI_FD"]))
    connection.sendmsg([request[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    connection.sendall(request[1:])
    answers = connection.makefile("r")
    child = int(answers.readline())
    for number in streams:
        os.close(number)  # the fork alone holds them

    def pass_on(number, _frame):
        """Send the program a signal that was sent to this process."""
        os.kill(child, number)

    for one in PASSED_ON:
        signal.signal(one, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    status = int(answers.readline() or -signal.SIGKILL)
if status < 0:
    if -status in PASSED_ON:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
