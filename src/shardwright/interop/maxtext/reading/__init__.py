"""MaxText's files as they stand: rules, models, sizes."""
