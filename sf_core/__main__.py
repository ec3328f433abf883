"""`python -m sf_core` is `sf`."""

from sf_core.cli import main

main()
