"""Page of a flight, its charts and its pictures."""
