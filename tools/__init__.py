"""Set-up and gates of a checkout; standard library only."""
