"""The Prefect flows. Importing them decides where their process imports from, whatever started it."""

from sf_core.import_path import import_from, user_folders

import_from(user_folders())
