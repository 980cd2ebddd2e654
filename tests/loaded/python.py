"""A Python that has torch loaded already, so that a test of one script takes a tenth of a second instead of seconds.

python.py --serve SOCKET          loads torch, then forks a child for each script that is asked for
python.py SOCKET SCRIPT [ARGS]    stands for `python SCRIPT [ARGS]`: same output, environment, signals and exit code

The child attaches the meter as the start-up hook would have done when torch was imported, and runs the script.
"""

import array
import atexit
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback

leave = os._exit
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def ask(path: str, words: list[str]) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    request = json.dumps([words, dict(os.environ), os.getcwd()]).encode()
    descriptors = array.array("i", [0, 1, 2])
    connection.sendmsg(
        [len(request).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
    )
    connection.sendall(request)
    answers = connection.makefile("r")
    child = int(answers.readline())
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: os.kill(child, number))
    code = int(answers.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(path: str) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        connection, _ = listening.accept()
        if os.fork():
            connection.close()
            continue
        listening.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        head, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(12))
        descriptors = array.array("i", ancillary[0][2][:12])
        size = int.from_bytes(head, "big")
        request = b""
        while len(request) < size:
            request += connection.recv(size - len(request))
        child = os.fork()
        if child == 0:
            connection.close()
            return run(json.loads(request), descriptors)
        for descriptor in (0, 1, 2, *descriptors):
            os.close(descriptor)
        connection.sendall(f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)


def run(request: list, descriptors: array.array) -> None:
    words, environment, folder = request
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    from flopwise import bootstrap

    bootstrap.attach()
    code = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    leave(code)  # without taking torch apart, which takes a second


if __name__ == "__main__":
    if sys.argv[1] != "--serve":
        ask(sys.argv[1], sys.argv[2:])
    import torch

    import flopwise.meter.count
    import flopwise.meter.session  # noqa: F401

    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # loads what only trainings need
    serve(sys.argv[2])
