"""The flows. Whoever starts them, what they import is ours."""

import sys

from sf_core.config.environment import check_names

check_names(sys.path)
