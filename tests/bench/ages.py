"""Files that look as if they had been written long ago."""

from __future__ import annotations

import os
import time
from pathlib import Path

HOUR_S = 3600.0


def age(folder: Path | str, by_s: float = HOUR_S) -> None:
    """Make the temporary files in a folder and below older."""
    then = time.time() - by_s
    for file in Path(folder).rglob("*.tmp"):
        os.utime(file, (then, then), follow_symlinks=False)
