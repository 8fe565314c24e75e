"""Serve this folder to this machine: python serve.py [port]. The headers let the model use several cores."""

import contextlib
import functools
import http.server
import os
import sys


class Handler(http.server.SimpleHTTPRequestHandler):
    """Static files, isolated from other pages: browsers require it before threads may share memory."""

    def guess_type(self, path):  # type: ignore[no-untyped-def]  # the signature differs between versions of Python
        return "text/javascript" if str(path).endswith(("js", "mjs")) else super().guess_type(path)

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()


def server(folder: str, port: int) -> http.server.ThreadingHTTPServer:
    """Server on localhost; other machines cannot reach it."""
    return http.server.ThreadingHTTPServer(("localhost", port), functools.partial(Handler, directory=folder))


def main(arguments: list) -> int:  # type: ignore[type-arg]  # readable by Python 3.8
    """Serve until interrupted; a port that cannot be used is one line and exit code 2."""
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write("python serve.py [port]: serve this folder to this machine, by default at port 8000\n")
        return 0
    text = arguments[0] if arguments else "8000"
    if len(arguments) > 1 or not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535):
        sys.stderr.write(f"serve.py: the port must be a number from 0 to 65535, got {' '.join(arguments)!r}\n")
        return 2
    try:
        opened = server(os.path.dirname(os.path.abspath(__file__)), int(text))
    except OSError as error:
        sys.stderr.write(f"serve.py: cannot use port {text} ({error.strerror or error}): give another port\n")
        return 2
    sys.stdout.write(f"http://localhost:{opened.server_port}\n")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        opened.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
