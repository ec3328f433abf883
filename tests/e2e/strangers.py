"""Pages of strangers: a server of such pages on this machine, and the ways in which they make a browser send
a request to another server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from playwright.sync_api import Browser, Page

from tests.bench.pages import new_page
from tests.bench.waits import join

NAMES = ("evil.test", "127.0.0.1", "localhost")
"""Hosts of strangers' pages: another site, and another port of this machine, where a notebook or a web server
of the user may be."""

POST_JSON = """async ([url, body]) => {
    const headers = {"content-type": "application/json"}
    return await (await fetch(url, {method: "POST", headers, body})).text()
}"""
_FORM = """(url, body) => new Promise(resolve => {
    const frame = Object.assign(document.createElement("iframe"), {name: "into"})
    const form = Object.assign(document.createElement("form"), {action: url, target: "into", method: "POST"})
    form.enctype = "text/plain"
    // sent as NAME=VALUE, which together are the body
    const [name, ...rest] = body.split("=")
    form.append(Object.assign(document.createElement("input"), {name, value: rest.join("=")}))
    document.body.append(frame, form)
    // the empty frame has been loaded by now
    frame.onload = () => { frame.remove(); form.remove(); resolve("sent") }
    form.submit()
})"""
_SANDBOX = """([url, body]) => new Promise(resolve => {
    const given = JSON.stringify([url, {method: "POST", mode: "no-cors", body}])
    const frame = document.createElement("iframe")
    frame.sandbox = "allow-scripts"
    const tell = "said => parent.postMessage(String(said), '*')"
    frame.srcdoc = `<script>fetch(...${given}).then(${tell}, ${tell})</script>`
    addEventListener("message", event => { frame.remove(); resolve(event.data) }, {once: true})
    document.body.append(frame)
})"""
_ELSEWHERE = "'/redirect?to=' + encodeURIComponent(url)"
POSTS = {
    "JSON": POST_JSON,
    "text": "async ([url, body]) => await (await fetch(url, {method: 'POST', body})).text()",
    "text without CORS": "([url, body]) => fetch(url, {method: 'POST', mode: 'no-cors', body}).then(String)",
    "a form": f"([url, body]) => ({_FORM})(url, body)",
    "a sandboxed frame": _SANDBOX,
    "a form that is redirected": f"([url, body]) => ({_FORM})({_ELSEWHERE}, body)",
    "a request that is redirected": (
        f"([url, body]) => fetch({_ELSEWHERE}, {{method: 'POST', mode: 'no-cors', body}}).then(String)"
    ),
}
"""Functions of a page by what they send: a body, which contains `=`, to a URL."""
GETS = {
    "CORS": "async url => await (await fetch(url)).text()",
    "a picture": """url => new Promise(resolve => {
        document.body.append(Object.assign(new Image(), {src: url, onerror: resolve, onload: resolve}))
    })""",
    "a script": """url => new Promise(resolve => {
        const events = {src: url, onerror: resolve, onload: resolve}
        document.body.append(Object.assign(document.createElement("script"), events))
    })""",
}
SOCKET = """([url, message]) => new Promise(resolve => {
    const socket = new WebSocket(url)
    socket.onopen = () => message ? (socket.send(message), resolve("open")) : resolve("open")
    socket.onerror = () => resolve("refused")
})"""


class _Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        # the same method and body again
        self._answer(307, *parse_qs(urlsplit(self.path).query)["to"])

    def _answer(self, status: int, location: str | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", "text/html")
        if location:
            self.send_header("location", location)
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>a stranger</title><body></body>")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def stranger() -> Iterator[int]:
    """The port of a server of pages without content."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Pages)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    join(thread)


@contextmanager
def page_at(browser: Browser, url: str) -> Iterator[Page]:
    with new_page(browser) as page:
        page.goto(url)
        yield page


def rebound_page(browser: Browser, address: str) -> AbstractContextManager[Page]:
    """A page whose origin is a stranger's name with the port of `address`, as if the name had led elsewhere
    until the page was loaded, and led here now."""
    return page_at(browser, f"http://evil.test:{urlsplit(address).port}/")


def send(page: Page, way: str, url: str, *body: str) -> str:
    """What a page reads of the answer, or the error; returns when the browser has got the answer."""
    caught = (
        f"async given => {{ try {{ return await ({way})(given) }} catch (error) {{ return String(error) }} }}"
    )
    return str(page.evaluate(caught, [url, *body] if body else url))
