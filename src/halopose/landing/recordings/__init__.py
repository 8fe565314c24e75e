"""Flights that others have recorded: cameras, runways and logs from files, replayed through the same filter."""
