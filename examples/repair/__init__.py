"""Functions of one line to repair by tools."""
