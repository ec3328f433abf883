"""What is settled before a run begins: its configuration, its sizes, and what its first tasks tell."""
