"""The Prefect flows. Importing them fails if other packages shadow ours, whatever started the process, and
makes log lines of the process printable.
"""

import sys

from sf_core.printable import clean_logs
from sf_core.surroundings import check_names

check_names(sys.path)
clean_logs()
