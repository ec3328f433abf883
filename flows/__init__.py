"""The Prefect flows. Importing them decides where their process imports from and its working directory,
whatever started it. From then on log lines of the process are printable."""

import os

from sf_core.process.environment_variables import flow_folder
from sf_core.process.import_path import import_from, user_folders
from sf_core.process.user_code import clean_logs

import_from(user_folders())
if folder := flow_folder():
    os.chdir(folder)
clean_logs()
