"""A rank's own way to the meeting point: Gloo's client cannot say the secret, so this process says it for it.

It listens on the loopback, answers only processes of its user, and lives as long as its rank.
"""
import ctypes
import http.client
import os
import signal
import socket
import subprocess
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer

from mlperf_rn50 import safe_path
from mlperf_rn50.system.addresses import LOOPBACK
from mlperf_rn50.system.meeting import MAX_BODY_BYTES, SECRET_VARIABLE, ask

_PR_SET_PDEATHSIG = 1
_TIMEOUT_S = 30.0


def start_forwarder(address: str, port: int, secret: str) -> int:
    """Starts the forwarder of this process, and of the program it becomes; returns its port."""
    with socket.create_server((LOOPBACK, 0), backlog=128) as listener:
        subprocess.Popen([sys.executable, safe_path.__file__, __name__, str(listener.fileno()), address, str(port),
                          str(os.getpid())],
                         env={**os.environ, SECRET_VARIABLE: secret}, pass_fds=[listener.fileno()],
                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                         start_new_session=True)
        return listener.getsockname()[1]


def find_user(table: str, client_port: int, own_port: int) -> int | None:
    """The user of the other end of a connection within the loopback, None if it is not in the table.

    Args:
        table: /proc/net/tcp, as in proc(5).
        client_port: of the other end.
        own_port: of this end.
    """
    host = f'{int.from_bytes(socket.inet_aton(LOOPBACK), sys.byteorder):08X}'
    wanted = [f'{host}:{client_port:04X}', f'{host}:{own_port:04X}']
    return next((int(words[7]) for words in map(str.split, table.splitlines()) if words[1:3] == wanted), None)


class _Forwarder(ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket, address: str, port: int, secret: str):
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.target, self.secret = listener, (address, port), secret

    def verify_request(self, request, client_address) -> bool:
        try:
            table = Path('/proc/net/tcp').read_text()
        except OSError:  # a sandbox without it has no other users
            return True
        return find_user(table, client_address[1], self.server_address[1]) == os.geteuid()

    def handle_error(self, *_) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    server: _Forwarder
    timeout = _TIMEOUT_S

    def log_message(self, *_) -> None:
        pass

    def _forward(self) -> None:
        length = min(int(self.headers.get('Content-Length') or 0), MAX_BODY_BYTES + 1)
        body = self.rfile.read(length) if length else None
        try:
            status, answer = ask(*self.server.target, self.command, self.path, self.server.secret, body, _TIMEOUT_S)
        except (OSError, http.client.HTTPException):
            status, answer = int(HTTPStatus.BAD_GATEWAY), b''
        self.send_response(status)
        self.send_header('Content-Length', str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_DELETE = _forward


def main(listener: int, address: str, port: int, parent: int) -> None:
    """Forwards until the parent is gone, whatever signal its ranks are sent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    server = _Forwarder(socket.socket(fileno=listener), address, port, os.environ[SECRET_VARIABLE])
    if os.getppid() == parent:
        server.serve_forever()


if __name__ == '__main__':
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
