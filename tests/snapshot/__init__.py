"""What users type and what is stored or sent, as text: settings, schemas, journals, frames, metrics,
commands.

`python -m tests.snapshot` writes the files beside this one anew. A difference means that a run directory, a
journal, a configuration, a script or a dashboard of a user no longer fits: it needs a decision
(docs/decisions).
"""
