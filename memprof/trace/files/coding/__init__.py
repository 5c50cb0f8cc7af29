"""How the columns of a recording are coded in Parquet."""
