"""Networks of the four roles behind one interface: our own small transformer, and any Hugging Face decoder."""
