"""Reads a compiled program's text back into the terms of the core, and compares it with the plan. No framework."""
