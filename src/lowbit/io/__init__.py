"""Files of others: reading them without trusting them."""
