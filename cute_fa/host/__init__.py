"""The path of one call on the host: is it legal (`validate`), and is there a backend for it (`support`)."""
