"""Who gets which device, and how a node hears of it."""
