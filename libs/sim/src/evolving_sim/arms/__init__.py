"""Arms: the policies a simulated cluster can be run with, ours and those the paper compares it with."""
