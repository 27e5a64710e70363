"""MaxText: ordered rules from logical names to mesh axes, as its configuration files state them."""
