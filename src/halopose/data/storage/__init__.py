"""Where bytes are: at an address, in an archive, in long json, in the log of a run that was stopped."""
