"""Options of commands that listen on an address."""

from __future__ import annotations

from typing import Any

import typer

from sf_core.config.addresses import MAX_PORT

Port = typer.Option(min=1, max=MAX_PORT, help="Port to listen on.")
AnyPort = typer.Option(min=0, max=MAX_PORT, help="Port to listen on. 0: any free port.")


def port_of(part: str) -> Any:
    return typer.Option(min=1, max=MAX_PORT, help=f"Port of {part}.")


def address(need: str) -> Any:
    return typer.Option(help=f"Address to listen on. Addresses other than loopback need {need}.")
