"""The command line: thin, and imports what is heavy inside its commands."""
