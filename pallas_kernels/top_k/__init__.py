"""The k largest of rows: a kernel that selects, and the choice of it."""
