"""The Prefect flows. Importing them fails if other packages shadow ours, whatever started the process."""

import sys

from sf_core.surroundings import check_names

check_names(sys.path)
