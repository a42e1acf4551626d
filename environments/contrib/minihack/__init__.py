"""MiniHack: NetHack's small levels in words."""
