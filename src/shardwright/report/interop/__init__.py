"""Files of other programs, read and written."""
