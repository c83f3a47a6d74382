"""The largest inputs that anybody can send, at each door: what they cost beside ordinary ones."""
