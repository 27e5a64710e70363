"""What moved between two plans."""
