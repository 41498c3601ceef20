"""Low-rank adapters over frozen weights."""
