"""An MCP server for tests: `mcp_pad.py stdio`, or `mcp_pad.py streamable-http PORT`."""

import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("pad", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def die() -> str:
    print("out of paper", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def hang(mark: str) -> str:
    Path(mark).write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(600)
    return ""


if __name__ == "__main__":
    transport, *port = sys.argv[1:]
    if port:
        server.run("streamable-http", port=int(port[0]))
    else:
        server.run("stdio")
