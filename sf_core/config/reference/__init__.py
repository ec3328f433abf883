"""The settings described for users and their editors: a commented page, and a JSON Schema."""
