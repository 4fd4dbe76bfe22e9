"""Nursery: imports frameworks once, and forks a process for each program that a stand-in asks for."""

import array
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import types
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Above all numbers that streams are to have.
_ASIDE = 100


def import_frameworks(names):
    """Import what programs of tests import, and what that imports at its first use."""
    if not names:
        import numpy  # noqa: F401 - what nnlo runs on by itself

        return
    keras = "keras" in names
    if keras:
        import keras as keras_package

        if keras_package.backend.backend() == "tensorflow":
            return  # its first tensor starts threads, which a fork would not have
    import torch

    torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    torch.utils.data.DataLoader([1])
    if keras:
        keras_package.Sequential([keras_package.layers.Dense(1)]).compile("adam", "mse")
        keras_package.backend.clear_session()


def import_nnlo(frameworks):
    """Import the plug-ins for the frameworks, or without any what they share."""
    for name in frameworks or ["common"]:
        importlib.import_module(f"nnlo_{name}")


def forget_another_nnlo(folder):
    """Forget nnlo where a program finds another first: in its own folder."""
    own, mine = Path(folder, "nnlo_common"), sys.modules.get("nnlo_common")
    if mine is not None and own.is_dir() and not own.samefile(Path(mine.__file__).parent):
        for name in [name for name in sys.modules if name.startswith("nnlo_")]:
            del sys.modules[name]


def guard_rank():
    """Do what importing nnlo does in a rank: have its failure end the others."""
    nnlo = sys.modules.get("nnlo_common")
    if nnlo is not None:
        nnlo.guard_launched()


def nurse(listener):
    """Fork for each request; return a request in the child that is to run it."""
    events = selectors.DefaultSelector()
    events.register(listener, selectors.EVENT_READ)
    events.register(sys.stdin, selectors.EVENT_READ)
    while True:
        key, _ = events.select()[0]  # one at a time: handling it may end another
        if key.fileobj is sys.stdin:
            sys.exit()  # the tests are over; forks are killed with this process
        elif key.fileobj is listener:
            connection, _ = listener.accept()
            request, streams = received(connection)
            child = os.fork()
            if not child:
                events.close()
                listener.close()
                connection.close()
                return request, streams
            for stream in streams:
                os.close(stream)
            answer(connection, child)
            ended = os.pidfd_open(child)
            events.register(ended, selectors.EVENT_READ, (child, connection))
            events.register(connection, selectors.EVENT_READ, child)
        elif isinstance(key.data, int):  # the stand-in was killed, so its program is
            events.unregister(key.fileobj)
            os.kill(key.data, signal.SIGKILL)
        else:
            child, connection = key.data
            events.unregister(key.fileobj)
            os.close(key.fileobj)
            answer(connection, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            with contextlib.suppress(KeyError):
                events.unregister(connection)
            connection.close()


def answer(connection, number):
    """Send a number to a stand-in, unless that was killed."""
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % number)


def received(connection):
    """Receive a stand-in's request and its streams."""
    size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
    data, extra, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(16))
    streams = array.array("i")
    for _, _, content in extra:
        streams.frombytes(content)
    data += connection.recv(size - 1, socket.MSG_WAITALL)
    return json.loads(data), list(streams)


def become(request, streams):
    """Give this process the streams, folder, environment and search path of the stand-in."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
    targets = [0, 1, 2, *map(int, filter(None, [request["environment"].get("PMI_FD")]))]
    aside = [fcntl.fcntl(stream, fcntl.F_DUPFD, _ASIDE) for stream in streams]
    for stream in streams:
        os.close(stream)
    for target, stream in zip(targets, aside, strict=True):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = request["command"]
    sys.path[0] = str(Path.cwd() if sys.argv[0] == "-m" else Path(sys.argv[0]).resolve().parent)
    forget_another_nnlo(sys.path[0])
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        lines = -1 if mode == "r" or (number == 1 and not os.isatty(1)) else 1
        errors = "backslashreplace" if number == 2 else None
        stream = open(number, mode, lines, errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    # Each process draws its own numbers, as if started cold.
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
    sys.modules["numpy"].random.seed()
    guard_rank()


def main():
    """Serve requests; in the child of one, return the program's words."""
    address, *rest = sys.argv[1:]
    frameworks = [name for name in rest if name != "nnlo"]
    import_frameworks(frameworks)
    if "nnlo" in rest:
        import_nnlo(frameworks)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        become(*nurse(listener))
    return sys.argv


if __name__ == "__main__":
    path, *_ = main()
    if path == "-m":
        sys.argv.pop(0)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        sys.exit()
    # The program is the main module itself, as if Python had started it.
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None, __annotations__={})
    sys.modules["__main__"] = module
    with open(path, "rb") as file:  # noqa: PTH123
        code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)
