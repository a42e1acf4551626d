"""Questions drawn or read for one reply each, and the conversations they are about."""
