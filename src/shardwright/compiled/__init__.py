"""What a compiler made of a layout, read back out of its program's text into the words of the core. No framework."""
