"""Which tasks next."""
