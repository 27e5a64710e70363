"""Published steps that were listed before any of them was priced: one file for each source, as in steps/. Nothing is fitted to them."""
