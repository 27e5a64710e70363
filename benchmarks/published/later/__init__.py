"""Published steps that were found after the estimate was made, and to which nothing is fitted: one file for each source, as in steps/."""
