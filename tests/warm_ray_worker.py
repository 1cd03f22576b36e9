"""Ray starts this instead of `setup_worker.py`: it has tests/warm_ray.py fork the worker, and lives as long as it.

Only small modules are imported, because each worker starts this file as a process of its own.
"""

import json
import os
import select
import socket
import sys

SOCKET = "UNIRL_TEST_RAY_SOCKET"
"""The environment variable with the path of the socket of the process that forks."""
PARENT_CHECK_S = 0.5


def main(arguments: list[str]) -> int:
    """The exit status of the worker."""
    options = dict(word.split("=", 1) for word in arguments if word.startswith("--") and "=" in word)
    context = json.loads(options.get("--serialized-runtime-env-context") or "{}")
    special = {key for key, value in context.items() if value and key not in ("env_vars", "py_executable")}
    if special or context.get("py_executable", sys.executable) != sys.executable:
        cold = os.path.join(os.path.dirname(arguments[0]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, cold, *arguments])
    parent = os.getppid()
    request = {
        "words": [each for each in arguments if not each.startswith(("--language=", "--serialized-runtime-env"))],
        "folder": os.getcwd(),
        "environ": dict(os.environ) | context.get("env_vars", {}),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(os.environ[SOCKET])
        sent = json.dumps(request).encode()
        socket.send_fds(server, [len(sent).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(sent)
        while not select.select([server], [], [], PARENT_CHECK_S)[0]:
            if os.getppid() != parent:  # closing the socket ends the worker
                return 1
        answer = server.recv(1)
        return answer[0] if answer else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
