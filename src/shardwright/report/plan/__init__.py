"""A plan as people see it."""
