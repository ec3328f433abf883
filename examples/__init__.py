"""Families of tasks that are made, not collected. The product knows their names and imports none of them."""
