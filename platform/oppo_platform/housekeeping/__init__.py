"""The housekeeper process: what is done at intervals, in every app."""
