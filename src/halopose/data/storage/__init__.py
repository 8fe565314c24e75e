"""Where bytes are when they are not in a folder here: at an address, in an archive, in long json."""
