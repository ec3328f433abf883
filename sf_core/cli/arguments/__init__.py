"""How the command `sf` presents its commands and arguments, and completes them in a shell."""
