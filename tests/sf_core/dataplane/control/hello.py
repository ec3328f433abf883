"""The first frame of an engine."""

from __future__ import annotations

from sf_core.engines import wire

HELLO = wire.Hello("run", 1, "r0", 0, "r0", "r0", 8)
