"""How fast it runs here. No public names."""
