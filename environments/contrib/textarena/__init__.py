"""TextArena: games for one and two players."""
