"""The kubectl plugin for Krew: its manifest, the program that Krew puts on the PATH, and the archive with both.

The archive has a wheel and a small program that installs it on the first run. It does not have the libraries, because
several of them are compiled for one platform and one minor version of Python (docs/kubectl.md, "By Krew").
"""
