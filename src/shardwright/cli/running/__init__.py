"""`train` and `compile`: an engine is loaded."""
