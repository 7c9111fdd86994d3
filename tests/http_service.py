"""An HTTP service on loopback, in a thread of its own, whose JSON answers a test defines."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["HttpService", "chat", "embedding"]


class HttpService:
    """Listens from ``with`` on at ``url``.

    Arguments:
        answer: maps the body of a request to the body of its answer; bytes are sent as they are.

    Attributes:
        requests: path and body of every request, in order.
        authorized: the header Authorization of each request.
        fail_with: statuses of the next answers, first one first; ``0`` cuts the connection.
        refusal: the body of such an answer.
        retry_after: what the header Retry-After of such an answer says; None: there is none.
    """

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.authorized: list[str | None] = []
        self.fail_with: list[int] = []
        self.refusal: bytes = b'{"error": "refused by the test"}'
        self.retry_after: str | None = None
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.requests.append((self.path, body))
                service.authorized.append(self.headers["Authorization"])
                status = service.fail_with.pop(0) if service.fail_with else 200
                if status == 0:
                    self.close_connection = True
                    return
                found = answer(body) if status == 200 else service.refusal
                content = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Location", "/elsewhere")
                if status != 200 and service.retry_after is not None:
                    self.send_header("Retry-After", service.retry_after)
                self.end_headers()
                with suppress(ConnectionError):  # the client may have hung up
                    self.wfile.write(content)

            def log_message(self, format: str, *arguments: Any) -> None:
                """Log nothing."""

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HttpService:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    """With the default of 5, further concurrent connections wait a second for TCP's retransmission."""


def embedding(*numbers: float) -> dict[str, Any]:
    """How SGLang answers for a model with that many outputs."""
    return {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": list(numbers)}]}


def chat(text: str | None) -> dict[str, Any]:
    """How SGLang answers for a language model."""
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
