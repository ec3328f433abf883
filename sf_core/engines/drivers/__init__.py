"""What stands between an engine and the data plane: a driver for each of the two kinds of engines."""
