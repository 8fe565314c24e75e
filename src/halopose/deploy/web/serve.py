"""Serves this folder to this machine: python serve.py [port]. Its headers let the model use several cores."""

import contextlib
import functools
import http.server
import os
import sys


class Handler(http.server.SimpleHTTPRequestHandler):
    """Static files, isolated from other pages, which browsers ask for before they share memory between threads."""

    def guess_type(self, path):  # type: ignore[no-untyped-def]  # the signature differs between versions of Python
        return "text/javascript" if str(path).endswith(("js", "mjs")) else super().guess_type(path)

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()


def server(folder: str, port: int) -> http.server.ThreadingHTTPServer:
    """For this machine alone."""
    return http.server.ThreadingHTTPServer(("localhost", port), functools.partial(Handler, directory=folder))


if __name__ == "__main__":
    opened = server(os.path.dirname(os.path.abspath(__file__)), int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
    sys.stdout.write(f"http://localhost:{opened.server_port}\n")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        opened.serve_forever()
