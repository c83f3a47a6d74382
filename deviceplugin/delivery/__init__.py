"""Delivers cards to containers: CDI files, and the exchange of allocation records if the runtime has no CDI."""
