"""lowbit under the names of other libraries."""
