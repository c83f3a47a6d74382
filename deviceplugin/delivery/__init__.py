"""Delivers cards to containers by CDI files, or by exchanging allocation records if the runtime has no CDI."""
