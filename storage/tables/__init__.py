"""What is stored as Parquet: one module per table, and what all of them share."""
