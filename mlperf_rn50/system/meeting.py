"""A server that only answers a secret, and how it is asked: where the ranks of a Slurm job meet.

What travels is not encrypted: the secret keeps out whoever can reach the port, not whoever reads the wire.
"""
import hmac
import http.client
import io
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections import Counter
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler

from mlperf_rn50.system.addresses import LOOPBACK

# In the environment of whoever may ask, and nowhere else: not on a command line, not in a log.
SECRET_VARIABLE = 'MLPERF_RN50_SECRET'
# Gloo stores some 200 bytes for each other rank, and takes each back when it has met the others.
MAX_BODY_BYTES = 2**20
MAX_KEYS = 2**16
_MAX_OPEN_PER_HOST = 256
_MAX_PATH = 512
# A stranger's body is read so that he sees the answer, but not at any length.
_MAX_REFUSED_BYTES = 2**16
_REQUEST_LIMIT_S = 10.0


class Server(socketserver.ThreadingTCPServer):
    """Answers requests, each in a thread; what garbage and port scans cause is not worth a word."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024  # all ranks come at once

    def __init__(self, handler: type['Handler'], secret: str, port: int = 0, is_local: bool = False):
        """Listens on a port (0: a free one), on all interfaces or (is_local) only on the loopback."""
        self.secret = secret
        self.store: dict[str, bytes] = {}
        self._lock, self._num_open = threading.Lock(), Counter[str]()
        if not is_local and socket.has_dualstack_ipv6():
            self.address_family = socket.AF_INET6
        super().__init__((LOOPBACK if is_local else '', port), handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def start(self) -> None:
        """Serves in a thread, as long as the process lives."""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return self.server_address[1]

    def process_request(self, request, client_address) -> None:
        with self._lock:
            self._num_open[client_address[0]] += 1
            is_welcome = self._num_open[client_address[0]] <= _MAX_OPEN_PER_HOST
        if not is_welcome:
            self.shutdown_request(request)
            self._has_left(client_address)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started: nobody else will count it out
            self._has_left(client_address)
            raise

    def process_request_thread(self, request, client_address) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._has_left(client_address)

    def _has_left(self, client_address) -> None:
        with self._lock:
            self._num_open[client_address[0]] -= 1
            self._num_open += Counter()  # forgets who has none

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Limited(io.RawIOBase):
    """What a connection sends, until it has taken too long, however slowly it drips."""

    def __init__(self, connection: socket.socket):
        self._connection, self._deadline = connection, time.monotonic() + _REQUEST_LIMIT_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError('the request takes too long')
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class Handler(BaseHTTPRequestHandler):
    """Lets through whoever knows the server's secret, with a body of bearable length."""

    server: Server
    timeout = _REQUEST_LIMIT_S
    body = b''

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Limited(self.connection))

    def log_message(self, *_) -> None:
        pass

    def parse_request(self) -> bool:
        """Reads the whole request; the only way to the methods below."""
        if not super().parse_request():
            return False
        refusal = self._read_body()
        if refusal is not None:
            self.answer(refusal)
        return refusal is None

    def _read_body(self) -> HTTPStatus | None:
        """Reads the body; what is wrong with the request, None if nothing is."""
        text = self.headers.get('Content-Length', '0')
        length = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else MAX_BODY_BYTES + 1
        is_known = self._is_known()
        if length > (MAX_BODY_BYTES if is_known else _MAX_REFUSED_BYTES):
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        self.body = self.rfile.read(length)
        if not is_known:
            return HTTPStatus.FORBIDDEN
        return HTTPStatus.BAD_REQUEST if len(self.body) < length or len(self.path) > _MAX_PATH else None

    def _is_known(self) -> bool:
        if self.command == 'GET' and self.path.startswith('/proof/'):
            return True
        wanted, got = f'Bearer {self.server.secret}', self.headers.get('Authorization', '')
        return hmac.compare_digest(got.encode('latin-1', 'replace'), wanted.encode())

    def answer(self, status: int, body: bytes = b'') -> None:
        """Sends the whole answer."""
        self.send_response(status)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """Shows that the server knows the secret, too, so that nobody tells it to another one."""
        is_proof = self.path.startswith('/proof/')
        self.answer(*(200, prove(self.server.secret, self.path).encode()) if is_proof else (404,))


class StoreHandler(Handler):
    """The store in which Gloo's ranks find each other: what Horovod's own server answers, /SCOPE/KEY to bytes."""

    def do_GET(self) -> None:
        if self.path in self.server.store:
            self.answer(200, self.server.store[self.path])
        else:
            super().do_GET()

    def do_PUT(self) -> None:
        store = self.server.store
        if self.path not in store and len(store) >= MAX_KEYS:
            self.answer(HTTPStatus.INSUFFICIENT_STORAGE)
            return
        store[self.path] = self.body
        self.answer(200)

    def do_DELETE(self) -> None:
        """A rank has met all others of a scope: nobody needs its address any more."""
        self.server.store.pop(self.path, None)
        self.answer(200)


def prove(secret: str, path: str) -> str:
    """What only who knows the secret can answer to a question that was never asked before."""
    return hmac.new(secret.encode(), path.encode(), 'sha256').hexdigest()


def ask(address: str, port: int, method: str, path: str, secret: str | None = None, body: bytes | None = None,
        timeout_s: float = 5.0) -> tuple[int, bytes]:
    """Status and body of the answer to one request.

    Raises:
        OSError, http.client.HTTPException: there is none.
    """
    connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    try:
        connection.request(method, path, body, {'Authorization': f'Bearer {secret}'} if secret else {})
        answer = connection.getresponse()
        return answer.status, answer.read(MAX_BODY_BYTES)
    finally:
        connection.close()


def knows(address: str, port: int, secret: str) -> bool | None:
    """Whether a server knows the secret; None if there is none. The secret itself is not sent."""
    path = f'/proof/{secrets.token_hex(16)}'
    try:
        status, body = ask(address, port, 'GET', path)
    except (OSError, http.client.HTTPException):
        return None
    return status == 200 and hmac.compare_digest(body, prove(secret, path).encode())
