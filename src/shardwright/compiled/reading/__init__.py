"""From the text to what the program does: collectives, products, memory."""
