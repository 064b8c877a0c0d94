"""A remote shell in place of ssh, for hosts.sh: ``rsh.py serve`` on a host, ``rsh.py HOST COMMAND`` on another.

It is as much of ssh as mpirun needs: a command's words go over the network, its output and exit code come back.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time

PORT = 2200
END = b"\0exit "


def serve():
    """Run what is asked for."""
    listener = socket.create_server(("", PORT))
    while True:
        threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()


def answer(link):
    """One command; it goes on when nobody listens any more."""
    with link, link.makefile("rb") as file:
        words = json.loads(file.readline())
        done = subprocess.Popen(["/bin/sh", "-c", " ".join(words)], stdin=subprocess.DEVNULL, stdout=link.fileno(),
                                stderr=link.fileno(), cwd="/", start_new_session=True,
                                env={"PATH": os.environ["PATH"], "HOME": "/root"}).wait()
        link.sendall(END + str(done).encode())


def ask(host, words):
    """The exit code of a command over there."""
    for _ in range(100):  # it may be about to listen
        try:
            link = socket.create_connection((host, PORT))
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    else:
        return 255
    with link:
        link.sendall(json.dumps(words).encode() + b"\n")
        told = b""
        while data := link.recv(65536):
            told += data
            text, end, code = told.partition(END)
            if not end:
                sys.stderr.buffer.write(told)
                told = b""
    sys.stderr.buffer.write(text)
    return int(code or 255)


if __name__ == "__main__":
    args = [word for word in sys.argv[1:] if word != "-x"]
    if args == ["serve"]:
        serve()
    sys.exit(ask(args[0], args[1:]))
