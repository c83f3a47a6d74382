"""What the image contains, and how it is built: by the Dockerfile, or as an archive without a container engine.

The code runs in the build stage of the Dockerfile too, so it imports only the standard library, and starts the programs
of requirements/build.txt and requirements/uv.txt.
"""
