"""What a user typed, as values: options, sizes, requests; and how an answer is written."""
