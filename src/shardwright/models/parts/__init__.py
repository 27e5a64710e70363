"""What tables of several families share: rows of attention, feed-forward layers, experts, and the two ends."""
