"""The primitive operations: what each accepts and gives (rules.py), and what it computes (numpy_values.py)."""
