"""Buttons on a drawn screen, to be pressed as an instruction says; what happens is seen, not told."""
