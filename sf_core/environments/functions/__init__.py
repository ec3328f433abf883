"""Functions that models write: what they return in the sandbox, and descriptions to make them from."""
