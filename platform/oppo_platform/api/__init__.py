"""HTTP: the JSON API of browsers and notebooks, and the workers' API."""
