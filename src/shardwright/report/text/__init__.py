"""Words, columns and colours that every view is made of."""
