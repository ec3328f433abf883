"""Tools of an MCP server for the tool loop, over standard input and output or streamable HTTP."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import IO, Any, TextIO, cast

from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

from sf_core.agents.tool_loop import LostToolError, Tool

TOLD_BYTES = 400
"""Most of what a server wrote last that is told when it is lost."""


@asynccontextmanager
async def mcp_tools(server: str | Sequence[str], *, timeout_s: float = 60.0) -> AsyncIterator[list[Tool]]:
    """Connect to an MCP server and get its tools, for `run_tool_loop`. This function needs the extra
    `seamlessflow[mcp]`.

    `server` is the URL of a server (streamable HTTP), or a command that starts a server (standard input and
    output). The command runs until the `async with` block ends. `timeout_s` is the time limit, in seconds,
    for the start of the server and for each answer. Raises LostToolError if the server cannot be reached,
    ends, or does not answer in time. Calls of the tools raise LostToolError for the same reasons.

    ```python
    async with mcp_tools(["python", "my_server.py"]) as tools:
        return await run_tool_loop(endpoint, task.prompt, tools)
    ```
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as written:
        opened = _Server(server, timeout_s, written)
        try:
            tools = await opened.tools()
        except Exception as error:  # whatever the library and its transports raise
            raise opened.lose(error) from error
        try:
            yield tools
        finally:
            await opened.close(sys.exc_info()[1])


class _Server:
    def __init__(self, server: str | Sequence[str], timeout_s: float, written: IO[str]) -> None:
        self._name = server if isinstance(server, str) else " ".join(server)
        self._timeout_s = timeout_s
        self._written = written
        if isinstance(server, str):
            transport: Any = server
        else:
            program, *arguments = server
            parameters = StdioServerParameters(command=program, args=arguments)
            transport = stdio_client(parameters, errlog=cast(TextIO, written))
        self._client = Client(transport, read_timeout_seconds=timeout_s)

    async def tools(self) -> list[Tool]:
        async with asyncio.timeout(self._timeout_s):
            await self._client.__aenter__()
            page = await self._client.list_tools()
            tools = [*page.tools]
            while page.next_cursor:
                page = await self._client.list_tools(cursor=page.next_cursor)
                tools += page.tools
        return [self._tool(tool) for tool in tools]

    async def close(self, error: BaseException | None) -> None:
        """End the connection and the command. A cancelled block may have been so by the connection, whose
        fault it is then; other errors go on as they are."""
        is_cancelled = isinstance(error, asyncio.CancelledError)
        reason = (type(error), error, error.__traceback__) if is_cancelled and error else (None, None, None)
        try:
            await self._client.__aexit__(*reason)
        except Exception as fault:
            if is_cancelled:
                raise self.lose(fault) from fault

    def lose(self, error: BaseException) -> LostToolError:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        code = error.code if isinstance(error, MCPError) else None
        if isinstance(error, TimeoutError) or code == REQUEST_TIMEOUT:
            problem = f"did not answer within {self._timeout_s:g} s"
        elif code == CONNECTION_CLOSED:
            problem = "has ended"
        else:
            problem = f"cannot be used: {type(error).__name__}: {error}"
        number = self._written.fileno()
        # the command writes at the same position, which reading must not move
        end = os.pread(number, TOLD_BYTES, max(0, os.fstat(number).st_size - TOLD_BYTES))
        last = " ".join(end.decode(errors="replace").split())
        return LostToolError(
            f"MCP server {self._name} {problem}" + (f"; it wrote last: {last}" if last else "")
        )

    def _tool(self, tool: Any) -> Tool:
        async def call(**arguments: Any) -> str:
            try:
                result = await self._client.call_tool(tool.name, arguments)
            except MCPError as error:
                if error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                    raise self.lose(error) from error
                raise
            text = "\n".join(
                block.text if block.type == "text" else f"[{block.type}]" for block in result.content
            )
            if result.is_error:
                raise ValueError(text)
            return text

        return Tool(tool.name, tool.description or "", tool.input_schema, call)
