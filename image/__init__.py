"""What the image contains, and how it is built: by the Dockerfile, or as an archive without a container engine.

The code also runs in the build stage of the Dockerfile, so it imports only the standard library, and starts only pip,
which takes the package index from its own settings.
"""
